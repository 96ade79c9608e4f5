"""Processes that this project starts, for runs, measurements, preflight and pip: watched, ended in order, none left behind."""
