"""Print the state of a series of runs, during or after it.

The command reads the ledger, the launcher's lock and the events of the attempts. Nothing is
written, so it can be used from another shell at any time. A launcher on another machine counts as
running until it has not been heard of for ten minutes.

Exit code 0 on success, 2 for wrong usage, no ledger or no such series.
"""

# Standard library only: the command needs no package.

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from common.command_line import Parser, program
from common.errors import ConfigError
from common.records import ledger
from common.terminal import duration
from submission.options import add_log_dir_argument, add_series_option, default_log_dir
from submission.output import number, table
from submission.run import Run
from submission.run_list import RunRow, row_of


@dataclass(frozen=True)
class Status:
    """The state of one series."""

    benchmark: str  # name of the ledger's directory
    series: str  # ID in the ledger
    config: str
    goal: int  # number of good runs that the series was started for
    good: int  # number of good runs so far
    failed: int  # number of failed attempts so far
    running: bool  # whether the launcher holds the lock of the series
    attempts: list[RunRow]  # `samples` and `loss` are those of the last step or evaluation
    # Estimated time to the last good run; None if the series is not running, or before two starts.
    seconds_left: float | None


def parser() -> Parser:
    """Return the argument parser of `series`."""
    parser = Parser(
        "series",
        __doc__,
        ["series status", "series status results/llama31_8b", "series status --json"],
    )
    parser.add_argument("command", choices=("status",), help="the only subcommand")
    add_log_dir_argument(parser)
    add_series_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _print_status(options: argparse.Namespace) -> int:
    folder = options.directory or default_log_dir()
    now = datetime.now(UTC)
    statuses = []
    for path in ledgers(folder):
        record = choose(path, options.series)
        statuses.append(read_status(path.parent, record, now))
    if options.json:
        print(json.dumps([asdict(status) for status in statuses], indent=1))
    else:
        print("\n\n".join("\n".join(lines(status)) for status in statuses))
    return 0


def ledgers(folder: Path) -> list[Path]:
    """Return the ledgers in `folder` or in its subfolders.

    Raises ConfigError if there is none.
    """
    paths = ledger.ledgers(folder)
    if not paths:
        raise ConfigError(
            f"{folder}: no series",
            f"there is no {ledger.NAME} in it or in its subfolders",
            "name the LOGDIR of the series, or set LOGDIR",
        )
    return paths


def choose(path: Path, wanted: str) -> ledger.SeriesRecord:
    """Return the series that `wanted` selects from the ledger at `path` (see `ledger.choose`).

    Raises ConfigError if the ledger has no series, or none that matches.
    """
    record = ledger.choose(path, wanted)
    if record is None:
        raise ConfigError(
            f"{path}: no series", "the ledger is empty", "name the LOGDIR of another series"
        )
    return record


def read_status(folder: Path, record: ledger.SeriesRecord, now: datetime) -> Status:
    """Return the state of the series `record` at the time `now`.

    `folder`: LOGDIR/<benchmark>, the directory of the ledger.
    """
    running = ledger.launcher_is_alive(folder, record.id)
    attempts = [_attempt(run) for run in Run.in_series(folder, record)]
    return Status(
        benchmark=folder.resolve().name,
        series=record.id,
        config=str(record.identity.get("config", "")),
        goal=record.goal,
        good=len(record.good),
        failed=len(record.failed),
        running=running,
        attempts=attempts,
        seconds_left=_seconds_left(record, attempts, now) if running else None,
    )


def _attempt(run: Run) -> RunRow:
    """Return the row that `runs` has for `run`, with samples and loss of its last step."""
    samples, loss = run.progress
    return replace(row_of(run), samples=samples, loss=loss)


def _seconds_left(
    record: ledger.SeriesRecord, attempts: list[RunRow], now: datetime
) -> float | None:
    """Estimate the seconds to the last good run: the median time between starts, for each one left.

    Return None before the second attempt.
    """
    starts = [_time(attempt.started) for attempt in attempts]
    times = [start for start in starts if start is not None]
    if len(times) < 2:
        return None
    each = median((after - before).total_seconds() for before, after in pairwise(times))
    remaining = record.goal - len(record.good)
    elapsed = (now - times[-1]).total_seconds() if record.open_starts else 0.0
    return max(0.0, each * remaining - min(elapsed, each))


def _time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, ledger.TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def lines(status: Status) -> list[str]:
    """Return the lines to print about one series: its counts, a table of attempts, and reasons."""
    counts = f"{status.good} of {status.goal} runs are good, {status.failed} failed"
    if status.running:
        state = "running"
    elif status.good >= status.goal:
        state = "finished"
    else:
        state = "not running"
        if status.goal > 1:  # a series of one run cannot be resumed (launch/series.py)
            state += f"; continue with NEXP={status.goal} and --resume"
    text = [
        f"series {status.series}: {status.benchmark}, {status.config}",
        f"  {counts}; {state}",
    ]
    if status.seconds_left is not None:
        text.append(f"  about {duration(status.seconds_left)} left at the current rate")
    rows: list[Sequence[str]] = [
        ("attempt", "state", "minutes", "samples", "loss", "started (UTC)", "run")
    ]
    for attempt in status.attempts:
        rows.append(
            (
                str(attempt.number),
                attempt.state_words,
                number(attempt.minutes, ".3f"),
                number(attempt.samples, ",d"),
                number(attempt.loss, ".3f"),
                attempt.started.replace("T", " ").removesuffix("Z"),
                attempt.run,
            )
        )
    if status.attempts:
        text += ["", *table(rows)]
    reasons = [
        f"  attempt {attempt.number}: {attempt.reason}"
        for attempt in status.attempts
        if attempt.reason
    ]
    if reasons:
        text += ["", *reasons]
    return text


main = program(parser, _print_status)

if __name__ == "__main__":
    sys.exit(main())
