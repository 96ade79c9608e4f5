"""Processes for runs, measurements, preflight and pip: start, watch and stop them.

No process is left behind.
"""
