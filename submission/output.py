"""Tables and signed numbers that several commands print."""

from __future__ import annotations

from collections.abc import Sequence

from common import terminal


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, indented. The first and the last column are left-aligned."""
    alignment = "<" + ">" * (len(rows[0]) - 2) + "<"
    return ["  " + line for line in terminal.table(rows, alignment, indent=2)]


def signed(minutes: float) -> str:
    """Return `minutes` with a sign and three decimals."""
    return f"{round(minutes, 3) + 0.0:+.3f}"  # + 0.0 turns -0.0 into 0.0
