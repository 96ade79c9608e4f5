"""Arguments that several commands share: --series ID, and repeated options NAME=VALUE."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from common.command_line import Parser, pairs_of
from common.suggestions import unknown
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


def parse_pairs(
    flag: str, texts: list[str], known: Collection[str], form: str = "NAME=VALUE"
) -> dict[str, str]:
    """Return name -> value for `texts` of the form NAME=VALUE.

    `flag`: the option that has these values. `form`: how to write it, for errors.

    Raises ConfigError for another form, for a name that is not in `known`, and for a repeated name.
    """
    values = pairs_of(flag, texts, form)
    for name, value in values.items():
        if name not in known:
            raise unknown(f"{flag} {name}={value}: unknown name {name!r}", name, known)
    return values
