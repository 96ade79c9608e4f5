"""The packages that requirements files name. Standard library only: read before any of them is installed."""

from __future__ import annotations

import re
from pathlib import Path

OLDEST_TORCH = (2, 9)


def requirements(path: Path) -> list[tuple[str, str]]:
    """(name, line) of each package in a requirements file and in those it includes with -r."""
    found: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += requirements(path.parent / text[3:].strip())
        elif text:
            found.append((re.split(r"[<>=!~;\[ ]", text, maxsplit=1)[0], text))
    return found
