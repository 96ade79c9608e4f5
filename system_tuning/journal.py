"""The journal of `apply`: the old value of each file, from which `revert` restores it.

It is a JSON object, path -> [old value, value that `apply` writes]. It is in /run, because a reboot
empties /run and resets the settings as well. If `apply` runs several times, the journal keeps the
oldest value of each path.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

JOURNAL_PATH = "run/system_tuning.json"  # relative to the root of the file system


@contextlib.contextmanager
def locked(journal: Path) -> Iterator[None]:
    """Hold the journal's lock. Raise BlockingIOError if another process holds it."""
    with journal.with_suffix(".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def holder(journal: Path) -> str:
    """Describe the process that holds the journal's lock. The lock file contains its ID."""
    try:
        number = journal.with_suffix(".lock").read_text()
        name = Path(f"/proc/{int(number)}/cmdline").read_text().replace("\0", " ").strip()
    except (OSError, ValueError):
        return "another process"
    return f"process {number} ({name})"


def read(journal: Path) -> dict[str, list[str]]:
    """Return the journal's entries, path -> [old value, value that `apply` wrote].

    Raises ValueError if the file has another form.
    """
    try:
        entries = json.loads(journal.read_text()) if journal.exists() else {}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    pairs = entries.values() if isinstance(entries, dict) else [None]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, str) for value in pair)
        for pair in pairs
    ):
        raise ValueError("it must have an old and a new value, both strings, for each path")
    return entries


def write(journal: Path, entries: dict[str, list[str]]) -> None:
    """Replace the journal atomically. No fsync is needed, because a reboot deletes the journal."""
    temporary = journal.with_suffix(".new")
    temporary.write_text(json.dumps(entries, indent=1))
    temporary.rename(journal)
