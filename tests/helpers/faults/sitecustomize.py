"""Make a call of `os` fail in Python processes that have this folder in PYTHONPATH.

FAULT=FUNCTION,END,N,ERRNO,PROCESS[,done]: see `fail_once`. PROCESS is text in the command line of
the processes that are meant.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from failing_calls import fail_once

sys.path.pop()

if os.environ.get("FAULT"):
    name, end, nth, number, process, *done = os.environ["FAULT"].split(",")
    if process in Path("/proc/self/cmdline").read_text().replace("\0", " "):
        setattr(os, name, fail_once(getattr(os, name), end, int(nth), int(number), bool(done)))
