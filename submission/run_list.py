"""List all runs in LOGDIR: state, target, minutes, tokens/s, config, and the keys that differ.

The newest run is the last one. Each config key in which the listed runs differ is a column, or for
the configs in configs/, in which runs with the same one differ. How a run ended comes from its log
and the ledger, everything else from its log, events and config. For a directory that no ledger
names, for example in an archive, everything comes from the files in it. Nothing is written, so the
command can be used during runs.

--series shows one series instead: its counts, the time left, and the samples and the loss at the
last step of each attempt. It needs no packages. A launcher on another machine counts as running
until it has not been heard of for ten minutes.

Exit code 0, even if there are no runs; 2 for wrong usage, no such directory, or with --series no
ledger or no such series.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from common.benchmarks import open_benchmark
from common.command_line import Parser, program
from common.errors import ConfigError
from common.machine.hardware import config_names
from common.paths import ROOT, results_folder
from common.records import ledger
from common.records.json_lines import is_number
from common.records.run_states import GOOD
from common.terminal import duration, plural, table
from common.text_tables import number
from common.training.arguments import is_run, run_or_runs
from submission.run import Run

COMMIT_LENGTH = 9  # number of characters of a commit's hash in the table
# Config keys that the column GPUs shows.
MACHINE_KEYS = ("gpu", "nodes", "gpus_per_node", "env")
SERIES_HEADS = ("attempt", "state", "minutes", "samples", "loss", "started (UTC)", "run")


@dataclass(frozen=True)
class RunRow:
    """A run in LOGDIR. The fields are the keys of --json."""

    benchmark: str  # name of the ledger's directory
    number: int  # of the attempt in its series, from 1; 0 without a ledger
    run: str  # name of the run directory
    path: str  # path of the run directory
    series: str  # ID of its series in the ledger
    runs_in_series: int  # number of good runs that the series was started for
    started: str  # UTC, as in the ledger
    seed: int
    state: str  # a key of common.records.run_states.WORDS
    state_words: str  # the description of `state`
    reason: str  # why the run is not good, or what failed after run_stop
    open: bool  # whether its launcher is alive and has yet to enter its end in the ledger
    loss: float | None  # at the last evaluation
    target: float | None  # the run has reached it if `loss` is at most `target`
    samples: int | None  # training sequences at the last evaluation
    minutes: float | None  # from run_start to run_stop
    tokens_per_s: float | None  # of all GPUs, without evaluations and padding
    gpu: str | None
    gpus: int | None
    config: str
    commit: str
    report: str  # path of report.html, "" if there is none
    settings: dict  # the keys of its config.toml


@dataclass(frozen=True)
class Column:
    """A column of the table of runs."""

    head: str
    value: Callable[[RunRow], str]
    is_text: bool = False


COLUMNS = (
    Column("run", lambda row: f"{row.benchmark}/{row.run}", is_text=True),
    Column("state", lambda row: row.state_words, is_text=True),
    Column("loss", lambda row: number(row.loss, ".4f")),
    Column("target", lambda row: number(row.target, "g")),
    Column("minutes", lambda row: number(row.minutes, ",.3f")),
    Column("tokens/s", lambda row: number(row.tokens_per_s, ",.0f")),
    Column("GPUs", lambda row: machine_of(row), is_text=True),
    Column("config", lambda row: config_of(row), is_text=True),
    Column("commit", lambda row: row.commit[:COMMIT_LENGTH] or "-", is_text=True),
)


def machine_of(row: RunRow) -> str:
    """Return the number and the kind of the GPUs of a run, "-" if one is unknown."""
    return f"{row.gpus} x {row.gpu}" if row.gpu and row.gpus else "-"


def config_of(row: RunRow) -> str:
    """Return the name of the config without .toml.

    Its suffixes +derived and +modified say that a run of a benchmark cannot be submitted, which no
    run of another model can. The columns of `columns_of` say what was changed.
    """
    name = row.config.removesuffix(".toml")
    return name.partition("+")[0] if row.benchmark == open_benchmark() else name


def columns_of(rows: list[RunRow]) -> list[Column]:
    """Return the columns of a table of `rows`: COLUMNS, and the config keys that differ."""
    groups: dict[tuple[str, str], list[dict]] = {}
    shipped: dict[str, list[str]] = {}  # benchmark -> its configs in configs/
    for row in rows:
        stem = row.config.removesuffix(".toml").partition("+")[0]
        if row.benchmark not in shipped:
            shipped[row.benchmark] = config_names(ROOT, row.benchmark)
        is_shipped = stem in shipped[row.benchmark]
        groups.setdefault((row.benchmark, stem if is_shipped else ""), []).append(row.settings)
    keys: dict[str, None] = {}
    for of_group in groups.values():
        keys |= dict.fromkeys(differing_keys(of_group))
    return [*COLUMNS, *(_key_column(key, rows) for key in keys)]


def differing_keys(configs: list[dict]) -> list[str]:
    """Return the keys of config.toml in which `configs` differ, except MACHINE_KEYS."""
    values: dict[str, set[str]] = {}
    for config in configs:
        for key, value in config.items():
            values.setdefault(key, set()).add(str(value))
    return [key for key, seen in values.items() if len(seen) > 1 and key not in MACHINE_KEYS]


def _key_column(key: str, rows: list[RunRow]) -> Column:
    """Return the column of a config key."""
    is_text = any(isinstance(row.settings.get(key), str) for row in rows)
    return Column(key, lambda row: str(row.settings.get(key, "-")), is_text)


def rows_of(log_dir: Path) -> list[RunRow]:
    """Return the runs in the ledgers of `log_dir`, oldest first.

    `log_dir`: LOGDIR, LOGDIR/<benchmark> or a run. Raises ConfigError if it is not a directory.
    """
    if not log_dir.is_dir():
        raise ConfigError(
            f"{log_dir}: no such directory",
            "runs are listed from the LOGDIR in which they were started",
            "name that directory, or set LOGDIR",
        )
    if is_run(log_dir):
        return [row_of(Run.in_directory(log_dir))]
    runs: list[Run] = []
    for folder in ledger.run_folders(log_dir):
        runs += [run for run in Run.in_folder(folder) if run.start or run.path.exists()]
    return [row_of(run) for run in sorted(runs, key=lambda run: run.order)]


def row_of(run: Run) -> RunRow:
    """Return the row of `run`."""
    start = run.start
    series = run.series
    config = start.get("config") or series.identity.get("config")
    commit = start.get("commit") or series.identity.get("commit") or run.versions.get("commit")
    report = run.folder / "report.html"
    return RunRow(
        benchmark=run.folder.parent.resolve().name,
        number=run.number,
        run=run.folder.name,
        path=str(run.folder),
        series=series.id,
        runs_in_series=series.goal,
        started=run.started,
        seed=run.seed or 0,
        state=run.state,
        state_words=run.state_words,
        reason=run.cause if run.start else run.reason,
        open=run.alive,
        loss=_last_loss(run),
        target=run.target,
        samples=run.samples,
        minutes=run.minutes,
        tokens_per_s=run.tokens_per_s,
        gpu=run.gpu,
        gpus=run.gpus,
        config=str(config or run.log.value("config_filename") or ""),
        commit=str(commit or ""),
        report=str(report) if report.is_file() else "",
        settings=run.settings,
    )


def _last_loss(run: Run) -> float | None:
    value = run.log.last("eval_accuracy")
    return float(value) if is_number(value) else None


def lines(rows: list[RunRow]) -> list[str]:
    """Return a table of `rows`, followed by the number of runs in each state by benchmark."""
    columns = columns_of(rows)
    alignment = "".join("<" if column.is_text else ">" for column in columns)
    heads = [column.head for column in columns]
    text = table([heads, *(cells(row, columns) for row in rows)], alignment)
    for benchmark, of_benchmark in by_benchmark(rows).items():
        counts = ", ".join(f"{count} {name}" for name, count in counts_of(of_benchmark).items())
        runs = plural(len(of_benchmark), "run")
        text += ["", f"{benchmark}: {runs}: {counts}"]
    return text


def cells(row: RunRow, columns: Sequence[Column]) -> list[str]:
    """Return the values of a row in `columns`."""
    return [column.value(row) for column in columns]


def by_benchmark(rows: list[RunRow]) -> dict[str, list[RunRow]]:
    """Return the rows of each benchmark, in the order of the benchmarks' names."""
    names = sorted({row.benchmark for row in rows})
    return {name: [row for row in rows if row.benchmark == name] for name in names}


def counts_of(rows: list[RunRow]) -> dict[str, int]:
    """Return the number of runs in each state, by the state's description, good runs first."""
    counts = Counter((row.state, row.state_words) for row in rows)
    order = sorted(counts, key=lambda key: (key[0] != GOOD, *key))
    return {key[1]: counts[key] for key in order}


# --- the series view ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeriesStatus:
    """The state of one series."""

    benchmark: str  # name of the ledger's directory
    series: str  # ID in the ledger
    config: str
    goal: int  # number of good runs that the series was started for
    good: int  # number of good runs so far
    failed: int  # number of failed attempts so far
    running: bool  # whether the launcher holds the lock of the series
    attempts: list[RunRow]  # `samples` and `loss`: at the last step or evaluation
    # Estimated time to the last good run; None if the series is not running, or before two starts.
    seconds_left: float | None


def read_series(folder: Path, wanted: str, now: datetime) -> list[SeriesStatus]:
    """Return the state at the time `now` of one series of each ledger in `folder`.

    `wanted`: see `ledger.choose`. Ledgers without such a series are left out. Raises ConfigError if
    no ledger has one.
    """
    paths = ledger.ledgers(folder)
    ids = {path: [record.id for record in ledger.read(path)] for path in paths}
    having = [path for path in paths if any(name.startswith(wanted) for name in ids[path])]
    found = []
    for path in having or paths:
        if record := ledger.choose(path, wanted):
            found.append(read_status(path.parent, record, now))
    if not found:
        raise ConfigError(
            f"{folder}: no series",
            f"there is no {ledger.NAME} in it or in its subfolders, or an empty one",
            "name the LOGDIR of the series, or set LOGDIR",
        )
    return found


def read_status(folder: Path, record: ledger.SeriesRecord, now: datetime) -> SeriesStatus:
    """Return the state of the series `record` at the time `now`.

    `folder`: LOGDIR/<benchmark>, the directory of the ledger.
    """
    running = ledger.launcher_is_alive(folder, record.id)
    attempts = [_attempt(run) for run in Run.in_series(folder, record)]
    return SeriesStatus(
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
    times = []
    for attempt in attempts:
        with contextlib.suppress(ValueError):
            times.append(datetime.strptime(attempt.started, ledger.TIME).replace(tzinfo=UTC))
    if len(times) < 2:
        return None
    each = median((after - before).total_seconds() for before, after in pairwise(times))
    remaining = record.goal - len(record.good)
    elapsed = (now - times[-1]).total_seconds() if record.open_starts else 0.0
    return max(0.0, each * remaining - min(elapsed, each))


def series_lines(status: SeriesStatus) -> list[str]:
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
    rows: list[Sequence[str]] = [SERIES_HEADS]
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
        text += ["", *table(rows, "<<>>><<")]
    reasons = [f"attempt {each.number}: {each.reason}" for each in status.attempts if each.reason]
    return [*text, "", *reasons] if reasons else text


# --- the command ----------------------------------------------------------------------------------


def parser() -> Parser:
    """Return the argument parser of `runs`."""
    parser = Parser(
        "runs",
        __doc__,
        ["runs", "runs results/llama31_8b", "runs --json", "runs results/llama31_8b --series"],
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="LOGDIR or LOGDIR/<benchmark>, or a benchmark (default: LOGDIR, or results)",
    )
    parser.add_argument(
        "--series",
        nargs="?",
        const="",
        type=_series_id,
        metavar="ID",
        help="show one series, by its ID in the run ledger or the beginning of the ID"
        " (default: the newest series with more than one run)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _series_id(text: str) -> str:
    if text and Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, which comes before --series")
    return text


def _print_runs(options: argparse.Namespace) -> None:
    folder = results_folder(os.environ)
    if options.directory:
        folder = run_or_runs(options.directory)
    is_named = options.directory or os.environ.get("LOGDIR")
    found: list[SeriesStatus] | list[RunRow]
    if options.series is not None:
        found = read_series(folder, options.series, datetime.now(UTC))
        text = "\n\n".join("\n".join(series_lines(status)) for status in found)
    else:
        found = rows_of(folder) if is_named or folder.is_dir() else []
        text = "\n".join(lines(found)) if found else f"no runs in {folder}"
    print(json.dumps([asdict(each) for each in found], indent=1) if options.json else text)


main = program(parser, _print_runs)

if __name__ == "__main__":
    sys.exit(main())
