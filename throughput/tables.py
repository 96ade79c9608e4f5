"""What a measurement declares of its rows, so that result.json alone is enough to make its tables and page again;
and the sections that they become. Standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """One value of a row: its key there, the head of the column, unit, and Python format ("" for text)."""

    key: str
    title: str
    unit: str = ""
    format: str = ""

    def text(self, row: dict[str, Any]) -> str:
        """Of this row's value, without the unit; a dash where it has none."""
        value = row.get(self.key)
        if value is None or value == "":
            return "-"
        return value if isinstance(value, str) else format(value, self.format)

    @property
    def head(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def times(count: str = "Steps", title: str = "Step", format: str = ",.1f") -> tuple[Column, ...]:
    """The columns of what `spread` of throughput/timing.py returns."""
    percentiles = (Column(f"ms_p{part}", f"p{part}", "ms", format) for part in (10, 90))
    return (Column("samples", count, "", "d"), Column("ms", title, "ms", format), *percentiles)


@dataclass(frozen=True)
class Plot:
    """`bars`: y of each row, named by its x; `lines`: y over the number x; `roofline`: TFLOP/s y over arithmetic intensity x, under the
    roofs of the result's note "roofline" (throughput/gemm.py); `links`: GB/s y of each pair of GPUs x (throughput/links.py). One color
    per value of `by`. x, y and `by` are keys of columns; x of bars may be several, as in "model, seq", whose texts together name a bar.
    """

    kind: str
    title: str
    x: str
    y: str
    by: str


@dataclass(frozen=True)
class Beside:
    """A table of published.json shown under the measured one; in rows that agree with it in `match`, its `value` stands beside ours."""

    table: str
    match: tuple[str, ...]
    value: str


@dataclass(frozen=True)
class Table:
    """Rows with "table": name. `keys`: the columns that say what was measured, `value`: the one that two results are compared by; both
    are keys of columns. `formulas`: in words, one line each, printed under it. `sort`: key of the column to sort by, largest first.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    value: str
    formulas: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    published: tuple[Beside, ...] = ()
    sort: str = ""

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict) -> Table:
        """Raises TypeError or KeyError if `fields` are not those of `as_dict`."""
        beside = (part | {"match": tuple(part["match"])} for part in fields["published"])
        made = {
            "columns": tuple(Column(**part) for part in fields["columns"]),
            "plots": tuple(Plot(**part) for part in fields["plots"]),
            "published": tuple(Beside(**part) for part in beside),
        }
        return Table(**fields | made | {name: tuple(fields[name]) for name in ("keys", "formulas")})


@dataclass(frozen=True)
class Drawing:
    """A plot and its points (x, y, value of `by`). `roofs`: the note "roofline" of the result, for a plot of that kind."""

    plot: Plot
    labels: tuple[str, str]
    points: tuple[tuple[Any, float, str], ...]
    roofs: dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A table in text. `mark`: "measured here", or "published" and by whom; `numbers`: which columns hold numbers."""

    title: str
    mark: str
    heads: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    drawings: tuple[Drawing, ...] = ()
