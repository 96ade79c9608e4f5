"""Parts that the commands share: --series, NAME=VALUE, writing files, tables and numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from common import terminal, text_tables
from common.command_line import Parser, meant
from common.errors import ConfigError, StorageError, listed, write_whole

MAX_LISTED = 8  # names that an error lists


def add_series_option(parser: Parser) -> None:
    """Add --series ID, which selects a series from the ledger."""
    parser.add_argument(
        "--series",
        default="",
        metavar="ID",
        help="series ID from the run ledger, or its beginning"
        " (default: the newest series with more than one run)",
    )


def write(path: Path, text: str) -> None:
    """Write `text` to `path` atomically. Raises StorageError if that fails."""
    try:
        write_whole(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}",
            error.strerror or str(error),
            "choose an existing directory with free space",
        ) from error


def pairs(
    flag: str, texts: list[str], known: Collection[str], form: str = "NAME=VALUE"
) -> dict[str, str]:
    """Return name -> value for `texts` of the form NAME=VALUE.

    `flag`: the option that has these values. `form`: the form, for errors.

    Raises ConfigError for another form, for a name that is not in `known`, and for a repeated name.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"{flag} {text}: expected {form}", "it has no =", f"write {flag} {form}"
            )
        if name not in known:
            raise ConfigError(
                f"{flag} {text}: unknown name {name!r}",
                f"known names: {listed(known, MAX_LISTED)}",
                meant(name, known, "use one of the known names"),
            )
        if name in values:
            raise ConfigError(
                f"{flag} {text}: {name} is given twice",
                f"its first value is {values[name]!r}",
                "give each name once",
            )
        values[name] = value.strip()
    return values


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, indented. The first and the last column are left-aligned.

    rich fits it to the terminal. Without rich, which `series status` may lack, cells are padded.
    """
    alignment = "<" + ">" * (len(rows[0]) - 2) + "<"
    if terminal.has_rich():
        lines = terminal.table(rows, alignment, indent=2)
    else:
        lines = ["  ".join(cells).rstrip() for cells in text_tables.align(rows, alignment)]
    return ["  " + line for line in lines]


def number(value: float | None, form: str) -> str:
    """Return `value` in the format `form`, or "-" for None."""
    return "-" if value is None else format(value, form)


def signed(minutes: float) -> str:
    """Return `minutes` with a sign and three decimals."""
    return f"{round(minutes, 3) + 0.0:+.3f}"  # + 0.0 turns -0.0 into 0.0


def plural(count: int, noun: str) -> str:
    """Return "1 error", "2 errors" and the like."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
