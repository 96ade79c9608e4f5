"""The launcher: from `./run_and_time.sh <benchmark>` to an exit code.

It uses only the standard library; torch runs in the processes it starts.
"""
