"""The run ledger LOGDIR/<benchmark>/attempts.jsonl: all attempts of all series, and how they ended.

The file is append-only, and each line is synced to the disk. A line is a JSON object with `event`,
`series` (an ID) and further keys:

  series  a series begins: started, goal (number of good runs), facts (what must not change within
          it, see series.identity_of)
  start   an attempt begins: attempt (1, 2, ...), run (directory next to the ledger), seed, started
          (UTC), config (file name in the log), modified (whether the config differs from the
          repository's), commit
  end     an attempt ended: the keys of start, and exit_code, kind (success, lost, or the kind in
          failure.json), reason (for a good run: what failed after run_stop), minutes (run_start to
          run_stop), samples (training sequences), cache (fadvise or no: how the data was dropped
          from the page cache), clock (whether the log has a run_start)
  goal    the series was resumed with a larger NEXP: goal
  closed  the series has its good runs; a larger NEXP may reopen it

An attempt with `start` and without `end` is running, or its launcher was killed. A run is good if
its exit_code is 0. Several series may write at the same time: a lock keeps each line whole, and the
ID separates the series.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from common import lock_files
from common.errors import ConfigError, StorageError
from common.folder_walk import walk
from common.records import json_lines

NAME = "attempts.jsonl"
LOG = "result.txt"  # name of the log in the directory of a run
ARCHIVE_LEVELS = 4  # of folders below LOGDIR, such as archive/2026/<benchmark>/<run>
TIME = "%Y-%m-%dT%H:%M:%SZ"  # format of `started`, UTC
# Event -> its required keys and their types.
LINES: dict[str, dict[str, type]] = {
    "series": {"goal": int, "facts": dict},
    "start": {"attempt": int, "run": str, "seed": int},
    "end": {"attempt": int, "run": str, "exit_code": int, "kind": str, "reason": str},
    "goal": {"goal": int},
    "closed": {},
}
STARTED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
ID = re.compile(r"[\w.-]{1,100}", re.ASCII)  # of a series: it is part of a file name


@dataclass
class SeriesRecord:
    """The lines of one series in the ledger."""

    id: str = ""
    goal: int = 1  # number of good runs
    # The facts that must not change within the series, from its line `series`.
    identity: dict = field(default_factory=dict)
    starts: dict[int, dict] = field(default_factory=dict)  # attempt -> its line `start`
    ends: dict[int, dict] = field(default_factory=dict)  # attempt -> its line `end`
    # Attempt -> key that sorts attempts by their starts, also across ledgers. Within a ledger the
    # order of the lines decides, so that it does not matter if the clock is set back: a start
    # counts as no earlier than the one before it.
    order: dict[int, tuple[str, int]] = field(default_factory=dict)
    closed: bool = False

    def add(self, line: dict) -> None:
        """Add a line of this series. Raises KeyError if a key is missing."""
        event = line["event"]
        if event == "goal":
            self.goal = line["goal"]
            self.closed = False
        elif event == "closed":
            self.closed = True
        elif event == "start":
            self.starts[line["attempt"]] = line
        elif event == "end":
            self.ends[line["attempt"]] = line

    @property
    def next_attempt(self) -> int:
        return max(self.starts, default=0) + 1

    @property
    def good(self) -> list[dict]:
        """Lines `end` of the good runs."""
        return [end for end in self.ends.values() if end["exit_code"] == 0]

    @property
    def failed(self) -> list[dict]:
        """Lines `end` of the failed attempts, in the order of the attempts."""
        return [end for _, end in sorted(self.ends.items()) if end["exit_code"] != 0]

    @property
    def outcomes(self) -> list[bool]:
        """Outcomes of the runs in the order of the attempts: True for a good run.

        A failed attempt that never started its clock is not a run.
        """
        outcomes = []
        for _, end in sorted(self.ends.items()):
            good = end["exit_code"] == 0
            if good or end.get("clock") is not False:
                outcomes.append(good)
        return outcomes

    @property
    def open_starts(self) -> list[dict]:
        """Lines `start` of the attempts that have not ended."""
        return [start for number, start in self.starts.items() if number not in self.ends]

    @property
    def seeds(self) -> set[int]:
        return {start["seed"] for start in self.starts.values()}


def append(path: Path, line: dict) -> None:
    """Append `line` and sync it to the disk.

    Raises StorageError. The ledger is then unchanged.
    """
    try:
        flags = os.O_RDWR | os.O_APPEND
        # Only the first line of a series creates the file. A new ledger would lack the facts of the
        # series of any other line.
        if line["event"] == "series":
            flags |= os.O_CREAT
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o644)
        try:
            lock_files.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A power failure truncated the last line. Do not append this one to it.
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


def lock_name(series: str) -> str:
    """Return the name of the lock that the launcher of `series` owns in the ledger's directory."""
    return f"series_{series}"


def launcher_is_alive(folder: Path, series: str) -> bool:
    """Return whether the launcher of `series` is running, as far as can be seen from here.

    `folder`: LOGDIR/<benchmark>. A launcher that cannot be examined counts as running until it has
    been silent for lock_files.SILENT_S.
    """
    launcher = lock_files.owner(folder, lock_name(series))
    return launcher is not None and not launcher.is_silent


def run_folders(log_dir: Path) -> list[Path]:
    """Return the folders LOGDIR/<benchmark> in `log_dir`, or `log_dir` if it is one, sorted.

    They are the folders with a ledger or with directories of runs. They may be in folders of an
    archive, and all of these may be links. The directories of runs are not searched.
    """
    found = set()
    for folder, subfolders, names in walk(log_dir):
        if NAME in names:
            found.add(folder)
        elif LOG in names and folder != log_dir:
            found.add(folder.parent)
        elif len(folder.relative_to(log_dir).parts) < ARCHIVE_LEVELS:
            continue
        subfolders.clear()
    return sorted(found)


def ledgers(log_dir: Path) -> list[Path]:
    """Return the ledgers of the folders of `run_folders`."""
    paths = [folder / NAME for folder in run_folders(log_dir)]
    return [path for path in paths if path.is_file()]


def choose(path: Path, wanted: str) -> SeriesRecord | None:
    """Return the series of the ledger at `path` whose ID begins with `wanted`.

    If `wanted` is "", return the newest series with more than one run, else the newest one, else
    None. Raises ConfigError if `wanted` does not name exactly one series.
    """
    records = read(path)
    matches = [record for record in records if record.id.startswith(wanted)]
    if wanted and len(matches) != 1:
        known = ", ".join(f"{record.id} ({record.goal} runs)" for record in records) or "none"
        raise ConfigError(
            f"{path}: no series {wanted}",
            f"{len(matches)} IDs begin with it; the ledger has: {known}",
            "name one of these",
        )
    several = [record for record in matches if record.goal > 1]
    candidates = several or matches
    return candidates[-1] if candidates else None


def read(path: Path) -> list[SeriesRecord]:
    """Return all series, oldest first. Truncated and invalid lines are skipped.

    A series whose first line is among these has no identity, and its goal is the number of its
    attempts.
    """
    records: dict[str, SeriesRecord] = {}
    latest = ""
    lines, _ = json_lines.read(path)
    for number, line in enumerate(filter(_is_valid, lines)):
        name = line["series"]
        if line["event"] == "series":
            records[name] = SeriesRecord(name, line["goal"], line["facts"])
        elif line["event"] == "start" or name in records:
            records.setdefault(name, SeriesRecord(name, goal=0)).add(line)
        if line["event"] == "start":
            started = str(line.get("started", ""))
            if STARTED.fullmatch(started):
                latest = max(latest, started)
            records[name].order[line["attempt"]] = (latest, number)
    for record in records.values():
        record.goal = record.goal or max(1, record.next_attempt - 1)
    return list(records.values())


def _is_valid(line: dict) -> bool:
    """Return whether `line` has the keys of its event, with the right types.

    A series must be a valid file name, and a run the name of a directory next to the ledger.
    """
    event = line.get("event")
    if not isinstance(event, str) or event not in LINES:
        return False
    series = line.get("series")
    if not isinstance(series, str) or not ID.fullmatch(series):
        return False
    for key, kind in LINES[event].items():
        if type(line.get(key)) is not kind:
            return False
    if "run" not in LINES[event]:
        return True
    run = line["run"]
    # Not printable are a NUL and a lone surrogate, which cannot be in a path.
    return Path(run).name == run and run not in ("", "..") and run.isprintable()
