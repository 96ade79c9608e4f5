"""Arguments that several commands share: a folder of runs, and --series ID."""

from __future__ import annotations

from pathlib import Path

from common.command_line import Parser
from common.training.arguments import runs_in
from common.values import path


def runs_folder(text: str) -> Path:
    """Parse a path of runs or a log. A benchmark's name means its folder of LOGDIR."""
    return runs_in(path(text))


def add_series_option(parser: Parser) -> None:
    """Add --series ID, which selects a series from the ledger."""
    parser.add_argument(
        "--series",
        default="",
        metavar="ID",
        help="series ID from the run ledger, or its beginning"
        " (default: the newest series with more than one run)",
    )
