"""What the commands here share: files they write, NAME=VALUE, tables and numbers on a terminal. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from common.errors import ConfigError, StorageError


def write(path: Path, text: str) -> None:
    """Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}", error.strerror or str(error), "name a directory that exists and has space") from error


def pairs(flag: str, texts: list[str], known: Collection[str]) -> dict[str, str]:
    """`texts` are NAME=VALUE. Raises ConfigError for a name that is not `known`, or comes twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known or name in found:
            raise ConfigError(f"{flag} {text}", f"it is not NAME=VALUE with NAME one of {', '.join(known)}, each once", "correct it")
        found[name] = value.strip()
    return found


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: the first column to the left, the others to the right, the last as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)), row[-1]]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def signed(minutes: float) -> str:
    return f"{round(minutes, 3) + 0.0:+.3f}"  # + 0.0: no minus before a zero
