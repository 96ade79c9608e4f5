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
from submission.advice import advice
from submission.run_page import run_page
from submission.runs import Run, read_attempt
from submission.series import read_series
from submission.series_page import comparison_page, series_page

OF_A_RUN = ("result.txt", "events.jsonl", "config.toml", "failure.json", gpu_samples.NAME)


def parser(benchmark: str = "") -> Parser:
    about = "Write the page of a run, of a series, or of runs compared: report.html in DIR."
    parser = Parser(
        "report",
        about,
        ["report results/llama31_8b", "report RUN OTHER_RUN", "report RUN --export tensorboard"],
    )
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="of a run, or LOGDIR/<benchmark>; several runs are compared",
    )
    parser.add_argument(
        "--series",
        default="",
        metavar="ID",
        help="which series of the ledger (how its id begins); default: the newest",
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
    first, path, found = folders[0], folders[0] / "report.html", []
    if sink:
        for folder in folders:
            tracking.export(folder, sink)
        return 0
    if len(folders) > 1:
        path = (
            first
            / f"compared_with_{'_and_'.join(folder.resolve().name for folder in folders[1:])}.html"
        )
        text = comparison_page([_read(folder) for folder in folders], first)
    elif not _is_run(first) and (
        (first / ledger.NAME).is_file() or any(first.glob("*/result.txt"))
    ):
        text = series_page(read_series([first], series), first)
    else:
        run = _read(first)
        text = run_page(run, found := advice(run))
    terminal.write(path, text)
    print(
        path,
        *(
            f"advice     {each.symptom}; worth {each.worth}: {each.do} ({each.source})"
            for each in found
        ),
        sep="\n",
    )
    return 0


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in OF_A_RUN)


def _read(folder: Path) -> Run:
    """Return the run in `folder`. Raises ConfigError if it has none of the files of a run."""
    if _is_run(folder):
        return read_attempt(folder / "result.txt")
    why = (
        f"it has none of {', '.join(OF_A_RUN)}, no ledger and no runs"
        if folder.is_dir()
        else "it is not a directory"
    )
    if any(folder.glob("*/result.txt")):
        why = "it is a series, and only runs are put beside each other"
    raise ConfigError(
        f"{folder}: no such run",
        why,
        "name directories of runs; of two series: score A --against B",
    )


main = program(parser, lambda options: write(options.directories, options.series, options.export))

if __name__ == "__main__":
    sys.exit(main())
