"""Numbers that others published, from published.json. Standard library only.

None of them was measured with this package. Each table has a title, a source, notes, columns as
throughput/tables.py declares them, and flat rows. The source names the machine and the date as the
publication states them. The notes say what the publication leaves out. "gpu" is the GPU kind of a
row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from throughput.tables import Beside, Column


@dataclass(frozen=True)
class PublishedTable:
    """A table of published.json. A row has a value for the key of each column."""

    title: str
    source: str
    notes: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]

    def column(self, key: str) -> Column:
        return next(column for column in self.columns if column.key == key)


@cache
def tables() -> dict[str, PublishedTable]:
    """Return the tables of published.json by name."""
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {name: _table(fields) for name, fields in data.items()}


def _table(fields: dict[str, Any]) -> PublishedTable:
    columns = tuple(Column(*column) for column in fields["columns"])
    keys = [column.key for column in columns]
    rows = tuple(dict(zip(keys, row, strict=True)) for row in fields["rows"])
    return PublishedTable(fields["title"], fields["source"], tuple(fields["notes"]), columns, rows)


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
