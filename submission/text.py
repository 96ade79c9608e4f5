"""Tables and numbers on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


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
