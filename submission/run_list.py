"""List all runs of LOGDIR: state, target, minutes, tokens/s, config and commit.

The newest run is the last one. How a run ended comes from its log and the ledger, everything else
from its log, events and config. Of a directory that no ledger names, for example in an archive, all
comes from the files in it. Nothing is written, so the command can be used during runs.

Exit code 0, even if there are no runs; 2 for wrong usage or no such directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from common.command_line import Parser, program
from common.errors import ConfigError
from common.records import ledger
from common.records.json_lines import is_number
from common.records.run_states import GOOD
from common.terminal import plural
from common.terminal import table as table_lines
from submission.options import add_log_dir_argument, default_log_dir
from submission.output import number
from submission.run import Run

COMMIT_LENGTH = 9  # number of characters of a commit's hash in the table
# Columns of the table. TEXT_COLUMNS are those with text, the others contain numbers.
HEADS = ("run", "state", "loss", "target", "minutes", "tokens/s", "GPUs", "config", "commit")
TEXT_COLUMNS = (0, 1, 6, 7, 8)
ALIGNMENT = "".join("<" if column in TEXT_COLUMNS else ">" for column in range(len(HEADS)))


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


def rows_of(log_dir: Path) -> list[RunRow]:
    """Return the runs in the ledgers of `log_dir`, oldest first.

    `log_dir`: LOGDIR or LOGDIR/<benchmark>. Raises ConfigError if it is not a directory.
    """
    if not log_dir.is_dir():
        raise ConfigError(
            f"{log_dir}: no such directory",
            "runs are listed from the LOGDIR in which they were started",
            "name that directory, or set LOGDIR",
        )
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
    )


def _last_loss(run: Run) -> float | None:
    value = run.log.last("eval_accuracy")
    return float(value) if is_number(value) else None


def lines(rows: list[RunRow]) -> list[str]:
    """Return a table of `rows`, followed by the number of runs in each state by benchmark."""
    text = table_lines([HEADS, *(cells(row) for row in rows)], ALIGNMENT)
    for benchmark, of_benchmark in by_benchmark(rows).items():
        counts = ", ".join(f"{count} {name}" for name, count in counts_of(of_benchmark).items())
        runs = plural(len(of_benchmark), "run")
        text += ["", f"{benchmark}: {runs}: {counts}"]
    return text


def cells(row: RunRow) -> tuple[str, ...]:
    """Return the values of a row in the order of HEADS."""
    machine = f"{row.gpus} x {row.gpu}" if row.gpu and row.gpus else "-"
    return (
        f"{row.benchmark}/{row.run}",
        row.state_words,
        number(row.loss, ".4f"),
        number(row.target, "g"),
        number(row.minutes, ",.3f"),
        number(row.tokens_per_s, ",.0f"),
        machine,
        row.config.removesuffix(".toml"),
        row.commit[:COMMIT_LENGTH] or "-",
    )


def by_benchmark(rows: list[RunRow]) -> dict[str, list[RunRow]]:
    """Return the rows of each benchmark, in the order of the benchmarks' names."""
    names = sorted({row.benchmark for row in rows})
    return {name: [row for row in rows if row.benchmark == name] for name in names}


def counts_of(rows: list[RunRow]) -> dict[str, int]:
    """Return the number of runs in each state, by the state's description, good runs first."""
    counts = Counter((row.state, row.state_words) for row in rows)
    order = sorted(counts, key=lambda key: (key[0] != GOOD, *key))
    return {key[1]: counts[key] for key in order}


def parser() -> Parser:
    """Return the argument parser of `runs`."""
    parser = Parser(
        "runs",
        __doc__,
        ["runs", "runs results/llama31_8b", "runs --json"],
    )
    add_log_dir_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _print_runs(options: argparse.Namespace) -> None:
    folder = options.directory or default_log_dir()
    rows = rows_of(folder) if options.directory or folder.is_dir() else []
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif rows:
        print("\n".join(lines(rows)))
    else:
        print(f"no runs in {folder}")


main = program(parser, _print_runs)

if __name__ == "__main__":
    sys.exit(main())
