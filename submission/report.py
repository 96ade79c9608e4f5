"""`python -m submission.report DIR`: one page about one run, DIR/report.html, or about a series of runs.

Self-contained: no script, no link to anything outside, curves as inline SVG, light and dark. A run that died early gets a report of
what there is (submission/run_page.py). If DIR holds a ledger or the directories of several runs, such as LOGDIR/<benchmark>, the
page is about them (submission/series_page.py). Nothing is written into any other directory.

Exit code: 0, 2 for a directory that is no run, 17 cannot be written, 18 no mlperf-logging.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.errors import ConfigError, StorageError
from records import ledger
from submission import gpu_samples, run_page, series_page, terminal
from submission.runs import read_attempt
from submission.series import read_series

OF_A_RUN = ("result.txt", "events.jsonl", "config.toml", "failure.json", gpu_samples.NAME)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.report", description="Write report.html into the directory of a run, or of a series.")
    parser.add_argument("directory", type=Path, help="of a run, or LOGDIR/<benchmark>")
    parser.add_argument("--series", default="", metavar="ID", help="which series of the ledger (how its id begins); default: the newest")
    options = parser.parse_args(arguments)
    return terminal.run(lambda: write(options.directory, options.series))


def page(folder: Path, series: str = "") -> str:
    """The page about `folder` as HTML text. Raises ConfigError for what is neither a run nor a series of ours."""
    if any((folder / name).exists() for name in OF_A_RUN):
        return run_page.render(read_attempt(folder / "result.txt"))
    if (folder / ledger.NAME).is_file() or any(folder.glob("*/result.txt")):
        return series_page.render(read_series([folder], series))
    why = f"it has none of {', '.join(OF_A_RUN)}, no ledger and no runs" if folder.is_dir() else "it is not a directory"
    raise ConfigError(f"{folder}: no such run", why, "name the directory that a run has written, or LOGDIR/<benchmark>")


def write(folder: Path, series: str) -> int:
    """Raises ConfigError, StorageError."""
    path, text = folder / "report.html", page(folder, series)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}", str(error), "free space, or make the directory writable") from error
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
