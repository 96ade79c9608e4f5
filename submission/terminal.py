"""Shared parts of the commands: --series, NAME=VALUE, writing files, printing tables and
numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from common import terminal
from common.command_line import Parser, meant
from common.errors import ConfigError, StorageError, write_whole


def add_series_option(parser: Parser) -> None:
    """Add --series ID, which names a series of the ledger."""
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


def pairs(flag: str, texts: list[str], known: Collection[str]) -> dict[str, str]:
    """Return the values by name of `texts`, which have the form NAME=VALUE.

    `flag`: the option that they belong to. Raises ConfigError for another form, and for a name that
    is not in `known` or occurs twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag} {text}: expected NAME=VALUE", "there is no =", "add a value")
        if name not in known:
            raise ConfigError(
                f"{flag} {text}: unknown name {name!r}",
                f"known names: {_some(known)}",
                meant(name, known, "use one of the known names"),
            )
        if name in values:
            raise ConfigError(
                f"{flag} {text}: {name} was already given",
                f"its value is {values[name]!r}",
                "give each name once",
            )
        values[name] = value.strip()
    return values


def _some(names: Collection[str], most: int = 8) -> str:
    """Return at most `most` of `names`, separated by commas, and the number of the others."""
    shown = list(names)[:most]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown) + more


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return indented lines. The first and the last column are left-aligned, the others right."""
    alignment = "<" + ">" * (len(rows[0]) - 2) + "<"
    return ["  " + line for line in terminal.table(rows, alignment, indent=2)]


def number(value: float | None, form: str) -> str:
    """Return `value` in the format `form`, or "-" for None."""
    return "-" if value is None else format(value, form)


def signed(minutes: float) -> str:
    return f"{round(minutes, 3) + 0.0:+.3f}"  # + 0.0 turns -0.0 into 0.0


def plural(count: int, noun: str) -> str:
    """Return "1 error", "2 errors" and the like."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
