"""A measurement on several GPUs under torchrun, and helpers for its ranks.

torchrun starts one process per GPU. On a CPU, a process takes the place of a GPU.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import Hang, Interrupted, OutOfMemory, RunError
from common.sharding.reduce_scatter import NcclReduceScatter, Shard, pad_rows
from common.training.guard import run_guarded
from launch.diagnosis import diagnose
from launch.processes.ranks import cpus_of_ranks, rank_environment, ranks_command
from launch.processes.supervise import supervise
from launch.selection.machine import Machine

# Files in the folder of a run: the request, and the measurements of rank 0.
REQUEST = "request.json"
MEASURED = "measured.json"


def run_ranks(
    folder: Path,
    count: int,
    arguments: list[str],
    settings: Mapping[str, str],
    limit_s: float = math.inf,
    threads: int = 1,
) -> tuple[dict[str, Any], RunError | None]:
    """Run `python -m <arguments>` on `count` ranks. Return their measurements and their error.

    The measurements are the content of MEASURED in `folder`, or {}. The error is the one that ended
    the ranks, or None. `settings`: environment variables. `limit_s`: time limit in seconds.
    `threads`: number of threads of each rank. Raises Interrupted.
    """
    environment = rank_environment(os.environ, settings, threads) | {"TMPDIR": str(folder)}
    deadline = time.monotonic() + limit_s
    cpus = cpus_of_ranks(Machine.of(os.environ).probe, count)
    command = ranks_command(folder, count, ["-m", *arguments], cpus=cpus)
    ending = supervise(
        command, environment, folder, stop=lambda: time.monotonic() > deadline, stdout=sys.stderr
    )
    if ending.signal_number:
        raise Interrupted(ending.signal_number)
    path = folder / MEASURED
    measured = json.loads(path.read_text()) if path.is_file() else {}
    if ending.stopped:
        return measured, Hang(
            f"{count} ranks needed more than {limit_s:.0f} s",
            "a rank hangs, or the machine is very slow",
            "measure on one GPU, or fewer things at a time",
        )
    if not ending.returncode:
        return measured, None
    error = diagnose(folder, count)[0]
    # A row of the result reports out of memory. For any other failure, print the traceback, because
    # it is deleted with the folder.
    if error.kind != OutOfMemory.kind:
        for file in sorted(folder.glob("ranks/*.traceback")):
            print(file.read_text(), file=sys.stderr)
    return measured, error


# --- in a rank ------------------------------------------------------------------------------------


def main(measure: Callable[[Path], None]) -> None:
    """Run `measure` on the folder that the first argument of the command line names."""
    folder = Path(sys.argv[1])
    run_guarded(folder, int(os.environ["RANK"]), partial(measure, folder), lambda: None, lambda: 0)


class LocalReduceScatter(NcclReduceScatter):
    """A reduce-scatter without communication, for measurements.

    Each rank uses its rows of its own gradient as if they were the mean over all ranks. Computation
    and memory are the same, but no rank waits for another. The weights after such steps are wrong.
    """

    def _means(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        ranks = self.group.size()
        rank = self.group.rank()
        padded = (
            pad_rows(gradient, len(shard.master) * ranks)
            for shard, gradient in zip(shards, gradients, strict=True)
        )
        return [gradient.chunk(ranks)[rank].to(self.dtype, copy=True) for gradient in padded]
