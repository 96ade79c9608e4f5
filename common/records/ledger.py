"""The ledger LOGDIR/<benchmark>/attempts.jsonl: the attempts that were started and how they ended.
Append-only, with each line synced.

One JSON object per line, all with `event` and `series` (an id):

  series  a series begins: started, goal (number of good runs), facts (what must not change within
          it, see series.facts_of)
  start   an attempt begins: attempt (1, 2, ...), run (directory next to the ledger), seed, started
          (UTC), config (file name in the log), modified (the config differs from the repository's),
          commit
  end     the attempt ended: the same, and exit_code, kind (success, lost, or of failure.json),
          reason (for a good run: why its model was not saved), minutes (run_start to run_stop),
          samples (training sequences), cache (fadvise, no: how the data left the page cache),
          clock (the log has a run_start)
  goal    the series was resumed with a larger NEXP: goal
  closed  the series has its good runs; a larger NEXP may reopen it

An attempt with `start` and without `end` is running, or was lost with its launcher. A run is good
if its exit_code is 0. Several series may write at the same time: a lock per line keeps lines whole,
the id separates the series.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError, StorageError
from common.records import json_lines

NAME = "attempts.jsonl"
# Event -> the keys that a line of it must have, and their types.
LINES: dict[str, dict[str, type]] = {
    "series": {"goal": int, "facts": dict},
    "start": {"attempt": int, "run": str, "seed": int},
    "end": {"attempt": int, "run": str, "exit_code": int, "kind": str, "reason": str},
    "goal": {"goal": int},
    "closed": {},
}
# file systems without flock: some mounts of Lustre and NFS
ID = re.compile(r"[\w.-]{1,100}", re.ASCII)  # of a series: it names a lock file
NO_LOCKS = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.ENOLCK,
)


@dataclass
class Record:
    """A series in the ledger."""

    id: str
    goal: int
    facts: dict
    starts: dict[int, dict] = field(default_factory=dict)
    ends: dict[int, dict] = field(default_factory=dict)
    closed: bool = False

    def add(self, line: dict) -> None:
        """Add a line of this series. Raises KeyError if a key is missing."""
        event = line["event"]
        if event == "goal":
            self.goal = line["goal"]
            self.closed = False
        elif event == "closed":
            self.closed = True
        elif event in ("start", "end"):
            kept = self.starts if event == "start" else self.ends
            kept[line["attempt"]] = line

    @property
    def next_attempt(self) -> int:
        return max(self.starts, default=0) + 1

    @property
    def good(self) -> list[dict]:
        return [end for end in self.ends.values() if end["exit_code"] == 0]

    @property
    def failed(self) -> list[dict]:
        """Ends of the failed attempts, in the order of the attempts."""
        return [
            self.ends[number] for number in sorted(self.ends) if self.ends[number]["exit_code"] != 0
        ]

    @property
    def outcomes(self) -> list[bool]:
        """Outcomes of the runs in the order of the attempts: True for a good run.

        An attempt that never started its clock is not a run.
        """
        ends = [self.ends[number] for number in sorted(self.ends)]
        return [
            end["exit_code"] == 0
            for end in ends
            if end["exit_code"] == 0 or end.get("clock") is not False
        ]

    @property
    def open_starts(self) -> list[dict]:
        return [start for number, start in self.starts.items() if number not in self.ends]

    @property
    def seeds(self) -> set[int]:
        return {start["seed"] for start in self.starts.values()}


def append(path: Path, line: dict) -> None:
    """Write `line` whole and to the disk, or raise StorageError and leave the ledger unchanged."""
    try:
        create = 0  # A line without its series would be lost: the ledger was moved.
        if line["event"] == "series":
            create = os.O_CREAT
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | create | os.O_APPEND, 0o644)
        try:
            lock(descriptor, wait=True)
            if (end := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, end - 1) != b"\n":
                # A line that a power failure truncated must not corrupt the next one.
                os.write(descriptor, b"\n")
            json_lines.append_line(descriptor, line, sync=True)
        finally:
            os.close(descriptor)  # also releases the lock
    except OSError as error:
        raise StorageError(
            f"cannot write the ledger {path}",
            f"{error.strerror} (errno {error.errno}); "
            "an attempt that is not in the ledger would be lost",
            "free space, then continue with --resume",
        ) from None


def lock(descriptor: int, wait: bool) -> bool:
    """Take an exclusive flock until the process ends. Return False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def launcher_is_alive(folder: Path, series: str) -> bool:
    """Return whether the launcher of `series` holds its lock file in LOGDIR/<benchmark> `folder`.

    A killed launcher leaves the file behind, but not the lock. On a file system without locks the
    file alone decides.
    """
    try:
        descriptor = os.open(folder / f"series_{series}.lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        # A shared lock: two readers do not take each other for the launcher.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def choose(path: Path, wanted: str) -> Record | None:
    """Return the series of the ledger at `path` whose ID begins with `wanted`.

    For "", the newest series with more than one run, else the newest one; None without any. Raises
    ConfigError if `wanted` does not name exactly one series.
    """
    records = read(path)
    matches = [record for record in records if record.id.startswith(wanted)]
    if wanted and len(matches) != 1:
        known = ", ".join(f"{record.id} ({record.goal} runs)" for record in records) or "none"
        raise ConfigError(
            f"{path}: no series {wanted}",
            f"{len(matches)} series begin with this; the ledger has: {known}",
            "name one of these",
        )
    several = [record for record in matches if record.goal > 1]
    candidates = several or matches
    return candidates[-1] if candidates else None


def read(path: Path) -> list[Record]:
    """Return all series, oldest first. Truncated and foreign lines are skipped."""
    records: dict[str, Record] = {}
    for line in filter(_is_line, json_lines.read(path)[0]):
        name = line["series"]
        if line["event"] == "series":
            records[name] = Record(name, line["goal"], line["facts"])
        elif name in records:
            records[name].add(line)
    return list(records.values())


def _is_line(line: dict) -> bool:
    """Return whether `line` is valid: its run must be a directory next to the ledger."""
    event = line.get("event")
    if not isinstance(event, str) or event not in LINES or not isinstance(line.get("series"), str):
        return False
    if not ID.fullmatch(line["series"]):
        return False
    typed = all(type(line.get(key)) is kind for key, kind in LINES[event].items())
    run = line.get("run", "r")
    return typed and Path(run).name == run and "\0" not in run
