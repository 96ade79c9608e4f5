"""Packages named in requirements files, and installed packages.

Standard library only, because it is used before any package is installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path

OLDEST_TORCH = (2, 10)


def version_of(name: str) -> str:
    """Return the version of an installed package, or "" if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def in_container() -> bool:
    """Return whether this is a container of Docker, Podman or Apptainer."""
    signs = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
    return any(Path(sign).exists() for sign in signs)


def pip_install(*packages: str) -> str:
    """Return the command that installs `packages` into the Python that runs this program."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def requirements(path: Path) -> list[tuple[str, str]]:
    """Return (name, line) of each package in a requirements file, including files named by -r."""
    packages: list[tuple[str, str]] = []
    for line in path.read_text(errors="replace").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            packages += requirements(path.parent / text[3:].strip())
        elif text:
            packages.append((re.split(r"[<>=!~;\[ ]", text, maxsplit=1)[0], text))
    return packages
