"""Files that all of pytest's processes share."""

import fcntl
import os
import shutil
from unittest import mock


def made_once(tmp_path_factory, name, make):
    """Return the folder that make(folder) fills in the first of pytest's processes.

    The other processes wait for it. Tests must only read it.
    """
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # shared by all workers of this run
    folder, done = place / name, place / f"{name}.done"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a failure
            folder.mkdir()
            with mock.patch.dict(os.environ):  # commands may set variables of their process
                make(folder)
            done.touch()
    return folder
