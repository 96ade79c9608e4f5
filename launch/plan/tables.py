"""Tables of the plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common import terminal, text_tables
from launch.plan.estimate import Memory, gib


def memory_table(memory: Memory) -> str:
    rows = [[name, f"{gib(size):.1f}"] for name, size in memory.parts.items() if gib(size) >= 0.05]
    return table(
        [f"per GPU, in {memory.moment}", "GiB"], [*rows, ["sum", f"{gib(memory.allocated):.1f}"]]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the first column to the left, the others to the right.

    On a terminal rich fits it to the width. Elsewhere, and without rich, it is aligned Markdown.
    """
    alignment = "<" + ">" * (len(head) - 1)
    if sys.stdout.isatty() and terminal.has_rich():
        return "\n".join(terminal.table([head, *rows], alignment))
    head, *rows = text_tables.align([head, *rows], alignment)
    return text_tables.markdown(head, rows, alignment).rstrip("\n")
