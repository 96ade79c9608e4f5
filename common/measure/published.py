"""Numbers that others published, from published.json. Standard library only.

None of them was measured with this package. Each table has a title, a source, notes, columns as
common/measure/tables.py declares them, and flat rows. The source names the machine and the date as
the publication states them. The notes say what the publication leaves out. "gpu" is the GPU kind of
a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.measure.tables import Column, PublishedValues


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


def values_text(row: dict[str, Any], wanted: PublishedValues, gpu: str) -> str:
    """Return the published values for `gpu` that belong to a measured `row` as text, or a dash.

    Several values are separated by semicolons.
    """
    table = tables()[wanted.table]
    column = table.column(wanted.value)
    values = [column.text(other) for other in matching_rows(row, wanted, gpu)]
    return "; ".join(values) or "-"


def matching_rows(row: dict[str, Any], wanted: PublishedValues, gpu: str) -> list[dict[str, Any]]:
    """Return the published rows of `gpu` that agree with a measured `row` in `wanted.match`.

    Rows without a value of column `wanted.value` are left out.
    """
    rows = []
    for other in tables()[wanted.table].rows:
        same = all(other[key] == row.get(key) for key in wanted.match)
        if same and other["gpu"] == gpu and other[wanted.value] is not None:
            rows.append(other)
    return rows


def gpus() -> set[str]:
    """Return the GPU kinds that a published table names."""
    return {row["gpu"] for table in tables().values() for row in table.rows}
