"""A measurement on several GPUs under torchrun, and helpers for its ranks.

torchrun starts one process per GPU. On a CPU, a process takes the place of a GPU.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from common.errors import Hang, Interrupted, OutOfMemory, RunError
from common.measure.files import write_json
from common.sharding.processes import Processes, max_over_ranks
from common.sharding.reduce_scatter import NcclReduceScatter, Shard, pad_rows
from common.training.guard import run_guarded
from common.training.metrics import peak_bytes
from launch.diagnosis import diagnose
from launch.processes.ranks import cpus_of_ranks, rank_environment, ranks_command
from launch.processes.supervise import supervise
from launch.selection.machine import Machine
from throughput.timing import step_ms

# Files in the folder of a run: the request, and the measurements of rank 0.
REQUEST = "request.json"
MEASURED = "measured.json"
Request = TypeVar("Request")


def run_request(
    module: str,
    request: Any,
    count: int,
    settings: Mapping[str, str],
    limit_s: float,
) -> tuple[dict[str, Any], RunError | None]:
    """Run `module` with `request`, a dataclass, on `count` ranks. Return what `run_ranks` returns.

    On a CPU each rank has one thread.
    """
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        write_json(Path(name) / REQUEST, asdict(request))
        return run_ranks(Path(name), count, [module, name], settings, limit_s)


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


def read_request(folder: Path, kind: type[Request]) -> Request:
    """Return the request in `folder`, a dataclass of class `kind`."""
    return _built(kind, json.loads((folder / REQUEST).read_text()))


def _built(kind: Any, fields: dict[str, Any]) -> Any:
    """Return a dataclass of class `kind` from the fields that `asdict` returned."""
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if is_dataclass(types[name]):
            value = _built(types[name], value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def write_measured(folder: Path, measured: dict[str, Any], processes: Processes) -> None:
    """Write the measurements into `folder` on rank 0."""
    if processes.rank == 0:
        write_json(folder / MEASURED, measured)


def slowest_ms(
    step: Callable[[], object], warmup: int, steps: int, processes: Processes
) -> list[float]:
    """Return the time of each of `steps` consecutive calls on the slowest rank."""
    return max_over_ranks(step_ms(step, processes.device.type, warmup, steps), processes)


def fullest_bytes(processes: Processes) -> int:
    """Return the peak memory of the fullest rank, 0 on a CPU."""
    return int(max_over_ranks([peak_bytes(processes.device)], processes)[0])


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
