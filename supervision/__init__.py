"""Processes that this project starts: with which environment and on which CPUs, watched for hangs, ended in order, none left behind.

Runs, measurements, preflight and the door's pip are started by it. It imports neither torch nor the rooms that use it.
"""
