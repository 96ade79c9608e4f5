"""page.html from sections (common/measure/tables.py).

The page is that of common/html/page.py, with plots that matplotlib draws as inline SVG.
"""

from __future__ import annotations

import io
import re
from itertools import cycle
from typing import Any

import matplotlib

matplotlib.use("svg")
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from common.html import page
from common.html.page import COLORS, Block
from common.measure import links_drawing
from common.measure.tables import Drawing, Section

# Color of axes and text in the SVG. It is replaced by the page's text color, which depends on the
# color scheme.
INK = "#0a0b0c"
MARKERS = "osD^vP"
STYLES: dict[Any, Any] = {  # the keys are literals in matplotlib's types
    "svg.fonttype": "none",
    "svg.hashsalt": "throughput",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
        ),
        INK,
    ),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.alpha": 0.25,
    "grid.color": INK,
}


def html(title: str, sections: list[Section]) -> str:
    """Return the page as HTML text."""
    return page.render(title, [(section.title, _blocks(section)) for section in sections])


def _blocks(section: Section) -> list[Block]:
    if section.tiles:
        return [{"tiles": section.rows}, {"notes": section.notes}]
    text_columns = [column for column, number in enumerate(section.numbers) if not number]
    heads = section.heads if any(section.heads) else ()
    table = page.table(heads, section.rows, text_columns)
    drawings = [{"drawing": svg(drawing)} for drawing in section.drawings]
    return [
        {"notes": [section.mark] if section.mark else []},
        table,
        {"notes": section.notes},
        *drawings,
    ]


def svg(drawing: Drawing) -> Markup:
    """Return the drawing as an SVG element."""
    kind = drawing.plot.kind
    draw = {"bars": _bars, "lines": _lines, "roofline": _roofline, "links": _links}[kind]
    height = 3.4
    if kind == "bars":
        height = 1.2 + 0.19 * len(drawing.points)
    with rc_context(STYLES):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, drawing)
        axes.set_title(drawing.plot.title, fontsize=10, loc="left")
        if kind in ("roofline", "links") or len(_grouped(drawing)) > 1:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    body = text.getvalue()
    body = re.sub(r"<metadata>.*?</metadata>", "", body[body.index("<svg") :], flags=re.DOTALL)
    body = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>',
        r'<svg viewBox="\1" role="img" xmlns:xlink="http://www.w3.org/1999/xlink">',
        body,
        count=1,
    )
    return Markup(body.replace(INK, "var(--text)"))


def _grouped(drawing: Drawing) -> dict[str, list[tuple]]:
    """Return value of `by` -> points (x, y)."""
    groups: dict[str, list[tuple]] = {}
    for x, y, by in drawing.points:
        groups.setdefault(by, []).append((x, y))
    return groups


def _bars(axes: Axes, drawing: Drawing) -> None:
    """Draw horizontal bars: a position for each x, with a bar for each group.

    The positions are in the order of the points, from the top.
    """
    groups = _grouped(drawing)
    names = list(dict.fromkeys(str(x) for x, _, _ in drawing.points))
    width = 0.8 / len(groups)
    for index, (color, (by, points)) in enumerate(zip(cycle(COLORS), groups.items(), strict=False)):
        places = [names.index(str(x)) + width * (index + 0.5) - 0.4 for x, _ in points]
        axes.barh(places, [y for _, y in points], height=0.92 * width, color=color, label=by)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(drawing.labels[1])
    axes.grid(axis="x")


def _short(name: str) -> str:
    """Return `name` shortened to 40 characters, because its width reduces that of the bars.

    It may be the path of a model's file.
    """
    return name if len(name) <= 40 else f"{name[:12]}…{name[-27:]}"


def _lines(axes: Axes, drawing: Drawing) -> None:
    for color, marker, (by, points) in zip(
        cycle(COLORS), cycle(MARKERS), _grouped(drawing).items(), strict=False
    ):
        points.sort()
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=color,
            marker=marker,
            markersize=4,
            label=by,
        )
    axes.set_xlabel(drawing.labels[0])
    axes.set_ylabel(drawing.labels[1])
    axes.set_ylim(bottom=0)
    xs = [x for x, _, _ in drawing.points]
    if 0 < 50 * min(xs) < max(xs):  # values over a wide range, such as sizes of messages
        axes.set_xscale("log", base=2)
    axes.grid()


def _links(axes: Axes, drawing: Drawing) -> None:
    links_drawing.draw(axes, drawing.points, COLORS)


def _roofline(axes: Axes, drawing: Drawing) -> None:
    """Draw the points and the roofs of the machine. Without a peak, the only roof is the bandwidth.

    Form of `drawing.roofs`:

        {"bandwidth": [name, bytes per second / 1e12], "peaks": [[name, TFLOP/s], ...]}
    """
    groups = _grouped(drawing)
    for color, marker, (by, points) in zip(
        cycle(COLORS), cycle(MARKERS), groups.items(), strict=False
    ):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker,
            color=color,
            markersize=4,
            label=by,
        )
    _draw_roofs(axes, drawing)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(drawing.labels[0])
    axes.set_ylabel(drawing.labels[1])
    axes.grid(which="major")


def _draw_roofs(axes: Axes, drawing: Drawing) -> None:
    """Draw a rising line for the bandwidth, and a horizontal line for each peak."""
    xs = [x for x, _, _ in drawing.points]
    ys = [y for _, y, _ in drawing.points]
    left = min(xs) / 8
    right = max(xs) * 2
    name, bandwidth = drawing.roofs["bandwidth"]
    peaks = drawing.roofs["peaks"]
    if peaks:
        top = max(level for _, level in peaks)
    else:
        top = max(left * bandwidth, *ys)
    ridge = min(right, top / bandwidth)  # intensity at which the bandwidth's line ends
    start = min(left, ridge / 4)
    axes.plot(
        [start, ridge], [bandwidth * start, bandwidth * ridge], color=INK, linewidth=1, label=name
    )
    for style, (name, level) in zip(("--", ":", "-."), peaks, strict=False):
        axes.plot(
            [level / bandwidth, right], [level, level], style, color=INK, linewidth=1, label=name
        )
