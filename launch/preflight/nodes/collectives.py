"""Bandwidth of all-reduce and all-to-all: `python -m launch.preflight.nodes.collectives DEVICE S`.

The agent of each node starts one process per GPU, or one on a CPU, with torchrun's variables (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Rank 0 prints the bus bandwidths in Gb/s.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from launch.preflight.measure import median_s

BYTES = {"cuda": 2**28, "cpu": 2**22}  # size of the tensor on each rank
# For the start of the process group, and for each collective. The agent's own limit is longer.
TIMEOUT_S = 60.0


def main(device: str, seconds: float) -> None:
    """Measure on this rank. Rank 0 prints the result."""
    faulthandler.dump_traceback_later(4 * TIMEOUT_S, exit=True)
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=place if device == "cuda" else None,
    )
    rates = measure(place, seconds)
    if dist.get_rank() == 0:
        print(json.dumps(rates), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(place: torch.device, seconds: float) -> dict[str, float]:
    """Return name of a collective -> bus bandwidth in Gb/s.

    Bus bandwidth is defined as in NCCL's tests (PERFORMANCE.md of nccl-tests). With n ranks, an
    all-reduce counts 2 (n - 1) / n of the bytes, and an all-to-all (n - 1) / n.
    """
    ranks = dist.get_world_size()
    source = torch.zeros(BYTES[place.type] // 4 // ranks * ranks, device=place)
    target = torch.empty_like(source)
    carried = (ranks - 1) / ranks * source.nbytes * 8 / 1e9
    reduce_s = median_s(lambda: dist.all_reduce(source), place, seconds)
    exchange_s = median_s(lambda: dist.all_to_all_single(target, source), place, seconds)
    return {"all-reduce": 2 * carried / reduce_s, "all-to-all": carried / exchange_s}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
    os._exit(0)  # threads of gloo
