"""Comparison of two profiles, kernel by kernel, to explain the difference between their steps.

Kernels are matched by class and name. Matrix products are matched by role and shape, so the
products of two vendors' libraries match as well. The times of all kernels and of idle add up to
the step, so their changes add up to the change of the step. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.measure import report
from common.measure.files import read_json
from common.measure.tables import Section
from common.records.json_lines import is_number

PROFILE = "profile.json"
MAX_NAME = 90  # characters of a kernel's name, which may contain its template arguments
MAX_TILE = 48  # characters of a kernel's name in the headline
NEGLIGIBLE_MS = 0.0005  # smaller changes are not listed
NOTES = (
    "Milliseconds per step that belong to the kernel (docs/profile.md). They add up to the step.",
    "The largest changes are first. new: only in the second profile. gone: only in the first.",
)


def cut(name: str, limit: int) -> str:
    """Return `name` with at most `limit` characters, the last one "…" if some are left out."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


@dataclass(frozen=True)
class Change:
    """The change of one kernel, or of one kernel class, between two profiles."""

    kind: str  # the kernel's class
    name: str
    before_ms: float  # per step; 0 if it is not in the profile
    after_ms: float
    in_before: bool
    in_after: bool

    @property
    def ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def status(self) -> str:
        if not self.in_before:
            return "new"
        return "" if self.in_after else "gone"


def read(folder: Path) -> dict[str, Any]:
    """Return the content of profile.json. Raises DataError if it cannot be compared."""
    path = folder / PROFILE

    def parse(profile: dict[str, Any]) -> dict[str, Any]:
        for key in ("device", "benchmark", "started", "tokens_per_step_per_rank"):
            profile[key]  # raises KeyError if it is missing
        times_ms = [profile["window_ms"]]
        for row in (*profile["classes"], *profile["kernels"]):
            row["name"]
            times_ms.append(row["ms"])
        if not all(map(is_number, times_ms)) or times_ms[0] <= 0:
            raise ValueError("a time is not a number, or the step took none")
        return profile

    return read_json(
        path,
        parse,
        f"{path} cannot be compared",
        "profile again with this version, and name its directory",
    )


def changes(before: dict[str, Any], after: dict[str, Any], part: str = "kernels") -> list[Change]:
    """Return the changes of all rows of `part`, "kernels" or "classes", largest first."""
    firsts = {(row.get("class", ""), row["name"]): row["ms"] for row in before[part]}
    seconds = {(row.get("class", ""), row["name"]): row["ms"] for row in after[part]}
    made = []
    for key in firsts | seconds:
        kind, name = key
        first = firsts.get(key, 0.0)
        second = seconds.get(key, 0.0)
        made.append(Change(kind, name, first, second, key in firsts, key in seconds))
    return sorted(made, key=lambda change: -abs(change.ms))


def sections(before: dict[str, Any], after: dict[str, Any]) -> list[Section]:
    """Return the sections of the page: headline, both runs, classes and kernels."""
    return [
        _headline(before, after),
        _runs(before, after),
        _table("By kernel class", before, after, "classes"),
        _table("By kernel", before, after, "kernels"),
    ]


def title(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the title of the page: benchmark, machines and date."""
    machines = " and ".join(dict.fromkeys((before["device"], after["device"])))
    return f"profiles compared · {after['benchmark']} · {machines} · {report.date(after)}"


def _headline(before: dict[str, Any], after: dict[str, Any]) -> Section:
    first = before["window_ms"]
    second = after["window_ms"]
    largest = changes(before, after)[:1]
    tiles = [
        ("Step before", f"{first:,.1f} ms"),
        ("Step after", f"{second:,.1f} ms"),
        ("Change", f"{second - first:+,.1f} ms ({second / first - 1:+.1%})"),
    ]
    for change in largest:
        tiles.append(("Largest change", f"{cut(change.name, MAX_TILE)}: {change.ms:+,.1f} ms"))
    return Section("Headline", "", ("", ""), (False, False), tuple(tiles), tiles=True)


def _runs(before: dict[str, Any], after: dict[str, Any]) -> Section:
    names = {
        "command": "Command",
        "device": "Machine",
        "commit": "Commit",
        "config": "Config",
        "precision": "Precision",
        "layers": "Layers",
        "world_size": "Ranks",
        "tokens_per_step_per_rank": "Tokens per step and rank",
        "torch": "torch",
    }
    rows = [("Date", report.date_and_time(before), report.date_and_time(after))]
    for key, name in names.items():
        rows.append((name, str(before.get(key, "-")), str(after.get(key, "-"))))
    notes = []
    if before["tokens_per_step_per_rank"] != after["tokens_per_step_per_rank"]:
        notes.append("The steps have different numbers of tokens: compare shares, not times.")
    return Section(
        "Runs", "", ("", "before", "after"), (False,) * 3, tuple(rows), notes=tuple(notes)
    )


def _table(name: str, before: dict[str, Any], after: dict[str, Any], part: str) -> Section:
    step = after["window_ms"] - before["window_ms"]
    rows = []
    for change in changes(before, after, part):
        if abs(change.ms) < NEGLIGIBLE_MS and not change.status:
            continue
        cells = [
            cut(change.name, MAX_NAME),
            f"{change.before_ms:,.3f}" if change.in_before else "-",
            f"{change.before_ms / before['window_ms']:.1%}" if change.in_before else "-",
            f"{change.after_ms:,.3f}" if change.in_after else "-",
            f"{change.after_ms / after['window_ms']:.1%}" if change.in_after else "-",
            f"{change.ms:+,.3f}",
            f"{change.ms / step:.0%}" if step else "-",
        ]
        if part == "kernels":
            cells = [change.kind, *cells, change.status]
        rows.append(tuple(cells))
    heads = ["before, ms", "share", "after, ms", "share", "change, ms", "of the step's change"]
    if part == "classes":
        return Section(
            name, "", ("class", *heads), (False, *(True,) * 6), tuple(rows), notes=NOTES[:1]
        )
    return Section(
        name,
        "",
        ("class", "kernel", *heads, "status"),
        (False, False, *(True,) * 6, False),
        tuple(rows),
        notes=NOTES,
    )
