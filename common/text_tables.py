"""Tables as text: Markdown, and aligned columns for a terminal. Standard library only.

`alignment` has one character per column: "<" puts cells to the left, ">" to the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDEST = 60  # a longer cell does not widen its column on a terminal
Rows = Sequence[Sequence[str]]


def align(rows: Rows, alignment: str, widest: float = math.inf) -> list[list[str]]:
    """Pad the cells of each column to the width of its longest cell of at most `widest`
    characters.
    """
    formats = []
    for side, column in zip(alignment, zip(*rows, strict=True), strict=True):
        width = max((len(cell) for cell in column if len(cell) <= widest), default=0)
        formats.append(f"{side}{width}")
    return [[format(cell, form) for cell, form in zip(row, formats, strict=True)] for row in rows]


def terminal(rows: Rows, alignment: str) -> list[str]:
    """Return the lines of a table, with two spaces between the columns."""
    return ["  ".join(row).rstrip() for row in align(rows, alignment, WIDEST)]


def markdown(heads: Sequence[str], rows: Rows, alignment: str = "") -> str:
    """Return a Markdown table, left-aligned if no alignment is given.

    The rule has the widths of the heads: a table made of aligned rows stays aligned.
    """
    rule = []
    for head, side in zip(heads, alignment or "<" * len(heads), strict=True):
        dashes = "-" * max(3, len(head))
        rule.append(dashes[:-1] + ":" if side == ">" else dashes)
    lines = []
    for row in (heads, rule, *rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)
