"""`./run_and_time.sh series status [DIR]`: print the state of a series, while it runs or later.

The command reads the ledger, the lock of the launcher and the events of a running attempt. It
writes nothing, so it may be used from another shell at any time. Lock files exist only while a
launcher lives, and only the machine of the launcher can test them on a file system without locks.

Exit code: 0 printed, 2 no ledger or no such series. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from common.command_line import Parser, program
from common.errors import ConfigError
from common.paths import ROOT
from common.records import json_lines, ledger
from common.records.json_lines import is_number
from common.terminal import duration
from submission.terminal import add_series_option, number, table

GOOD = "good"
RUNNING = "running"
LOST = "lost"
TIME = "%Y-%m-%dT%H:%M:%SZ"  # of `started` in the ledger


@dataclass(frozen=True)
class Attempt:
    """One attempt of a series, as the ledger and its run directory show it."""

    number: int
    run: str  # name of the run directory
    state: str  # GOOD, RUNNING, LOST, or the kind of failure from the ledger
    started: str
    minutes: float | None  # from run_start to run_stop
    samples: int | None  # training sequences; of a running attempt, so far
    loss: float | None  # last training or evaluation loss of a running attempt
    reason: str


@dataclass(frozen=True)
class Status:
    """The state of one series."""

    benchmark: str  # name of the folder of the ledger
    series: str
    config: str
    goal: int
    good: int
    failed: int
    running: bool  # whether its launcher holds the lock of the series
    attempts: list[Attempt]
    seconds_left: float | None  # estimate; None if it is not running or nothing is known


def parser(benchmark: str = "") -> Parser:
    parser = Parser(
        "series",
        "Print the state of a series of runs, also while it runs.",
        ["series status", "series status results/llama31_8b", "series status --json"],
    )
    parser.add_argument("command", choices=("status",), help="the only subcommand")
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="LOGDIR or LOGDIR/<benchmark> (default: LOGDIR, or else results)",
    )
    add_series_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _print_status(options: argparse.Namespace) -> int:
    folder = options.directory or Path(os.environ.get("LOGDIR") or ROOT / "results")
    now = datetime.now(UTC)
    every = [
        read_status(path.parent, choose(path, options.series), now) for path in ledgers(folder)
    ]
    if options.json:
        print(json.dumps([asdict(status) for status in every], indent=1))
    else:
        print("\n\n".join("\n".join(lines(status)) for status in every))
    return 0


def ledgers(folder: Path) -> list[Path]:
    """Return the ledgers in `folder` or in its subfolders. Raises ConfigError if there is none."""
    if (folder / ledger.NAME).is_file():
        return [folder / ledger.NAME]
    paths = sorted(folder.glob(f"*/{ledger.NAME}"))
    if not paths:
        raise ConfigError(
            f"{folder}: no series",
            f"there is no {ledger.NAME} in it or in its subfolders",
            "name the LOGDIR of the series, or set LOGDIR",
        )
    return paths


def choose(path: Path, wanted: str) -> ledger.Record:
    """Return the series that `ledger.choose` finds. Raises ConfigError if there is none."""
    record = ledger.choose(path, wanted)
    if record is None:
        raise ConfigError(
            f"{path}: no series", "the ledger holds none", "name the LOGDIR of another series"
        )
    return record


def read_status(folder: Path, record: ledger.Record, now: datetime) -> Status:
    """Return the state of the series `record` of LOGDIR/<benchmark> `folder` at time `now`."""
    running = ledger.launcher_is_alive(folder, record.id)
    attempts = [
        _attempt(folder, start, record.ends.get(index), running)
        for index, start in sorted(record.starts.items())
    ]
    return Status(
        benchmark=folder.resolve().name,
        series=record.id,
        config=str(record.facts.get("config", "")),
        goal=record.goal,
        good=len(record.good),
        failed=len(record.failed),
        running=running,
        attempts=attempts,
        seconds_left=_seconds_left(record, attempts, now) if running else None,
    )


def _attempt(folder: Path, start: dict, end: dict | None, running: bool) -> Attempt:
    run = str(start["run"])
    started = str(start.get("started", ""))
    if end is None:
        samples, loss = progress(folder / run)
        state = RUNNING if running else LOST
        reason = "" if running else "its launcher ended without an entry in the ledger"
        return Attempt(start["attempt"], run, state, started, None, samples, loss, reason)
    minutes = end.get("minutes")
    samples = end.get("samples")
    return Attempt(
        number=start["attempt"],
        run=run,
        state=GOOD if end["exit_code"] == 0 else str(end["kind"]),
        started=started,
        minutes=minutes if is_number(minutes) else None,
        samples=samples if type(samples) is int else None,
        loss=None,
        reason=str(end["reason"]),
    )


def progress(run_dir: Path) -> tuple[int | None, float | None]:
    """Return the training sequences and the loss of the last event of a run, or None for each."""
    with contextlib.suppress(OSError):
        for event in reversed(json_lines.read(run_dir / "events.jsonl")[0]):
            samples = event.get("samples")
            loss = event.get("loss")
            if event.get("event") in ("step", "eval") and type(samples) is int:
                return samples, loss if is_number(loss) else None
    return None, None


def _seconds_left(record: ledger.Record, attempts: list[Attempt], now: datetime) -> float | None:
    """Estimate the time to the last good run, from the times between the starts of attempts."""
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
        return datetime.strptime(text, TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def lines(status: Status) -> list[str]:
    """Return the lines to print about one series."""
    counts = f"{status.good} of {status.goal} runs are good, {status.failed} failed"
    if status.running:
        state = "running"
    elif status.good >= status.goal:
        state = "finished"
    else:
        state = f"not running; continue with NEXP={status.goal} and --resume"
    text = [
        f"series {status.series}: {status.benchmark}, {status.config}",
        f"  {counts}; {state}",
    ]
    if status.seconds_left is not None:
        text.append(f"  about {duration(status.seconds_left)} left at the pace so far")
    rows: list[Sequence[str]] = [
        ("attempt", "state", "minutes", "samples", "loss", "started (UTC)", "run")
    ]
    for attempt in status.attempts:
        rows.append(
            (
                str(attempt.number),
                attempt.state,
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
    return [*text, *(["", *reasons] if reasons else [])]


main = program(parser, _print_status)

if __name__ == "__main__":
    sys.exit(main())
