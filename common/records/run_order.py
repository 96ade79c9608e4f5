"""Order of the runs in LOGDIR/<benchmark>: by their starts in the records, never by their names.

Earlier versions named run directories by local time, so their names are not in order where the time
zone or the clock changed. Standard library only.
"""

from __future__ import annotations

import time
from pathlib import Path

from common.errors import ConfigError
from common.records import ledger, mlperf_log
from common.records.mlperf_log import Event

HEAD = ("init_stop", "run_start")  # keys that end the part of a log which is read here


def oldest_first(folder: Path) -> list[Path]:
    """Return the run directories in `folder`, LOGDIR/<benchmark>, in the order of their starts.

    The start is that in the ledger, otherwise that of the log. Directories without either come
    first, in the order of their names.
    """
    starts = ledger.start_order(folder / ledger.NAME)
    keys = {}
    for run_dir in folder.glob("*/"):
        key = starts.get(run_dir.name) or (_first_time(run_dir), 0)
        keys[run_dir] = (*key, run_dir.name)
    return sorted(keys, key=keys.__getitem__)


def continued_run(run_dir: Path) -> str:
    """Return the name of the run whose checkpoint the run in `run_dir` resumed from, or ""."""
    for event in _head(run_dir):
        if event.key == "resumed":
            return str(event.metadata.get("run", ""))
    return ""


def _first_time(run_dir: Path) -> str:
    """Return the time of the first line of the log, in the form of the ledger, or ""."""
    for event in _head(run_dir):
        try:
            return time.strftime(ledger.TIME, time.gmtime(event.time_ms / 1000))
        except (ValueError, OverflowError, OSError):
            return ""
    return ""


def _head(run_dir: Path) -> list[Event]:
    """Return the records of the log up to the first key in HEAD, none if it cannot be read."""
    events = []
    try:
        for record in mlperf_log.events(run_dir / "result.txt"):
            if isinstance(record, Event):
                events.append(record)
                if record.key in HEAD:
                    break
    except (ConfigError, OSError):
        pass
    return events
