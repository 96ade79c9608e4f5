"""Links between the GPUs of this machine: names given by the driver, and speeds of copies.

`python -m throughput.links FILE` measures the copies in a separate process, so that its contexts on
all GPUs end with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import permutations, product
from pathlib import Path
from typing import Any

from common.machine.hardware import visible_indices

COMMANDS = {"nvidia": ["nvidia-smi", "topo", "-m"], "amd": ["rocm-smi", "--showtopo"]}
VISIBLE = {
    "nvidia": ["CUDA_VISIBLE_DEVICES"],
    "amd": ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"],
}
COPY_BYTES = 2**28
REPEATS = 10
Names = dict[tuple[int, int], str]  # (GPU, another GPU) -> NV18, XGMI, PIX, ...


# --- names given by the driver --------------------------------------------------------------------


def read_names(vendor: str, environment: Mapping[str, str], count: int) -> tuple[Names, str]:
    """Return the names of the links between the visible GPUs, and why they are missing or "".

    GPUs are numbered as torch numbers them. `vendor`: "nvidia" or "amd". `count`: number of GPUs
    that torch sees.
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
    visible = list(range(total))
    for name in VISIBLE[vendor]:
        visible = [visible[i] for i in visible_indices(len(visible), environment.get(name))]
    if len(visible) != count:
        why = f"{' '.join(command)} shows {total} GPUs and torch {count}: the order is unknown"
        return {}, why
    names: Names = {}
    for (i, first), (j, second) in product(enumerate(visible), repeat=2):
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
            for name, link in zip(head, cells[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and int(name[3:]) != gpu:
                    names[gpu, int(name[3:])] = link
    return names


# --- copies ---------------------------------------------------------------------------------------


def measure_copies(path: Path) -> None:
    """Write [from, to, GB/s, peer access] of every ordered pair of GPUs to `path`, as JSON."""
    import torch

    copies = []
    for source, target in permutations(range(torch.cuda.device_count()), 2):
        peer = torch.cuda.can_device_access_peer(source, target)
        copies.append([source, target, copy_gb_per_s(source, target), peer])
    path.write_text(json.dumps(copies))


def copy_gb_per_s(source: int, target: int) -> float:
    """Return the GB/s of copies in one direction, while the other GPUs are idle."""
    import torch

    sent = torch.randint(256, (COPY_BYTES,), device=f"cuda:{source}", dtype=torch.uint8)
    received = torch.empty_like(sent, device=f"cuda:{target}")

    def seconds(repeats: int) -> float:
        for gpu in (source, target):
            torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        for _ in range(repeats):
            received.copy_(sent, non_blocking=True)
        for gpu in (source, target):
            torch.cuda.synchronize(gpu)
        return time.perf_counter() - began

    seconds(2)  # warm-up
    return REPEATS * COPY_BYTES / seconds(REPEATS) / 1e9


# --- rows -----------------------------------------------------------------------------------------


def rows(names: Names, copies: list[list]) -> list[dict[str, Any]]:
    """Return a row for each ordered pair of GPUs.

    `names`: from `read_names`. `copies`: the lists that `measure_copies` wrote.
    """
    speeds: dict[tuple[int, int], dict[str, Any]] = {}
    for source, target, gb_per_s, peer in copies:
        speeds[source, target] = {"gb_per_s": gb_per_s, "peer": "yes" if peer else "no"}
    pairs = []
    for pair in sorted({*names, *speeds}):
        row = {"pair": f"{pair[0]} to {pair[1]}", "link": names.get(pair, "unknown")}
        pairs.append(row | speeds.get(pair, {}))
    return pairs


if __name__ == "__main__":
    measure_copies(Path(sys.argv[1]))
