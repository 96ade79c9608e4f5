"""Processes that this project starts, for runs, measurements, preflight and pip.

They are watched, ended in order, and none is left behind.
"""
