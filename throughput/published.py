"""Numbers that others published, from published.json. Standard library only.

None of them was measured by this package. Each table has a title, a source, notes, columns as
throughput/tables.py declares them, and flat rows. The source names machine and date as the
publication states them. The notes say what it leaves out. "gpu" names the kind of GPU of a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from throughput.tables import Beside, Column


@dataclass(frozen=True)
class Published:
    title: str
    source: str
    notes: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]

    def column(self, key: str) -> Column:
        return next(column for column in self.columns if column.key == key)


@cache
def tables() -> dict[str, Published]:
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: Published(
            table["title"],
            table["source"],
            tuple(table["notes"]),
            tuple(Column(*column) for column in table["columns"]),
            tuple(
                dict(zip((column[0] for column in table["columns"]), row, strict=True))
                for row in table["rows"]
            ),
        )
        for name, table in data.items()
    }


def beside(row: dict[str, Any], wanted: Beside, gpu: str) -> str:
    """Return the published values of the rows of `gpu` that agree with `row`, or a dash."""
    table = tables()[wanted.table]
    column = table.column(wanted.value)
    values = [column.text(other) for other in matching(row, wanted, gpu)]
    return "; ".join(values) or "-"


def matching(row: dict[str, Any], wanted: Beside, gpu: str) -> list[dict[str, Any]]:
    """Return the published rows of `gpu` that agree with `row` and have the wanted value."""
    rows = []
    for other in tables()[wanted.table].rows:
        same = all(other[key] == row.get(key) for key in wanted.match)
        if same and other["gpu"] == gpu and other[wanted.value] is not None:
            rows.append(other)
    return rows


def gpus() -> set[str]:
    """Return the GPU kinds that a published table names."""
    return {row["gpu"] for table in tables().values() for row in table.rows}
