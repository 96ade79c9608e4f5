"""HTML pages: sections of blocks, rendered by templates/page.html, for reports of runs and for
results of `throughput`.

A page is self-contained: style, script and data are in it, and its Content-Security-Policy forbids
it to load anything. Charts are drawn by uPlot (templates/uPlot.iife.min.js, MIT license), which a
page without charts does not include. A block is a dictionary whose first key names its type
(banner, tiles, steps, notes, text, table, shares, chart, links, drawing). A block without content
is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from statistics import median_high as median
from typing import Any, NamedTuple

from common.errors import PreflightError
from common.packages import pip_install
from common.records.json_lines import is_number as finite

TEMPLATES = Path(__file__).with_name("templates")
# Colors of curves and bars, in their order. Each has a contrast of at least 3:1 on white and on the
# dark page.
COLORS = ("#2f7ed8", "#d9622b", "#2e9e5b", "#9d6bd0", "#b8860b", "#c2407e", "#0e96a3", "#7a828c")
MAX_POINTS = 500  # points of a curve: half of its pixels on a wide screen
SPAN = "least / median / most"

Block = dict[str, Any]
Section = tuple[str, list[Block]]  # title and blocks; a section without blocks is left out


class Link(NamedTuple):
    """A table cell that links to a file in the folder of the page."""

    text: str
    href: str


class Curve(NamedTuple):
    """A line of a chart. `color`: index into COLORS. Beyond their number the line is also
    dashed. `scatter`: dots that no line joins.
    """

    name: str
    points: list[tuple[float, float]]
    color: int = 0
    dots: bool = False
    scatter: bool = False


def render(
    title: str, sections: Iterable[Section], about: str = "", refresh_s: float | None = None
) -> str:
    """Return the page as HTML text. All text in it is escaped.

    `about`: a line below the title. `refresh_s`: seconds after which a browser reads the page
    again. Raises PreflightError without jinja2.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise PreflightError("the page cannot be made", str(error), pip_install("jinja2")) from None
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(TEMPLATES),
    )
    environment.globals["source"] = lambda name: Markup(
        (TEMPLATES / name).read_text(encoding="utf-8")
    )
    shown = [
        (title, found)
        for title, blocks in sections
        if (found := [block for block in blocks if next(iter(block.values()))])
    ]
    charts = any("chart" in block for _, blocks in shown for block in blocks)
    return (
        environment.get_template("page.html").render(
            title=title, about=about, sections=shown, charts=charts, refresh_s=refresh_s
        )
        + "\n"
    )


def banner(state: str, *lines: str) -> Block:
    """Return a banner. `state`: good, bad, warn or info. The first of `lines` is emphasized."""
    return {"banner": lines, "state": state}


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Link]],
    words: Sequence[int] = (0,),
    title: str = "",
) -> Block:
    """Return a table. Columns hold numbers, except those in `words`.

    Without heads, the table has two columns: names and their values. With a title, only the title
    is shown until a reader opens the table.
    """
    return {"table": rows, "heads": heads, "words": words if heads else (0, 1), "title": title}


def shares(parts: dict[str, float]) -> Block:
    """Return one bar that represents all seconds, divided like `parts`."""
    bar = [
        (name, f"{value / sum(parts.values()):.1%}", f"{value:,.1f}", COLORS[at])
        for at, (name, value) in enumerate(parts.items())
        if value
    ]
    return {"shares": bar}


def chart(
    label: str, x: str, curves: Iterable[Curve], reduce: Callable = fmean, **more: Any
) -> Block:
    """Return a chart of curves over `x`.

    `reduce`: combines the y values of neighboring points if a curve has more than MAX_POINTS.
    `more`: `target`, a level of y; `band`, from and to an x; `sync`, a name: charts with the same
        name share their cursor.
    """
    series = []
    for curve in curves:
        spots = sorted(dict(curve.points).items())
        size = -(-len(spots) // MAX_POINTS)
        parts = [spots[start : start + size] for start in range(0, len(spots), size or 1)]
        ys = [reduce([y for _, y in part]) for part in parts]
        data = [
            [float(f"{value:.6g}") for value in column]
            for column in ([part[0][0] for part in parts], ys)
        ]
        look = {
            "color": COLORS[curve.color % len(COLORS)],
            "dashed": curve.color >= len(COLORS),
            "dots": curve.dots or curve.scatter,
            "scatter": curve.scatter,
        }
        if parts:
            series.append({"name": curve.name, "data": data, **look})
    return {"chart": series and {"label": label, "x": x, "series": series, **more}}


def points(records: Iterable[dict], x: str, y: str) -> list[tuple[float, float]]:
    return [
        (record[x], record[y])
        for record in records
        if finite(record.get(x)) and finite(record.get(y))
    ]


def span(values: Sequence[float], form: str = ",.0f") -> str:
    """Return minimum, median and maximum of `values` as text."""
    return (
        " / ".join(format(value, form) for value in (min(values), median(values), max(values)))
        if values
        else "-"
    )


def number(value: object) -> str:
    """Return whole numbers in full, others with about four digits, and a dash for a missing
    value.
    """
    if value is None or not finite(value):
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:  # type: ignore[arg-type]
        return f"{value:,.1f}"
    return f"{value:.4f}"
