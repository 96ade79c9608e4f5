"""One row of the answer per check, and the table of them. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

VERDICTS = ("ok", "warn", "refuse", "skipped")
WIDTH = 140


@dataclass(frozen=True)
class Row:
    check: str
    verdict: str  # one of VERDICTS; `skipped` is no pass: nobody looked
    value: str  # what there is; of `skipped`, why nobody looked
    wanted: str = ""
    do: str = ""  # what to do about it; "" if ok


def graded(check: str, value: str, wanted: str, do: str, *, refuse: bool = False, warn: bool = False) -> Row:
    """`refuse` wins over `warn`; with neither the check is ok, and there is nothing to do."""
    verdict = "refuse" if refuse else "warn" if warn else "ok"
    return Row(check, verdict, value, wanted, "" if verdict == "ok" else do)


def skipped(check: str, why: str, wanted: str = "") -> Row:
    return Row(check, "skipped", why, wanted)


def overall(rows: Sequence[Row]) -> str:
    """The worst of what was looked at. Skipped checks make nothing better: without any other, nothing is ok."""
    found = {row.verdict for row in rows}
    return next((verdict for verdict in ("refuse", "warn", "ok") if verdict in found), "skipped")


def table(rows: Sequence[Row]) -> str:
    """verdict, check, value, wanted; below what is not ok, what to do."""
    checks = max(len(row.check) for row in rows)
    values = max(len(row.value) for row in rows if len(row.value) <= 60)
    lines = [f"{'':7}  {'check':{checks}}  {'value':{values}}  wanted"]
    indent = " " * (9 + checks + 2)
    for row in rows:
        lines.append(f"{row.verdict:7}  {row.check:{checks}}  {row.value:{values}}  {row.wanted}".rstrip())
        if row.do:
            lines += textwrap.wrap(f"do: {row.do}", WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_long_words=False)
    counts = ", ".join(f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in VERDICTS)
    return "\n".join([*lines, f"{overall(rows)}: {counts}"])
