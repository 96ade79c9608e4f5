"""Speed of all-reduce over pairs of nodes and over all: a program for torchrun.

    torchrun ... -m launch.preflight.nodes.all_reduce DEVICE SECONDS

The pairs form a ring: each node and the next one, one pair after another. The first rank prints
{"nodes": [0, 1]} on one line before each measurement, and the same with "gbit_s" after it.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from launch.preflight.measure import median_s

BYTES = {"cuda": 2**28, "cpu": 2**22}  # size of the tensor on each rank
TIMEOUT_S = 60.0  # for each measurement


def main(device: str, seconds: float) -> None:
    """Measure on this rank. The first rank prints the results."""
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=place if device == "cuda" else None,
    )
    nodes = dist.get_world_size() // ranks_per_node
    ring = [[node, (node + 1) % nodes] for node in range(nodes)] if nodes > 2 else []
    for members in [*ring, list(range(nodes))]:
        result: dict = {"nodes": members}
        _report(result)
        result["gbit_s"] = bus_bandwidth(members, ranks_per_node, place, seconds)
        _report(result)
    dist.destroy_process_group()


def _report(result: dict) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


def bus_bandwidth(
    nodes: list[int], ranks_per_node: int, place: torch.device, seconds: float
) -> float:
    """Return the bus bandwidth of an all-reduce among these nodes in Gb/s, on all ranks.

    It is defined as in NCCL's tests (PERFORMANCE.md of nccl-tests): with n ranks, 2 (n - 1) / n of
    the bytes count. The ranks of other nodes wait.
    """
    members = sorted(
        node * ranks_per_node + rank for node in nodes for rank in range(ranks_per_node)
    )
    group = dist.new_group(members)
    slowest = torch.zeros((), device=place)
    if dist.get_rank() in members:
        tensor = torch.zeros(BYTES[place.type] // 4, device=place)
        slowest += median_s(lambda: dist.all_reduce(tensor, group=group), place, seconds, group)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    carried = 2 * (len(members) - 1) / len(members) * BYTES[place.type]
    return carried * 8 / 1e9 / float(slowest)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
    os._exit(0)  # threads of gloo
