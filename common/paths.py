"""Root of the repository, which holds the packages, configs/ and the scripts, and a cache."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cache_folder(name: str) -> Path:
    """Return this user's folder for files that can be made again, such as compiled kernels.

    It is in XDG_CACHE_HOME, or else in ~/.cache, and need not exist.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlperf-llama-training" / name
