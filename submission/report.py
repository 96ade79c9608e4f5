"""Write an HTML page about a run, a series or all runs, or a comparison of runs.

The page is DIR/report.html, one file that includes its charts. Its subject depends on DIR:

    a run directory                                the run
    LOGDIR/<benchmark> with a series               the series
    LOGDIR, or LOGDIR/<benchmark> of single runs   a list of all runs

With --watch, the page is rewritten periodically until the runs in DIR have ended. If DIR does not
exist yet, --watch waits for a run to start in it. `report A B` compares the runs A and B and writes
A/compared_with_B.html. Nothing is written into any other directory.

Exit code 0 on success, 2 if the directory has no runs, 17 if the page cannot be written, 18 without
mlperf-logging, jinja2 or the package of --export.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from common.command_line import Parser, program
from common.errors import ConfigError, write_text
from common.records import ledger, tracking
from common.records.trackers import TRACKERS
from common.training.arguments import RUN_FILES, is_run, run_or_runs
from submission.advice import Advice, advice
from submission.options import add_series_option
from submission.run import Run
from submission.run_list import RunRow, rows_of
from submission.run_list_page import run_list_page
from submission.run_page import run_page
from submission.series import read_series
from submission.series_page import comparison_page, series_page

WATCH_S = 10.0  # time between two writings of the page with --watch
MAX_NAMED = 4  # runs in the file name of a comparison, which may have at most 255 bytes
WAIT_S = 1.0  # between two looks for a directory that --watch waits for


def parser() -> Parser:
    """Return the argument parser of `report`."""
    parser = Parser(
        "report",
        __doc__,
        [
            "report results/llama31_8b",
            "report results --watch",
            "report RUN OTHER_RUN",
            "report RUN --export tensorboard",
        ],
    )
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="run directory or a file in it, LOGDIR/<benchmark> or its benchmark, or LOGDIR; "
        "several run directories are compared",
    )
    add_series_option(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help=f"write the page every {WATCH_S:.0f} s until the runs in DIR have ended",
    )
    parser.add_argument(
        "--export",
        choices=TRACKERS,
        help="send the run to this package instead of writing a page",
    )
    return parser


def _report(options: argparse.Namespace) -> None:
    """Write the page, or export the events of the runs, according to the options.

    Raises ConfigError if a directory has no runs of this project. Raises StorageError if the page
    cannot be written. Raises PreflightError if mlperf-logging, jinja2 or the package of --export is
    missing.
    """
    folders = [run_or_runs(path) for path in options.directories]
    first = folders[0]
    if options.watch and (options.export or len(folders) > 1):
        raise ConfigError(
            "--watch cannot be used with --export or several directories",
            "it writes the page of the runs in one directory",
            "use it alone",
        )
    if options.series and (options.export or len(folders) > 1):
        raise ConfigError(
            "--series cannot be used with --export or several directories",
            "it selects the series of one page",
            "name one LOGDIR/<benchmark>, or leave out --series",
        )
    if len({folder.resolve() for folder in folders}) < len(folders):
        names = ", ".join(map(str, options.directories))
        raise ConfigError(
            f"a run is named twice: {names}", "a comparison needs different runs", "name each once"
        )
    if options.export:
        for folder in folders:
            tracking.export(folder, options.export)
        return
    path = first / "report.html"
    hints: list[Advice] = []
    if len(folders) > 1:
        others = [folder.resolve().name for folder in folders[1:]]
        if len(others) > MAX_NAMED:
            others[MAX_NAMED:] = [f"{len(others) - MAX_NAMED}_more"]
        path = first / f"compared_with_{'_and_'.join(others)}.html"
        write_text(path, comparison_page([_read(folder) for folder in folders], first))
    else:
        if options.watch:
            _watch(first, options.series)
        hints = write(first, options.series)
    print(path)
    for hint in hints:
        print(f"advice     {hint.symptom}; worth {hint.worth}: {hint.do} ({hint.source})")


def write(folder: Path, series: str, refresh_s: float | None = None) -> list[Advice]:
    """Write folder/report.html. Return the advice on the page of a run, [] for other pages.

    `series`: ID of a series, or its beginning. `refresh_s`: see `page.render`. Raises the errors of
    `_report`.
    """
    hints: list[Advice] = []
    if series and not (folder / ledger.NAME).is_file():
        raise ConfigError(
            f"--series {series}: {folder} has no {ledger.NAME}",
            "only a run ledger has series",
            "name LOGDIR/<benchmark>, or leave out --series",
        )
    if is_run(folder):
        run = _read(folder)
        hints = advice(run)
        text = run_page(run, hints, refresh_s)
    elif not series and (rows := _single_runs(folder)):
        text = run_list_page(rows, folder, refresh_s)
    elif (folder / ledger.NAME).is_file() or any(folder.glob("*/result.txt")):
        text = series_page(read_series([folder], series), folder, refresh_s)
    else:
        raise ConfigError(
            f"{folder} is not a run" if folder.exists() else f"{folder} does not exist",
            _why_no_run(folder),
            "name a run directory, LOGDIR/<benchmark>, or LOGDIR",
        )
    write_text(folder / "report.html", text)
    return hints


def _watch(folder: Path, series: str) -> None:
    """Write the page of `folder` every WATCH_S seconds while one of its runs is running.

    If there is no such directory yet, wait for it. A browser that shows the page reloads it at the
    same interval.
    """
    _wait_for_run(folder)
    print(f"{folder / 'report.html'}: written every {WATCH_S:.0f} s while a run is running")
    while any(row.open for row in rows_of(folder)):
        write(folder, series, WATCH_S)
        time.sleep(WATCH_S)


def _wait_for_run(folder: Path) -> None:
    """Return at once if `folder` exists, otherwise as soon as a run has started in it."""
    if folder.exists():
        return
    print(f"{folder}: waiting for a run to start in this directory, which does not exist yet")
    while not folder.is_dir() or not rows_of(folder):
        time.sleep(WAIT_S)


def _single_runs(folder: Path) -> list[RunRow]:
    """Return the runs of a LOGDIR, or of a LOGDIR/<benchmark> without a series.

    Return [] if `folder` is a LOGDIR/<benchmark> with a series, or with runs and no ledger.
    """
    if any(folder.glob("*/result.txt")) and not ledger.ledgers(folder):
        return []
    rows = rows_of(folder) if folder.is_dir() else []
    if (folder / ledger.NAME).is_file() and any(row.runs_in_series > 1 for row in rows):
        return []
    return rows


def _read(folder: Path) -> Run:
    """Return the run in `folder`. Raises ConfigError if it has none of the files of a run."""
    if is_run(folder):
        return Run.in_directory(folder)
    if any(folder.glob("*/result.txt")):
        raise ConfigError(
            f"{folder} is a series",
            "report compares runs only",
            "name run directories, or compare two series with score A --against B",
        )
    raise ConfigError(f"{folder} is not a run", _why_no_run(folder), "name a run directory")


def _why_no_run(folder: Path) -> str:
    if not folder.is_dir():
        return "it is not a directory"
    return f"it has no ledger, no runs, and none of {', '.join(RUN_FILES)}"


main = program(parser, _report)

if __name__ == "__main__":
    sys.exit(main())
