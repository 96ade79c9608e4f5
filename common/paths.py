"""Paths of the repository's root, of data and results, and of this user's cache folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def data_folder(benchmark: str, environment: Mapping[str, str]) -> Path:
    """Return the directory of a benchmark's data: DATADIR, or its default in the repository."""
    return Path(environment.get("DATADIR") or ROOT / "data" / benchmark)


def results_folder(environment: Mapping[str, str]) -> Path:
    """Return the directory of all runs: LOGDIR, or its default in the repository."""
    return Path(environment.get("LOGDIR") or ROOT / "results")


def cache_folder(name: str) -> Path:
    """Return this user's folder for files that can be rebuilt, such as compiled kernels.

    It is in XDG_CACHE_HOME (default: ~/.cache) and need not exist yet.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlperf-llama-training" / name
