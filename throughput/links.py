"""Links between the GPUs of this machine: the driver's names, speeds of copies, and a picture.

`python -m throughput.links FILE` measures the copies in a separate process, since the contexts on
all GPUs end with it.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.hardware import visible_indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMANDS = {"nvidia": ["nvidia-smi", "topo", "-m"], "amd": ["rocm-smi", "--showtopo"]}
VISIBLE = {
    "nvidia": ["CUDA_VISIBLE_DEVICES"],
    "amd": ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"],
}
COPY_BYTES = 2**28
REPEATS = 10
Names = dict[tuple[int, int], str]  # (GPU, another GPU) -> NV18, XGMI, PIX, ...


# --- names from the driver ------------------------------------------------------------------------


def ask_driver(vendor: str, environment: Mapping[str, str], count: int) -> tuple[Names, str]:
    """Return the names of the links between the `count` visible GPUs, and "" or why there are none.

    GPUs are numbered as torch numbers them.
    """
    command = COMMANDS[vendor]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"{' '.join(command)}: {error}"
    driver_names = {"nvidia": parse_nvidia, "amd": parse_rocm}[vendor](answer.stdout)
    total = 1 + max((gpu for pair in driver_names for gpu in pair), default=-1)
    chosen = list(range(total))
    for name in VISIBLE[vendor]:
        chosen = [chosen[i] for i in visible_indices(len(chosen), environment.get(name))]
    if len(chosen) != count:
        return (
            {},
            f"{' '.join(command)} shows {total} GPUs and torch {count}: the order is unknown",
        )
    names: Names = {}
    for (i, first), (j, second) in product(enumerate(chosen), repeat=2):
        if (first, second) in driver_names:
            names[i, j] = driver_names[first, second]
    return names, ""


def parse_nvidia(text: str) -> Names:
    """Parse the matrix of `nvidia-smi topo -m`, without the columns of network cards."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    return _matrix([line.split() for line in lines])


def parse_rocm(text: str) -> Names:
    """Parse the matrix "Link Type between two GPUs" of `rocm-smi --showtopo`."""
    part = text.partition("Link Type between two GPUs")[2].partition("\n")[2].partition("\n===")[0]
    return _matrix([line.split() for line in part.splitlines()])


def _matrix(rows: list[list[str]]) -> Names:
    """Parse a header of GPU0 GPU1 ... and rows that begin with a GPU, without the diagonal."""
    names: Names = {}
    head: list[str] = []
    for cells in filter(None, rows):
        if not head and re.fullmatch(r"GPU\d+", cells[0]):
            head = cells
        elif head and re.fullmatch(r"GPU\d+", cells[0]):
            gpu = int(cells[0][3:])
            named = [
                (int(name[3:]), link)
                for name, link in zip(head, cells[1:], strict=False)
                if re.fullmatch(r"GPU\d+", name)
            ]
            names |= {(gpu, other): link for other, link in named if other != gpu}
    return names


# --- copies ---------------------------------------------------------------------------------------


def measure_copies(path: Path) -> None:
    """Write [from, to, GB/s, peer access] of every ordered pair of GPUs to `path`, as JSON."""
    import torch

    gpus = range(torch.cuda.device_count())
    pairs = [(i, j) for i in gpus for j in gpus if i != j]
    path.write_text(
        json.dumps(
            [[i, j, copy_gb_per_s(i, j), torch.cuda.can_device_access_peer(i, j)] for i, j in pairs]
        )
    )


def copy_gb_per_s(source: int, target: int) -> float:
    """Return the GB/s of copies in one direction, while the other GPUs are idle."""
    import torch

    there = torch.randint(256, (COPY_BYTES,), device=f"cuda:{source}", dtype=torch.uint8)
    here = torch.empty_like(there, device=f"cuda:{target}")

    def seconds(repeats: int) -> float:
        for gpu in (source, target):
            torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        for _ in range(repeats):
            here.copy_(there, non_blocking=True)
        for gpu in (source, target):
            torch.cuda.synchronize(gpu)
        return time.perf_counter() - began

    seconds(2)
    return REPEATS * COPY_BYTES / seconds(REPEATS) / 1e9


# --- rows and picture -----------------------------------------------------------------------------


def rows(names: Names, copies: list[list]) -> list[dict[str, Any]]:
    """Return a row for each ordered pair of GPUs.

    `names`: from `ask_driver`. `copies`: the lists that `measure_copies` wrote.
    """
    speeds = {
        (i, j): {"gb_per_s": speed, "peer": "yes" if peer else "no"} for i, j, speed, peer in copies
    }
    pairs = sorted({*names, *speeds})
    return [
        {"pair": f"{i} to {j}", "link": names.get((i, j), "unknown"), **speeds.get((i, j), {})}
        for i, j in pairs
    ]


def draw(axes: Axes, points: Iterable[tuple[str, float, str]], colors: Sequence[str]) -> None:
    """Draw the GPUs in a circle and, to the right, the matrix of speeds, where darker is faster.

    A line between two GPUs has the color of their kind of link. `points`: (pair, GB/s, link).
    """
    speeds: dict[tuple[int, ...], tuple[float, str]] = {}
    for pair, speed, link in points:
        speeds[tuple(map(int, pair.split(" to ")))] = (speed, link)
    gpus = sorted({gpu for pair in speeds for gpu in pair})
    kinds = dict.fromkeys(link for _, link in speeds.values())
    color = dict(zip(kinds, cycle(colors), strict=False))
    place: dict[int, tuple[float, float]] = {}
    for number, gpu in enumerate(gpus):
        angle = 2 * math.pi * number / len(gpus)
        place[gpu] = (math.sin(angle), math.cos(angle))
    for (i, j), (_, link) in speeds.items():
        axes.plot(*zip(place[i], place[j], strict=True), color=color[link], linewidth=1.5, zorder=1)
    for link in color:
        axes.plot([], [], color=color[link], label=link)  # only for the legend
    for gpu, (x, y) in place.items():
        axes.plot([x], [y], "o", color="white", markeredgecolor="black", markersize=16, zorder=2)
        axes.text(x, y, str(gpu), ha="center", va="center", color="black", zorder=3)
    most = max(speed for speed, _ in speeds.values())
    cell = 2.2 / (len(gpus) + 1)
    for row, gpu in enumerate(gpus, start=1):
        for column, other in enumerate(gpus, start=1):
            left = 1.5 + cell * column
            middle = 1.1 - cell * (row + 0.5)
            if row == 1:
                axes.text(left + cell / 2, 1.1 - cell / 2, str(other), ha="center", va="center")
            if speed := speeds.get((gpu, other), (0.0, ""))[0]:
                right = left + cell
                bottom = middle - cell / 2
                top = middle + cell / 2
                xs = [left, right, right, left]
                ys = [bottom, bottom, top, top]
                axes.fill(xs, ys, color=colors[0], alpha=0.5 * speed / most, linewidth=0)
                axes.text(
                    left + cell / 2, middle, f"{speed:.0f}", ha="center", va="center", fontsize=7
                )
        axes.text(1.5 + cell / 2, 1.1 - cell * (row + 0.5), str(gpu), ha="center", va="center")
    axes.set_aspect("equal")
    axes.set_axis_off()


if __name__ == "__main__":
    measure_copies(Path(sys.argv[1]))
