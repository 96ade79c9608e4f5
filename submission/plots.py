"""Pieces of a self-contained page: style, curves and bars as inline SVG, tables, numbers for people. No script, nothing from outside.

Everything is drawn in a view box of WIDTH x HEIGHT units that scales with the page; on a narrow screen the style makes the text
in it larger, and tables scroll inside their own box. Standard library only.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 34, 56  # margins of a plot, in SVG units; text may be 22 of them high
MAX_POINTS = 800  # of a curve; a run of 10,000 steps needs no more on 680 pixels
BINS = 40
PHASES = ("init", "warmup", "train", "eval")

STYLE = """
:root { color-scheme: light dark; --text:#1b1f24; --dim:#5b6470; --page:#ffffff; --card:#f4f5f7; --line:#d5d9de;
  --train:#2166ac; --eval:#b2182b; --target:#1a7f37; --good:#1a7f37; --bad:#b2182b; --warn:#8a5a00; --on:#ffffff;
  --init:#8073ac; --warmup:#b8860b; --band:#7b5ea7; }
@media (prefers-color-scheme: dark) { :root { --text:#e4e7eb; --dim:#9aa4b0; --page:#14171a; --card:#1e2327; --line:#3a4249;
  --train:#78b4e8; --eval:#f08070; --target:#5fc57a; --good:#237a3b; --bad:#a32a36; --warn:#8a5a00;
  --init:#a99bd6; --warmup:#d9b44a; --band:#b39ddb; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 800px; margin: 0 auto; padding: 16px; }
body.wide { max-width: 1100px; }
h1 { font-size: 22px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin-top: 32px; }
.banner { color: var(--on); padding: 12px 16px; border-radius: 6px; margin: 12px 0; overflow-wrap: anywhere; } .banner b { font-size: 18px; }
.good { background: var(--good); } .bad { background: var(--bad); } .warn { background: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--dim); font-weight: 600; overflow-wrap: normal; }
td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
.facts td:first-child { overflow-wrap: normal; width: 32%; }
.many th, .many td { overflow-wrap: normal; white-space: nowrap; }
.many td.t { white-space: normal; min-width: 180px; } .many td.t, .many th.t { text-align: left; padding-left: 8px; }
pre { background: var(--card); padding: 12px; border-radius: 6px; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; overflow: visible; } svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--line); } .curve { fill: none; stroke: var(--train); stroke-width: 1.5; } .point { fill: var(--eval); }
.evalcurve { fill: none; stroke: var(--eval); stroke-width: 1.2; } .target { stroke: var(--target); stroke-dasharray: 6 4; }
.run { fill: none; stroke: var(--eval); stroke-width: 1.3; stroke-opacity: 0.6; } .run.other { stroke: var(--dim); stroke-dasharray: 3 3; }
.point.other { fill: var(--page); stroke: var(--dim); stroke-width: 1.5; }
.band { fill: var(--band); fill-opacity: 0.16; } .bandline { stroke: var(--band); stroke-width: 1.5; } svg text.bandtext { fill: var(--band); }
.mean { stroke: var(--train); stroke-width: 2; stroke-dasharray: 8 4; }
.gpu { fill: none; stroke: var(--train); stroke-width: 1.1; stroke-opacity: 0.55; }
.h-power { fill: var(--dim); fill-opacity: 0.5; } .h-bad { fill: var(--eval); }
.bar { fill: var(--train); } .key-train { color: var(--train); } .key-eval { color: var(--eval); } .key-target { color: var(--target); }
.key-band { color: var(--band); } .key-dim, .dim { color: var(--dim); }
.p-init { fill: var(--init); } .p-warmup { fill: var(--warmup); } .p-train { fill: var(--train); } .p-eval { fill: var(--eval); }
.bars .phases { min-width: 200px; } .bars td.t { width: 60%; padding-right: 12px; }
.keys span { margin-right: 14px; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; }
.two > div { min-width: 0; }
@media (max-width: 760px) { .two { display: block; } }
.two svg text { font-size: 17px; } .solo { max-width: 700px; }
@media (max-width: 560px) { svg text, .two svg text { font-size: 22px; } .keys span { display: block; } }
"""


def page(title: str, sections: list[str], wide: bool = False) -> str:
    """The page as HTML text; `sections` are HTML already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{''.join(sections)}"
    return f"<!doctype html><html lang=en><head>{head}</head><body{' class=wide' if wide else ''}>{body}</body></html>\n"


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def banner(kind: str, lines: list[str]) -> str:
    """`kind` is good, bad or warn; the first of `lines`, HTML already, stands out."""
    return f'<div class="banner {kind}"><b>{lines[0]}</b>{"".join(f"<br>{line}" for line in lines[1:])}</div>'


MINIATURE_NOTICE = banner(
    "warn", ["A miniature: this is not a benchmark result.", "A small model with its own target; it says nothing about MLPerf."]
)


def keys(entries: list[tuple[str, str]]) -> str:
    """A legend: (class of the colour, text)."""
    return "<p class=keys>" + " ".join(f"<span class={kind}>{text}</span>" for kind, text in entries) + "</p>"


# Plots.


@dataclass(frozen=True)
class Axes:
    """Maps data to the plot area of an SVG."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def holds(self, x: float, y: float) -> bool:
        return self.x_low <= x <= self.x_high and self.y_low <= y <= self.y_high

    def svg(self, body: str, x_label: str, y_label: str, whole_x: bool = False) -> str:
        """`whole_x`: x counts things; only whole numbers are named."""
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{y_label} over {x_label}">']
        for value in ticks(self.x_low, self.x_high):
            if not whole_x or abs(value - round(value)) < 1e-9:
                parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 21}" text-anchor="middle">{tick(value)}</text>')
        for value in ticks(self.y_low, self.y_high):
            parts.append(self.level(value, "axis"))
            parts.append(f'<text x="{LEFT - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{tick(value)}</text>')
        parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
        parts.append(f'<text x="4" y="18">{y_label}</text>')
        return "".join(parts) + body + "</svg>"

    def level(self, value: float, kind: str) -> str:
        """A horizontal line."""
        y = self.y(value)
        return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def upright(self, value: float, kind: str) -> str:
        x = self.x(value)
        return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'

    def band(self, low: float, high: float, upright: bool = True) -> str:
        """The area between two values of x, or of y; as far as it is in sight."""
        if upright:
            left, right = self.x(max(low, self.x_low)), self.x(min(high, self.x_high))
            box: tuple[float, ...] = (left, TOP, right - left, HEIGHT - TOP - BOTTOM)
        else:
            top, bottom = self.y(min(high, self.y_high)), self.y(max(low, self.y_low))
            box = (LEFT, top, WIDTH - LEFT - RIGHT, bottom - top)
        if box[2] <= 0 or box[3] <= 0:
            return ""
        x, y, width, height = (f"{value:.1f}" for value in box)
        return f'<rect class="band" x="{x}" y="{y}" width="{width}" height="{height}"/>'

    def line(self, data: list[tuple[float, float]], kind: str, hint: str = "") -> str:
        title = f"<title>{escape(hint)}</title>" if hint else ""
        coordinates = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in data)
        return f'<polyline class="{kind}" points="{coordinates}">{title}</polyline>'

    def point(self, x: float, y: float, hint: str, kind: str = "point", radius: float = 3.5) -> str:
        title = f"<title>{escape(hint)}</title>"
        return f'<circle class="{kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}">{title}</circle>'


def histogram(values: list[float], x_label: str, y_label: str) -> str:
    """Of at least one value. The slowest percent would squeeze the rest into one bin: it stands in the last bar."""
    high = sorted(values)[math.ceil(0.99 * len(values)) - 1]
    low, high = padded(min(values), high)
    counts = [0] * BINS
    for value in values:
        counts[min(int((value - low) / (high - low) * BINS), BINS - 1)] += 1
    axes = Axes(low, high, 0, 1.1 * max(counts))
    width = (WIDTH - LEFT - RIGHT) / BINS
    bars = (
        f'<rect class="bar" x="{LEFT + index * width:.1f}" y="{axes.y(count):.1f}" width="{width - 1:.1f}" height="{axes.y(0) - axes.y(count):.1f}"/>'
        for index, count in enumerate(counts)
        if count
    )
    return axes.svg("".join(bars), x_label, y_label)


def phase_bar(seconds: dict[str, float], whole: float, height: int = 28) -> str:
    """Seconds by phase as one bar; `whole` seconds would fill the width."""
    bar, left = "", 0.0
    for name, value in seconds.items():
        width = value / whole * WIDTH
        hint = f"<title>{name} {value:.1f} s</title>"
        bar += f'<rect class="p-{name}" x="{left:.2f}" y="0" width="{width:.2f}" height="{height}">{hint}</rect>'
        left += width
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="phases">{bar}</svg>'


def phase_key(phase: str) -> str:
    return f'<svg viewBox="0 0 10 10" style="width:10px"><rect class="p-{phase}" width="10" height="10"/></svg>'


# Tables.


def facts(rows: list[tuple[str, str]]) -> str:
    """Names and what they stand for, both plain text; a long name may break after an underscore."""
    return (
        table([], [[_breakable(name), "<br>".join(map(escape, value.splitlines()))] for name, value in rows], kind="facts") if rows else ""
    )


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>")


def table(heads: list[str], rows: list[list[str]], texts: tuple[int, ...] = (), kind: str = "") -> str:
    """Cells are HTML already. All columns but the first and `texts` hold numbers, unless the table has no heads."""

    def row(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{_align(index)}>{cell}</{tag}>" for index, cell in enumerate(cells)) + "</tr>"

    def _align(index: int) -> str:
        return "" if not heads or not index else ' class="t"' if index in texts else ' class="n"'

    body = f"{row('th', heads) if heads else ''}{''.join(row('td', cells) for cells in rows)}"
    return f"<div class=scroll><table{f' class={kind}' if kind else ''}>{body}</table></div>"


# Numbers.


def finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def points(records: list[dict], x: str, y: str) -> list[tuple[float, float]]:
    return [(record[x], record[y]) for record in records if finite(record.get(x)) and finite(record.get(y))]


def thinned(data: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS, each the mean of a group of neighbours."""
    group = math.ceil(len(data) / MAX_POINTS)
    if group <= 1:
        return data
    chunks = [data[index : index + group] for index in range(0, len(data), group)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Some four to six round numbers between `low` and `high`."""
    raw = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick(value: float) -> str:
    return f"{round(value, 10):,.10g}"


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def number(value: object) -> str:
    """Whole numbers in full, others with about four digits; a dash for what is missing."""
    if value is None:
        return "-"
    if not finite(value):
        return escape(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4f}"
