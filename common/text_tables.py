"""Markdown tables, and numbers in tables (for a terminal: common/terminal.py).

Standard library only.

`alignment` has one character per column: "<" aligns cells to the left, ">" to the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

Rows = Sequence[Sequence[str]]


def number(value: float | None, form: str) -> str:
    """Return `value` in the format `form`, "-" for None.

    Unlike `format`, it writes significant digits (",.3g") without an exponent: 1,010 for 1.01e+03.
    """
    if value is None:
        return "-"
    text = format(value, form)
    if "e" not in text:
        return text
    return format(Decimal(text), ",f" if "," in form else "f")


def align(rows: Rows, alignment: str) -> list[list[str]]:
    """Pad the cells of each column to the width of its longest cell."""
    formats = []
    for side, column in zip(alignment, zip(*rows, strict=True), strict=True):
        formats.append(f"{side}{max(map(len, column))}")
    aligned = []
    for row in rows:
        aligned.append([format(cell, form) for cell, form in zip(row, formats, strict=True)])
    return aligned


def markdown(heads: Sequence[str], rows: Rows, alignment: str = "") -> str:
    """Return a Markdown table, left-aligned if no alignment is given.

    The dashes below the heads are as wide as the heads, so aligned rows give an aligned table.
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
