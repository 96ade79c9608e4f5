"""table.md and page.html of one result, or of several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(folder: Path, results: list[dict[str, Any]]) -> None:
    """Follows."""
