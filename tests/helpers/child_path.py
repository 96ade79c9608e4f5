"""PYTHONPATH of a child process that a test starts."""

import os
from pathlib import Path


def python_path(*folders: Path) -> str:
    """Return `folders`, followed by this process's PYTHONPATH, which may hold packages."""
    own = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([own] if own else [])])
