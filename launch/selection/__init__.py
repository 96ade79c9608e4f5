"""Choose a config for a request on a machine: all commands call `choose(request, machine)`.

request.py  what the command line and the environment ask for
machine.py  the visible GPUs, and the only place that asks their driver
choose.py   five stages that follow each other: name, read, override, fit, check
check.py    the last stage, and the choice with its objections
"""
