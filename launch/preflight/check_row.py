"""The row that reports one check, and the table of all rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common import terminal

VERDICTS = ("ok", "warn", "refuse", "skipped")
Limits = tuple[float, float]  # limits for warn and for refuse


@dataclass(frozen=True)
class CheckRow:
    check: str  # name of the check
    verdict: str  # one of VERDICTS; `skipped` means that nothing was checked, not that it passed
    value: str  # value found; for `skipped`, the reason
    expected: str = ""
    do: str = ""  # advice; "" if ok


def graded(
    check: str, value: str, expected: str, do: str, *, refuse: bool = False, warn: bool = False
) -> CheckRow:
    """Return a row whose verdict is `refuse` or `warn`, the first that is True, or else `ok`."""
    if refuse:
        return CheckRow(check, "refuse", value, expected, do)
    if warn:
        return CheckRow(check, "warn", value, expected, do)
    return CheckRow(check, "ok", value, expected)


def worst(amount: float, limits: Limits) -> str:
    """Return `refuse` at the second limit or above, `warn` at the first or above, else `ok`."""
    if amount >= limits[1]:
        return "refuse"
    return "warn" if amount >= limits[0] else "ok"


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
    """Return a row for a check that was not made. Skipped does not mean passed."""
    return CheckRow(check, "skipped", why, expected)


def overall(rows: Sequence[CheckRow]) -> str:
    """Return the worst verdict of the checks that ran, "skipped" if none did."""
    verdicts = {row.verdict for row in rows}
    return next((each for each in ("refuse", "warn", "ok") if each in verdicts), "skipped")


def table(rows: Sequence[CheckRow]) -> str:
    """Return the table of verdict, check, value and expected, then the advice and the verdict."""
    cells = [("", "check", "value", "expected")]
    cells += [(row.verdict, row.check, row.value, row.expected) for row in rows]
    lines = terminal.table(cells, "<<<<")
    width = terminal.columns(sys.stdout)
    lines += [terminal.fold(f"do: {row.do} ({row.check})", width) for row in rows if row.do]
    counts = Counter(row.verdict for row in rows)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    return "\n".join([*lines, f"{overall(rows)}: {summary}"])
