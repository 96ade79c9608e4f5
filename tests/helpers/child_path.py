"""PYTHONPATH of a child process that a test starts."""

import os
from pathlib import Path


def python_path(*folders: Path) -> str:
    """Return `folders` before what this process has: packages may be brought by PYTHONPATH."""
    own = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([own] if own else [])])
