"""What the commands here share: files they write, NAME=VALUE, tables and numbers on a terminal. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from common import text_tables
from common.errors import ConfigError, StorageError, write_whole


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing of it. Raises StorageError."""
    try:
        write_whole(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}",
            error.strerror or str(error),
            "name a directory that exists and has space",
        ) from error


def pairs(flag: str, texts: list[str], known: Collection[str]) -> dict[str, str]:
    """`texts` are NAME=VALUE. Raises ConfigError for a name that is not `known`, or comes twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known or name in found:
            raise ConfigError(
                f"{flag} {text}",
                f"it is not NAME=VALUE with NAME one of {', '.join(known)}, each once",
                "correct it",
            )
        found[name] = value.strip()
    return found


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return indented lines: the first and the last column to the left, the others to the right."""
    alignment = "<" + ">" * (len(rows[0]) - 2) + "<"
    return ["  " + line for line in text_tables.terminal(rows, alignment)]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def signed(minutes: float) -> str:
    return f"{round(minutes, 3) + 0.0:+.3f}"  # + 0.0: no minus before a zero
