"""Tables of the plan: Markdown that a terminal shows aligned."""

from __future__ import annotations

from collections.abc import Sequence

from launch.plan.estimate import Memory, gib


def memory_table(memory: Memory) -> str:
    rows = [[name, f"{gib(size):.1f}"] for name, size in memory.parts.items() if gib(size) >= 0.05]
    return table([f"per GPU, in {memory.moment}", "GiB"], [*rows, ["sum", f"{gib(memory.allocated):.1f}"]])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for a terminal as well: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in aligned)
