"""Still pictures of charts: on paper, without JavaScript, and in words for screen readers.

templates/page.html draws them as SVG. charts.js replaces them on the screen by charts to zoom into.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

WIDTH = 720.0  # size of the picture, in units of its viewBox
HEIGHT = 280.0
LEFT = 64.0  # margins, for the numbers on the axes
RIGHT = 28.0
TOP = 10.0
BOTTOM = 42.0
POINTS = 180  # most points of a curve
TICKS = 5  # about so many on an axis
STEPS = (1, 2, 2.5, 5, 10)  # sizes of a step between ticks, times a power of ten
ROOM = 0.08  # of the range of y, above and below the curves

Position = Callable[[float], float]


def picture(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what the template draws for a chart.

    `spec`: the value of the block that `page.chart` returned.
    """
    xs = [x for curve in spec["series"] for x in curve["data"][0]]
    ys = [y for curve in spec["series"] for y in curve["data"][1]]
    log = spec.get("log") or {}
    target = spec.get("target")
    band = spec.get("band")
    low_x, high_x = min(xs), max(xs)
    if not log.get("x") and not all(curve["scatter"] for curve in spec["series"]):
        low_x = min(0.0, low_x)
    if target is not None:
        ys.append(target)
    low_y, high_y = min(ys), max(ys)
    if not log.get("y"):
        room = ROOM * (high_y - low_y) or abs(high_y) * ROOM or 1.0
        low_y, high_y = low_y - room, high_y + room
    x_of = _axis(low_x, high_x, LEFT, WIDTH - RIGHT, bool(log.get("x")))
    y_of = _axis(low_y, high_y, HEIGHT - BOTTOM, TOP, bool(log.get("y")))
    return {
        "words": words(spec),
        "curves": [_drawn(curve, x_of, y_of) for curve in spec["series"]],
        "x_ticks": [(x_of(x), _text(x)) for x in ticks(low_x, high_x, bool(log.get("x")))],
        "y_ticks": [(y_of(y), _text(y)) for y in ticks(low_y, high_y, bool(log.get("y")))],
        "target": None if target is None else y_of(target),
        "band": band and _clipped(x_of(band[0]), x_of(band[1])),
    }


def words(spec: dict[str, Any]) -> str:
    """Describe a chart in words: its label, and the range and the last value of each curve."""
    parts = []
    for curve in spec["series"]:
        ys = curve["data"][1]
        part = f"{curve['name']}: {_text(min(ys))} to {_text(max(ys))}"
        if not curve["scatter"] and len(ys) > 1:
            part += f", last {_text(ys[-1])}"
        parts.append(part)
    return f"{spec['label']}, over {spec['x']}. {'; '.join(parts)}."


def ticks(low: float, high: float, is_log: bool = False) -> list[float]:
    """Return round numbers from `low` to `high`: powers of ten on a logarithmic axis."""
    if high <= low:
        return [low]
    if is_log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers] or [low, high]
    unit = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    step = next(size * unit for size in STEPS if size * unit >= (high - low) / TICKS)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _axis(low: float, high: float, start: float, end: float, is_log: bool) -> Position:
    """Return a function from a value to its place between `start` and `end`."""
    scale = math.log10 if is_log else float
    width = (scale(high) - scale(low)) or 1.0
    return lambda value: round(start + (end - start) * (scale(value) - scale(low)) / width, 1)


def _clipped(start: float, end: float) -> tuple[float, float] | None:
    """Return left edge and width of a band within the picture, None if it is outside."""
    start = max(start, LEFT)
    end = min(end, WIDTH - RIGHT)
    return (start, max(end - start, 1.0)) if start < end else None


def _drawn(curve: dict[str, Any], x_of: Position, y_of: Position) -> dict[str, Any]:
    """Return the places of a curve's points, and how it is drawn."""
    places = [(x_of(x), y_of(y)) for x, y in _thinned(*curve["data"])]
    has_dots = curve["dots"] or len(places) == 1
    return {
        "line": "" if curve["scatter"] else " ".join(f"{x:g},{y:g}" for x, y in places),
        "dots": places if has_dots else [],
        "color": curve["color"],
        "dash": " ".join(map(str, curve["dash"])),
    }


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most POINTS points: of each part of the curve, the least and the largest."""
    spots = list(zip(xs, ys, strict=True))
    if len(spots) <= POINTS:
        return spots
    size = -(-len(spots) // (POINTS // 2))
    kept = []
    for start in range(0, len(spots), size):
        part = spots[start : start + size]
        kept += sorted({min(part, key=lambda spot: spot[1]), max(part, key=lambda spot: spot[1])})
    return kept


def _text(value: float) -> str:
    """Return a number as text, with at most four digits that matter."""
    if value == int(value) and abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
