"""Arguments that several commands share: --series ID, and repeated options NAME=VALUE."""

from __future__ import annotations

from collections.abc import Collection

from common.command_line import Parser, meant
from common.errors import ConfigError, listed

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


def parse_pairs(
    flag: str, texts: list[str], known: Collection[str], form: str = "NAME=VALUE"
) -> dict[str, str]:
    """Return name -> value for `texts` of the form NAME=VALUE.

    `flag`: the option that has these values. `form`: how to write it, for errors.

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
