"""HTML pages for reports of runs and results of `throughput`, rendered by templates/page.html.

A page is self-contained: it includes its style, script and data, and its Content-Security-Policy
does not allow it to load anything. Charts are drawn by uPlot (templates/uPlot.iife.min.js, MIT
license), which is included only in pages with charts. It has 51 KB, plotly from pip 4.6 MB. On
paper and without JavaScript, a chart is a still picture (still.py).

A page has sections of blocks. A block is a dictionary whose first key names its type (banner,
tiles, steps, notes, text, table, shares, bars, chart, links). A block without content is omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from statistics import median_high as median
from typing import Any, NamedTuple

from common.errors import PreflightError
from common.html.still import picture
from common.packages import pip_install
from common.records.json_lines import is_number as finite

TEMPLATES = Path(__file__).with_name("templates")
# Colors of curves and bars, in their order. Each has a contrast of at least 3:1 on white and on the
# dark page. For protan, deutan, tritan and other eyes, the first four differ by a CIEDE2000 of at
# least 18.5, the last four too, and any two by 9.
COLORS = ("#6060b4", "#e46c18", "#489ca8", "#786048", "#0c7884", "#fc18f0", "#9c9084", "#b44818")
# Dashes of each four curves: with them, eight curves are told apart by those who see few colors.
DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [12, 3, 2, 3])
MAX_POINTS = 500  # points of a curve: half of its pixels on a wide screen
SPAN = "least / median / most"

Block = dict[str, Any]
Section = tuple[str, list[Block]]  # title and blocks; a section without blocks is omitted


class Link(NamedTuple):
    """A table cell that links to a file in the folder of the page."""

    text: str
    href: str


class Curve(NamedTuple):
    """A curve of a chart."""

    name: str
    points: list[tuple[float, float]]
    color: int = 0  # index into COLORS; larger numbers start again, with other dashes
    dots: bool = False
    scatter: bool = False  # dots without a line


def render(
    title: str, sections: Iterable[Section], about: str = "", refresh_s: float | None = None
) -> str:
    """Return the page as HTML text. All text in it is escaped.

    `about`: a line below the title.
    `refresh_s`: seconds after which a browser reloads the page.

    Raises PreflightError if jinja2 is not installed.
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
    environment.globals["picture"] = picture
    environment.globals["source"] = lambda name: Markup(
        (TEMPLATES / name).read_text(encoding="utf-8")
    )
    shown = []
    has_charts = False
    for heading, blocks in sections:
        with_content = [block for block in blocks if next(iter(block.values()))]
        if with_content:
            shown.append((heading, with_content))
        has_charts |= any("chart" in block for block in with_content)
    template = environment.get_template("page.html")
    page = template.render(
        title=title, about=about, sections=shown, charts=has_charts, refresh_s=refresh_s
    )
    return page + "\n"


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
    """Return a bar divided into parts. `parts`: name -> seconds."""
    total = sum(parts.values())
    bar = []
    for index, (name, value) in enumerate(parts.items()):
        if value:
            bar.append((name, f"{value / total:.1%}", f"{value:,.1f}", COLORS[index]))
    return {"shares": bar}


def bars(label: str, values: Iterable[tuple[str, float, str]]) -> Block:
    """Return horizontal bars below `label`: one for each (name, value, group).

    Bars of the same name stand together. Each group has its own color.
    """
    values = list(values)
    largest = max((value for _, value, _ in values), default=0.0) or 1.0
    colors: dict[str, str] = {}
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for name, value, group in values:
        color = colors.setdefault(group, COLORS[len(colors) % len(COLORS)])
        # The rest of the width is for the number.
        rows.setdefault(name, []).append((f"{0.65 * value / largest:.1%}", number(value), color))
    return {"bars": rows, "label": label, "colors": colors if len(colors) > 1 else {}}


def chart(
    label: str, x: str, curves: Iterable[Curve], reduce: Callable = fmean, **more: Any
) -> Block:
    """Return a chart of curves over `x`.

    `reduce`: combines the y values of neighboring points if a curve has more than MAX_POINTS.
    `more`: `target`, a level of y; `band`, from and to an x; `sync`, a name: charts with the same
        name share their cursor; `log`, "x" or "y" -> base of the axis if it is logarithmic.
    """
    series = []
    for curve in curves:
        spots = sorted(dict(curve.points).items())
        if not spots:
            continue
        size = -(-len(spots) // MAX_POINTS)  # points combined into one, rounded up
        xs = []
        ys = []
        for start in range(0, len(spots), size):
            part = spots[start : start + size]
            xs.append(_rounded(part[0][0]))
            ys.append(_rounded(reduce([y for _, y in part])))
        series.append(
            {
                "name": curve.name,
                "data": [xs, ys],
                "color": COLORS[curve.color % len(COLORS)],
                "dash": DASHES[curve.color // 4 % len(DASHES)],
                "dots": curve.dots or curve.scatter,
                "scatter": curve.scatter,
            }
        )
    return {"chart": series and {"label": label, "x": x, "series": series, **more}}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def points(records: Iterable[dict], x: str, y: str) -> list[tuple[float, float]]:
    """Return (x, y) of each record in which both keys have finite numbers."""
    return [
        (record[x], record[y])
        for record in records
        if finite(record.get(x)) and finite(record.get(y))
    ]


def span(values: Sequence[float]) -> str:
    """Return minimum, median and maximum of `values` as text, or a dash if there are none."""
    if not values:
        return "-"
    return f"{min(values):,.0f} / {median(values):,.0f} / {max(values):,.0f}"


def number(value: object) -> str:
    """Return a number as text: integers in full, others with about four digits; a dash for None."""
    if value is None:
        return "-"
    if not finite(value):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:  # type: ignore[arg-type]
        return f"{value:,.1f}"
    return f"{value:.4f}"
