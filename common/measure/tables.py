"""Declarations of a measurement's tables, and sections of its page. Standard library only.

result.json contains the declarations, so that table.md and page.html can be made from it alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from common.html.page import Block
from common.text_tables import number


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `key`: its key in a row. `title` and `unit`: the head of the column. `format`: format of
    numbers, or "" for text.
    """

    key: str
    title: str
    unit: str = ""
    format: str = ""

    def text(self, row: dict[str, Any]) -> str:
        """Return the value in `row` as text without the unit, or a dash if there is none."""
        value = row.get(self.key)
        if value is None or value == "":
            return "-"
        return value if isinstance(value, str) else number(value, self.format)

    @property
    def head(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def time_columns(
    count: str = "Steps", title: str = "Step", format: str = ",.1f"
) -> tuple[Column, ...]:
    """Return the columns for the values that `spread` (throughput/timing.py) returns.

    `count`: title of the number of samples. `title` and `format`: of the median in ms.
    """
    percentiles = (Column(f"ms_p{part}", f"p{part}", "ms", format) for part in (10, 90))
    return (Column("samples", count, "", "d"), Column("ms", title, "ms", format), *percentiles)


@dataclass(frozen=True)
class Plot:
    """A plot of a table's rows. `x`, `y` and `by` are keys of columns.

    Each value of `by` has its own color. Values of `kind`:

    - `bars`: y of each row, named by its x. If x has several keys, as in "model, seq", their texts
      together name a bar.
    - `lines`: y over the number x.
    - `roofline`: TFLOP/s y over arithmetic intensity x, under the roofs of the result's note
      "roofline" (throughput/gemm.py).
    - `links`: a table of the GB/s y between the GPUs of each pair x (throughput/links.py).
    """

    kind: str
    title: str
    x: str
    y: str
    by: str


@dataclass(frozen=True)
class PublishedValues:
    """The table of published.json that is shown below a measured table.

    `table`: name of the published table. `match`: keys in which a published row must agree with a
    measured one. If it does, and is of the same GPU kind, its value of column `value` is also shown
    next to the measured one. () to show the published table only. `compared`: whether
    `suite --against` compares the two values.
    """

    table: str
    match: tuple[str, ...]
    value: str
    compared: bool = True


@dataclass(frozen=True)
class Table:
    """A table of the rows whose "table" is `name`.

    `keys`: the columns that identify what was measured. `value`: the column in which two results
    are compared. `formulas`: explanations below the table. `sort`: key of the column to sort by,
    largest first, or "". `larger_is_better`: whether a larger `value` is better. Only such tables
    are in a baseline (throughput/baseline.py).
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    value: str
    formulas: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    published: tuple[PublishedValues, ...] = ()
    sort: str = ""
    larger_is_better: bool = True

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict) -> Table:
        """Return the Table of a dict that `as_dict` made.

        Raises TypeError or KeyError if a field is missing or unknown.
        """
        published = (part | {"match": tuple(part["match"])} for part in fields["published"])
        converted = {
            "columns": tuple(Column(**part) for part in fields["columns"]),
            "plots": tuple(Plot(**part) for part in fields["plots"]),
            "published": tuple(PublishedValues(**part) for part in published),
            "keys": tuple(fields["keys"]),
            "formulas": tuple(fields["formulas"]),
        }
        return Table(**fields | converted)


@dataclass(frozen=True)
class Section:
    """A table as text, with notes and charts.

    `mark`: "measured here", or "published" and the source. `numbers`: for each column, whether it
    contains numbers. `charts`: blocks of the page. `tiles`: whether the page shows each row, a name
    and a value, as a tile.
    """

    title: str
    mark: str
    heads: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Block, ...] = ()
    tiles: bool = False
