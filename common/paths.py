"""Paths of the repository's root, of data and results, and of this user's cache folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from common.values import folder, of_variable, path

ROOT = Path(__file__).resolve().parents[1]


def data_folder(benchmark: str, environment: Mapping[str, str]) -> Path:
    """Return the directory of a benchmark's data: DATADIR, or its default in the repository.

    Raises ConfigError if DATADIR cannot be a directory.
    """
    return of_variable(environment, "DATADIR", folder) or ROOT / "data" / benchmark


def results_folder(environment: Mapping[str, str]) -> Path:
    """Return the directory of all runs: LOGDIR, or its default in the repository.

    Raises ConfigError if LOGDIR cannot be a directory.
    """
    return of_variable(environment, "LOGDIR", folder) or ROOT / "results"


def cache_folder(name: str) -> Path:
    """Return this user's folder for files that can be rebuilt, such as compiled kernels.

    It is in XDG_CACHE_HOME (default: ~/.cache). It need not exist, and whether it can be written is
    known only later: without it, a command works as well.
    """
    base = of_variable(os.environ, "XDG_CACHE_HOME", path) or Path.home() / ".cache"
    return base / "mlperf-llama-training" / name


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, and raise OSError for a pipe or a device, which may never end."""
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
