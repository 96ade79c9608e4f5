"""Row of one check, and the table of all rows. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from common import text_tables

VERDICTS = ("ok", "warn", "refuse", "skipped")
WIDTH = 140
Limits = tuple[float, float]  # limits for warn and for refuse


@dataclass(frozen=True)
class CheckRow:
    check: str
    verdict: str  # one of VERDICTS; `skipped` means that nothing was checked, not that it passed
    value: str  # value found; for `skipped`, the reason
    expected: str = ""
    do: str = ""  # advice; "" if ok


def graded(
    check: str, value: str, expected: str, do: str, *, refuse: bool = False, warn: bool = False
) -> CheckRow:
    """Return a row: `refuse` takes precedence over `warn`, and with neither the check is ok."""
    verdict = "refuse" if refuse else "warn" if warn else "ok"
    return CheckRow(check, verdict, value, expected, "" if verdict == "ok" else do)


def worst(amount: float, limits: Limits) -> str:
    """Return `warn` from the first limit on, `refuse` from the second, else `ok`."""
    return "refuse" if amount >= limits[1] else "warn" if amount >= limits[0] else "ok"


def at_least(check: str, amount: float, limits: Limits, value: str, unit: str, do: str) -> CheckRow:
    """Return a row that warns below the first limit and refuses below the second."""
    return graded(
        check,
        value,
        f">= {limits[0]:g} {unit}".rstrip(),
        do,
        refuse=amount < limits[1],
        warn=amount < limits[0],
    )


def skipped(check: str, why: str, expected: str = "") -> CheckRow:
    return CheckRow(check, "skipped", why, expected)


def overall(rows: Sequence[CheckRow]) -> str:
    """Return the worst verdict of the checks that ran, "skipped" if none did."""
    found = {row.verdict for row in rows}
    return next((verdict for verdict in ("refuse", "warn", "ok") if verdict in found), "skipped")


def table(rows: Sequence[CheckRow]) -> str:
    """Return the table of verdict, check, value and expected, with advice below some rows."""
    cells = [
        ("", "check", "value", "expected"),
        *((row.verdict, row.check, row.value, row.expected) for row in rows),
    ]
    head, *texts = text_tables.terminal(cells, "<<<<")
    lines = [head]
    indent = " " * head.index("value")
    for row, text in zip(rows, texts, strict=True):
        lines.append(text)
        if row.do:
            lines += textwrap.wrap(
                f"do: {row.do}",
                WIDTH,
                initial_indent=indent,
                subsequent_indent=indent + "    ",
                break_long_words=False,
            )
    counts = ", ".join(
        f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in VERDICTS
    )
    return "\n".join([*lines, f"{overall(rows)}: {counts}"])
