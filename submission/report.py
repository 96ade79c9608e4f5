"""`./run_and_time.sh report DIR`: an HTML page about a run or a series of runs, DIR/report.html.

A page is one file that includes its charts (common/html/page.py). If DIR holds a ledger or the
directories of several runs, such as LOGDIR/<benchmark>, the page is about the series.
submission/series.py decides which ten runs count, and which attempts are good, lost or not a run.
`report A B` compares the runs A and B and writes A/compared_with_B.html. Nothing is written into
any other directory.

Exit code: 0 success, 2 the directory is not a run, 17 cannot be written, 18 no mlperf-logging,
jinja2, or package for --export.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.command_line import Parser, program
from common.errors import ConfigError
from common.records import ledger
from launch.monitor import tracking
from launch.monitor.trackers import TRACKERS
from submission import gpu_samples, terminal
from submission.advice import Advice, advice
from submission.run_page import run_page
from submission.runs import Run, read_attempt
from submission.series import read_series
from submission.series_page import comparison_page, series_page

OF_A_RUN = ("result.txt", "events.jsonl", "config.toml", "failure.json", gpu_samples.NAME)


def parser(benchmark: str = "") -> Parser:
    parser = Parser(
        "report",
        "Write an HTML page about a run or a series, or a comparison of runs.",
        ["report results/llama31_8b", "report RUN OTHER_RUN", "report RUN --export tensorboard"],
    )
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="run directory, or LOGDIR/<benchmark>; several runs are compared",
    )
    parser.add_argument(
        "--series",
        default="",
        metavar="ID",
        help="series ID from the run ledger, or its beginning"
        " (default: the newest series with more than one run)",
    )
    parser.add_argument(
        "--export",
        choices=TRACKERS,
        help="send the run to this package instead of writing a page",
    )
    return parser


def write(folders: list[Path], series: str, sink: str | None) -> int:
    """Write the page of `folders`, or export their events to `sink`; return the exit code.

    `series`: ID of a series, or how it begins. Raises ConfigError if a folder is neither a run nor
    a series of this project, StorageError if the page cannot be written, PreflightError if
    mlperf-logging, jinja2 or the package of `sink` is missing.
    """
    if sink:
        for folder in folders:
            tracking.export(folder, sink)
        return 0
    first = folders[0]
    path = first / "report.html"
    hints: list[Advice] = []
    if len(folders) > 1:
        others = "_and_".join(folder.resolve().name for folder in folders[1:])
        path = first / f"compared_with_{others}.html"
        text = comparison_page([_read(folder) for folder in folders], first)
    elif _is_series(first):
        text = series_page(read_series([first], series), first)
    else:
        run = _read(first)
        hints = advice(run)
        text = run_page(run, hints)
    terminal.write(path, text)
    print(path)
    for hint in hints:
        print(f"advice     {hint.symptom}; worth {hint.worth}: {hint.do} ({hint.source})")
    return 0


def _is_series(folder: Path) -> bool:
    if _is_run(folder):
        return False
    return (folder / ledger.NAME).is_file() or any(folder.glob("*/result.txt"))


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in OF_A_RUN)


def _read(folder: Path) -> Run:
    """Return the run in `folder`. Raises ConfigError if it has none of the files of a run."""
    if _is_run(folder):
        return read_attempt(folder / "result.txt")
    if any(folder.glob("*/result.txt")):
        raise ConfigError(
            f"{folder} is a series",
            "report compares runs only",
            "name run directories, or compare two series with score A --against B",
        )
    why = "it is not a directory"
    if folder.is_dir():
        why = f"it has none of {', '.join(OF_A_RUN)}, no ledger and no runs"
    raise ConfigError(f"{folder}: no run", why, "name a run directory, or LOGDIR/<benchmark>")


main = program(parser, lambda options: write(options.directories, options.series, options.export))

if __name__ == "__main__":
    sys.exit(main())
