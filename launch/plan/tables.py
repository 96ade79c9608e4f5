"""Tables of the plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common import terminal, text_tables
from common.estimate.memory import Memory, gib


def memory_table(memory: Memory) -> str:
    """Return a table of a GPU's memory at its peak, in GiB, by kind of tensor."""
    rows = []
    for name, size in memory.parts.items():
        if gib(size) >= 0.05:
            rows.append([name, f"{gib(size):.1f}"])
    rows.append(["sum", f"{gib(memory.allocated):.1f}"])
    return table([f"per GPU, in {memory.moment}", "GiB"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the first column to the left, the others to the right.

    On a terminal rich fits it to the width. Elsewhere, and without rich, it is aligned Markdown.
    """
    alignment = "<" + ">" * (len(head) - 1)
    if sys.stdout.isatty() and terminal.has_rich():
        return "\n".join(terminal.table([head, *rows], alignment))
    aligned = text_tables.align([head, *rows], alignment)
    text = text_tables.markdown(aligned[0], aligned[1:], alignment)
    return text.rstrip("\n")
