"""The launcher: from `./run_and_time.sh <benchmark>` to an exit code. Standard library only; torch runs in the processes it starts."""
