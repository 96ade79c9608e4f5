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

# Package -> the oldest version that is accepted, in a container as well. Older ones of
# sentencepiece (CVE-2026-1260) and pyarrow (CVE-2026-25087) corrupt memory when they read a hostile
# file. From older ones of jinja2 (CVE-2025-27516), a chat template escapes the sandbox.
OLDEST = {"torch": "2.10", "sentencepiece": "0.2.1", "pyarrow": "23.0.1", "jinja2": "3.1.6"}


def version_of(name: str) -> str:
    """Return the version of an installed package, or "" if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version without trailing zeros.

    "3.7.0+amd.rocm7.0" gives (3, 7).
    """
    match = re.match(r"\d+(\.\d+)*", version.strip())
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_recent(name: str, version: str) -> bool:
    """Return whether `version` of a package is at least the one in OLDEST."""
    return name not in OLDEST or release(version) >= release(OLDEST[name])


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
