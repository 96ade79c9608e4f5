"""The launcher: from `./run_and_time.sh <benchmark>` to a verdict. Standard library only; torch lives in the processes it starts.

environment.py  the Python to use: what is there, or a virtual environment made once
__main__.py     the command line, and a run from first line to exit code
choose.py       which config, on which device, and why
screen.py       what a person reads before and after a run
rundir.py       the directory of a run: resolved config, versions; data files out of the page cache
nodes.py        several nodes: node 0 leads, the others follow; a lost one ends all
supervise.py    the processes: signals, hangs, and nothing left behind
verdict.py      why a run failed, from the records of its ranks
torchrun.py     torchrun without its banner, with its findings in a file
"""
