"""Pieces of a self-contained page: style, one kind of line chart as inline SVG, tables, numbers for people. No script, nothing from outside.

Charts have a view box of WIDTH x HEIGHT units that scales with the page (page.css). Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median_high as median

from submission.log import is_number as finite

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 34, 56  # margins of a chart, in SVG units; text may be 22 of them high
MAX_POINTS = 800  # of a curve; a run of 10,000 steps needs no more on 680 pixels
SPAN = "least / median / most"

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(title: str, sections: list[str], wide: bool = False) -> str:
    """The page as HTML text; `sections` are HTML already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{''.join(sections)}"
    return f"<!doctype html><html lang=en><head>{head}</head><body{' class=wide' if wide else ''}>{body}</body></html>\n"


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def notes(lines: Iterable[str]) -> str:
    return "".join(f"<p class=dim>{escape(line)}</p>" for line in lines)


def banner(kind: str, lines: list[str]) -> str:
    """`kind` is good, bad or warn; the first of `lines`, HTML already, stands out."""
    return f'<div class="banner {kind}"><b>{lines[0]}</b>{"".join(f"<br>{line}" for line in lines[1:])}</div>'


MINIATURE_NOTICE = banner("warn", ["A miniature: this is not a benchmark result.", "A small model with a target of its own."])


# Charts.


@dataclass(frozen=True)
class Curve:
    """One line of a chart. `kind`: its class in STYLE; `dots`: every point is marked, and says what it is under the mouse."""

    data: list[tuple[float, float]]
    kind: str
    name: str
    dots: bool = False


def chart(
    curves: list[Curve],
    labels: tuple[str, str],
    target: float | None = None,
    band: tuple[float, float] | None = None,
    keys: Iterable[tuple[str, str]] = (),
) -> str:
    """Curves over an x axis from 0, and their legend; "" if they have no point. `labels`: of x and y; `target`: a level of y; `band`:
    two values of x; `keys`: (class of the color, text) of the curves in the legend."""
    spots = [spot for curve in curves for spot in curve.data]
    if not spots:
        return ""
    levels = [y for _, y in spots] + ([] if target is None else [target])
    margin = 0.04 * (max(levels) - min(levels)) or 0.04 * abs(levels[0]) or 1.0
    low, high = min(levels) - margin, max(levels) + margin
    right = 1.02 * max(1 / 60, *(x for x, _ in spots), *(band or ()))

    def across(x: float) -> float:
        return LEFT + x / right * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def level(y: float, kind: str) -> str:
        return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}"/>'

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{labels[1]} over {labels[0]}">']
    for x in ticks(0, right):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 21}" text-anchor="middle">{round(x, 10):,.10g}</text>')
    for y in ticks(low, high):
        parts.append(f'{level(y, "axis")}<text x="{LEFT - 8}" y="{down(y) + 4:.1f}" text-anchor="end">{round(y, 10):,.10g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{labels[0]}</text>')
    parts.append(f'<text x="4" y="18">{labels[1]}</text>')
    if band:
        size = f'width="{across(band[1]) - across(band[0]):.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect class="band" x="{across(band[0]):.1f}" y="{TOP}" {size}/>')
    for curve in curves:
        spots_text = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in curve.data[:: 1 + len(curve.data) // MAX_POINTS])
        parts.append(f'<polyline class="{curve.kind}" points="{spots_text}"><title>{escape(curve.name)}</title></polyline>')
        kind = f"point{' other' if curve.kind.endswith('other') else ''}"
        for x, y in curve.data if curve.dots else ():
            title = f"<title>{escape(curve.name)}: {y:.4f} at {x:.0f}</title>"
            parts.append(f'<circle class="{kind}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="3">{title}</circle>')
    if target is not None:
        parts.append(level(target, "target"))
        keys = [*keys, ("key-target", f"&#9476; target {target}")]
    if band:
        text = f"RCP band, from the least mean of a series that passes, {band[0]:,.0f}, to the reference's mean, {band[1]:,.0f}"
        keys = [*keys, ("key-band", f"&#9608; {text}")]
    legend = " ".join(f"<span class={kind}>{text}</span>" for kind, text in keys)
    return "".join(parts) + "</svg>" + (f"<p class=keys>{legend}</p>" if legend else "")


# Tables.


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they stand for, both plain text; a long name may break after an underscore."""
    cells = [[escape(name).replace("_", "_<wbr>"), "<br>".join(map(escape, value.splitlines()))] for name, value in rows]
    return table([], cells, kind="facts") if cells else ""


def table(heads: list[str], rows: list[list[str]], texts: tuple[int, ...] = (), kind: str = "") -> str:
    """Cells are HTML already. All columns but the first and `texts` hold numbers, unless the table has no heads."""

    def row(tag: str, cells: list[str]) -> str:
        kinds = ["" if not heads or not index else ' class="t"' if index in texts else ' class="n"' for index in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"

    body = f"{row('th', heads) if heads else ''}{''.join(row('td', cells) for cells in rows)}"
    return f"<div class=scroll><table{f' class={kind}' if kind else ''}>{body}</table></div>"


# Numbers.


def points(records: list[dict], x: str, y: str) -> list[tuple[float, float]]:
    return [(record[x], record[y]) for record in records if finite(record.get(x)) and finite(record.get(y))]


def ticks(low: float, high: float) -> list[float]:
    """Some four to six round numbers between `low` and `high`."""
    raw = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def span(values: list[float], form: str = ",.0f") -> str:
    """Least, median and most of `values`."""
    return " / ".join(format(value, form) for value in (min(values), median(values), max(values))) if values else "-"


def number(value: object) -> str:
    """Whole numbers in full, others with about four digits; a dash for what is missing."""
    if value is None:
        return "-"
    if not finite(value):
        return escape(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4f}"
