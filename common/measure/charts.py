"""Charts of a measurement's rows, as blocks of common/html/page.py. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from common.html import page
from common.html.page import COLORS, Block, Curve
from common.measure.tables import Plot

# x, y, and the value of the plot's `by`
Point = tuple[Any, float, str]
MAX_LINEAR = 50.0  # largest ratio of two x on a linear axis; sizes of messages have a larger one


def blocks(
    plot: Plot, labels: tuple[str, str], points: Sequence[Point], roofs: dict[str, Any]
) -> list[Block]:
    """Return the blocks of the page that show `points` as `plot` declares.

    `labels`: of x and y. `roofs`: the note "roofline" of the result, for a plot of that kind.
    """
    title = " · ".join(dict.fromkeys((plot.title, labels[1])))
    if plot.kind == "bars":
        return [page.bars(title, [(str(x), y, by) for x, y, by in points])]
    if plot.kind == "links":
        return [{"notes": [plot.title]}, _links(points)]
    log = {}
    if plot.kind == "roofline":
        log = {"x": 10, "y": 10}
        curves = _roofline(points, roofs)
    else:
        curves = [
            Curve(by or labels[1], spots, color, dots=True)
            for color, (by, spots) in enumerate(_grouped(points).items())
        ]
        xs = [x for x, _, _ in points]
        if 0 < MAX_LINEAR * min(xs) < max(xs):
            log = {"x": 2}
    return [page.chart(title, labels[0], curves, log=log)]


def _grouped(points: Sequence[Point]) -> dict[str, list[tuple[float, float]]]:
    """Return value of `by` -> points (x, y)."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for x, y, by in points:
        groups.setdefault(by, []).append((x, y))
    return groups


def _links(points: Sequence[Point]) -> Block:
    """Return a table with a row for each GPU that is copied from, and a column for each target.

    A cell is the GB/s and the name of the link. x of a point: "0 to 1".
    """
    cells = {tuple(pair.split(" to ")): f"{speed:.0f} {link}" for pair, speed, link in points}
    gpus = sorted(set(chain(*cells)), key=int)
    rows = [(source, *(cells.get((source, target), "") for target in gpus)) for source in gpus]
    return page.table(("GPU", *gpus), rows)


def _roofline(points: Sequence[Point], roofs: dict[str, Any]) -> list[Curve]:
    """Return the fastest point at each x, and a line for each roof of the machine.

    Without a peak, the only roof is the bandwidth. Form of `roofs`:

        {"bandwidth": [name, bytes per second / 1e12], "peaks": [[name, TFLOP/s], ...]}
    """
    curves = []
    for color, (by, spots) in enumerate(_grouped(points).items()):
        # A curve has one y at each x, and the last one counts.
        curves.append(Curve(by, sorted(spots), color, scatter=True))
    xs = [x for x, _, _ in points]
    left = min(xs) / 8
    right = max(xs) * 2
    name, bandwidth = roofs["bandwidth"]
    peaks = roofs["peaks"]
    top = max((level for _, level in peaks), default=max(y for _, y, _ in points))
    ridge = min(right, max(top, left * bandwidth) / bandwidth)  # where the bandwidth's line ends
    start = min(left, ridge / 4)
    lines = {name: [(start, bandwidth * start), (ridge, bandwidth * ridge)]}
    for name, level in peaks:
        lines[name] = [(level / bandwidth, level), (right, level)]
    for color, (name, line) in enumerate(lines.items(), start=len(curves)):
        curves.append(Curve(name, line, len(COLORS) + color))  # dashed
    return curves
