"""The launcher: from `./run_and_time.sh <benchmark>` to an exit code. Standard library only; torch runs in the processes it starts.

environment.py    the Python to use: the current one, or a virtual environment made once
__main__.py       the command line
job.py            benchmark, config, directories, node; the trainer's command and environment
select_config.py  which config, on which device, and why
run.py            timed runs, judged        bench.py    throughput and profile
series.py         attempts until enough runs are good, in a ledger
supervise.py      the processes: signals, hangs, and nothing left behind
multi_node.py     several nodes: node 0 leads, the others follow (imports torch)
diagnosis.py      which rank failed first, and why
run_directory.py, page_cache.py, sampler.py, console.py, torchrun.py
"""
