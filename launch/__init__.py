"""The launcher: from `./run_and_time.sh <benchmark>` to an exit code.

The launcher uses only the standard library. torch runs in the processes that it starts.
"""
