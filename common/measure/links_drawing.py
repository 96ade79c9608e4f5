"""Drawing of the links between GPUs (throughput/links.py), for page.html. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle

from matplotlib.axes import Axes


def draw(axes: Axes, points: Iterable[tuple[str, float, str]], colors: Sequence[str]) -> None:
    """Draw the GPUs in a circle and, to the right, the matrix of speeds, in which darker is faster.

    A line between two GPUs has the color of its kind of link. `points`: (pair, GB/s, link).
    """
    speeds: dict[tuple[int, ...], float] = {}
    links: dict[tuple[int, ...], str] = {}
    for pair, speed, link in points:
        numbers = tuple(map(int, pair.split(" to ")))
        speeds[numbers] = speed
        links[numbers] = link
    gpus = sorted({gpu for pair in speeds for gpu in pair})
    _draw_circle(axes, gpus, links, colors)
    _draw_matrix(axes, gpus, speeds, colors[0])
    axes.set_aspect("equal")
    axes.set_axis_off()


def _draw_circle(
    axes: Axes, gpus: list[int], links: dict[tuple[int, ...], str], colors: Sequence[str]
) -> None:
    kinds = dict.fromkeys(links.values())
    color = dict(zip(kinds, cycle(colors), strict=False))
    place: dict[int, tuple[float, float]] = {}
    for number, gpu in enumerate(gpus):
        angle = 2 * math.pi * number / len(gpus)
        place[gpu] = (math.sin(angle), math.cos(angle))
    for (i, j), link in links.items():
        axes.plot(*zip(place[i], place[j], strict=True), color=color[link], linewidth=1.5, zorder=1)
    for link in color:
        axes.plot([], [], color=color[link], label=link)  # only for the legend
    for gpu, (x, y) in place.items():
        axes.plot([x], [y], "o", color="white", markeredgecolor="black", markersize=16, zorder=2)
        axes.text(x, y, str(gpu), ha="center", va="center", color="black", zorder=3)


def _draw_matrix(
    axes: Axes, gpus: list[int], speeds: dict[tuple[int, ...], float], color: str
) -> None:
    most = max(speeds.values())
    cell = 2.2 / (len(gpus) + 1)
    for row, gpu in enumerate(gpus, start=1):
        for column, other in enumerate(gpus, start=1):
            left = 1.5 + cell * column
            middle = 1.1 - cell * (row + 0.5)
            if row == 1:
                axes.text(left + cell / 2, 1.1 - cell / 2, str(other), ha="center", va="center")
            if speed := speeds.get((gpu, other), 0.0):
                right = left + cell
                bottom = middle - cell / 2
                top = middle + cell / 2
                xs = [left, right, right, left]
                ys = [bottom, bottom, top, top]
                axes.fill(xs, ys, color=color, alpha=0.5 * speed / most, linewidth=0)
                axes.text(
                    left + cell / 2, middle, f"{speed:.0f}", ha="center", va="center", fontsize=7
                )
        axes.text(1.5 + cell / 2, 1.1 - cell * (row + 0.5), str(gpu), ha="center", va="center")
