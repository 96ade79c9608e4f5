"""Tables of the plan: Markdown that is also aligned on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from common import text_tables
from launch.plan.estimate import Memory, gib


def memory_table(memory: Memory) -> str:
    rows = [[name, f"{gib(size):.1f}"] for name, size in memory.parts.items() if gib(size) >= 0.05]
    return table(
        [f"per GPU, in {memory.moment}", "GiB"], [*rows, ["sum", f"{gib(memory.allocated):.1f}"]]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table, the first column to the left, the others to the right."""
    alignment = "<" + ">" * (len(head) - 1)
    head, *rows = text_tables.align([head, *rows], alignment)
    return text_tables.markdown(head, rows, alignment).rstrip("\n")
