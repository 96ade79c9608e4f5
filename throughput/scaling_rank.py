"""Measurements of `throughput scaling` on one rank: `python -m throughput.scaling_rank FOLDER`.

torchrun starts one process per GPU. FOLDER/request.json contains the ScalingRequest. Rank 0 writes
FOLDER/measured.json after each part, so that the parts before one that runs out of memory are not
lost. The order is collectives by size, the Llama with ZeRO-2, and the GPT with DDP, which needs the
most memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import config as configs
from common.benchmarks import Rules, config_class, divisions, measured_in
from common.kernels import accumulate
from common.kernels.attention import attention_backends
from common.machine.hardware import config_path
from common.paths import ROOT
from common.sharding.processes import Processes, start_processes
from common.sharding.zero import ZeroOptimizer
from common.training.assembly import Batching
from common.training.loop import train_step as llama_step
from common.training.pretraining import assemble_random
from common.training.warmup import synthetic_batches
from launch.preflight.measure import collective
from launch.preflight.rank_report import COLLECTIVES
from throughput.gpt_model import LEARNING_RATE, build_gpt, train_step
from throughput.gpt_sizes import Size
from throughput.memory import free_memory
from throughput.ranks import (
    LocalReduceScatter,
    fullest_bytes,
    main,
    read_request,
    slowest_ms,
    write_measured,
)

TIMEOUT_S = 300.0  # timeout of a collective, during which another rank may still compile kernels
# Strategies, whose names are keys of the measurements.
DDP = "DDP"
ZERO_2 = "ZeRO-2"
STRATEGIES = (DDP, ZERO_2)


@dataclass(frozen=True)
class ScalingRequest:
    """The request for one measurement, the same for all numbers of GPUs."""

    gpu: str  # a name in common.gpu_kinds.KINDS, another GPU's name, or CPU
    gpt: Size
    llama_layers: int
    fp8: bool  # whether the Llama's linear layers use FP8
    warmup: int
    steps: int
    collective_bytes: tuple[int, ...]
    collective_repeats: int

    @property
    def rules(self) -> Rules:
        """The rules of the benchmark (on a CPU, of its miniature) with fewer layers."""
        rules = divisions(measured_in("full"))["miniature" if self.gpu == "CPU" else "closed"]
        return replace(rules, shape=replace(rules.shape, num_layers=self.llama_layers))


def measure(folder: Path) -> None:
    """Run the request in `folder` on this rank. Rank 0 writes the measurements into `folder`."""
    request = read_request(folder, ScalingRequest)
    processes = start_processes("cpu" if request.gpu == "CPU" else "cuda", TIMEOUT_S)
    measured: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {
        "collectives": partial(measure_collectives, request, processes),
        ZERO_2: partial(measure_zero_2, request, processes),
        DDP: partial(measure_ddp, request, processes),
    }
    with attention_backends(processes.device.type):
        for name, part in parts.items():
            free_memory(processes.device)
            measured[name] = part()
            write_measured(folder, measured, processes)
    dist.destroy_process_group()


# --- steps ----------------------------------------------------------------------------------------


def measure_ddp(request: ScalingRequest, processes: Processes) -> dict:
    """Measure the steps of the GPT, which is replicated on each rank.

    torch's DistributedDataParallel averages the gradients during the backward. A single rank runs
    without it.
    """
    model = build_gpt(request.gpt.shape, request.gpt.sequence_length, processes.device)
    if processes.world_size == 1:
        return measure_steps(request, processes, train_step(model, request.gpt), None)
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    step = train_step(wrapped, request.gpt)

    def without_reduction() -> None:
        with wrapped.no_sync():
            step()

    return measure_steps(request, processes, step, without_reduction)


def measure_zero_2(request: ScalingRequest, processes: Processes) -> dict:
    """Measure the steps of the Llama that this package trains, with ZeRO-2 and fused blocks.

    The reduction of gradients and the gathering of weights overlap with the computation.
    """
    rules = request.rules
    ranks = processes.world_size
    benchmark = measured_in("full")
    config = replace(
        configs.load(config_path(ROOT, benchmark, "CPU_1x1"), config_class(benchmark)),
        gpu=request.gpu,
        gpus_per_node=ranks,
        global_batch_size=ranks,
        micro_batch_size=1,
        eval_micro_batch_size=1,
        linear="fp8" if request.fp8 else "bf16",
    )
    assembly = assemble_random(config, rules, processes, seed=1)
    optimizer = assembly.optimizer
    assert isinstance(optimizer, ZeroOptimizer)
    batches = synthetic_batches(
        rules.shape.vocab_size, rules.sequence_length, processes, config.micro_batch_size
    )
    step = partial(llama_step, assembly, batches, Batching(ranks, 1), LEARNING_RATE, processes)
    local = LocalReduceScatter(
        processes.shard_group,
        None,
        optimizer.shards[0].parameter.dtype,
        accumulate.IMPLEMENTATIONS[config.kernels],
    )

    def without_reduction() -> None:
        optimizer.reduce_scatter = local
        step()

    return measure_steps(request, processes, step, without_reduction if ranks > 1 else None)


def measure_steps(
    request: ScalingRequest,
    processes: Processes,
    step: Callable[[], object],
    without_reduction: Callable[[], object] | None,
) -> dict:
    """Time `step` and, if given, the same step without the reduction of gradients.

    `times_ms`: milliseconds of each step on the slowest rank. `alone_ms`: the same without the
    reduction, empty if `without_reduction` is None. `memory_bytes`: peak memory of `step` on the
    fullest rank, 0 on a CPU.
    """
    processes.barrier()
    times_ms = slowest_ms(step, request.warmup, request.steps, processes)
    memory = fullest_bytes(processes)
    processes.barrier()
    alone_ms: list[float] = []
    if without_reduction:
        alone_ms = slowest_ms(without_reduction, request.warmup, request.steps, processes)
    return {"times_ms": times_ms, "alone_ms": alone_ms, "memory_bytes": memory}


# --- collectives ----------------------------------------------------------------------------------


def measure_collectives(request: ScalingRequest, processes: Processes) -> list[dict]:
    """Measure each collective at each size, as dicts of name, bytes, bus_gb and times_ms.

    `bus_gb`: see `collective`. The times are the slowest rank's. With one rank, the list is empty.
    """
    calls = []
    for name in COLLECTIVES if processes.world_size > 1 else ():
        for size in request.collective_bytes:
            call, bus_gb = collective(name, size, processes.device)
            processes.barrier()
            times = slowest_ms(call, 3, request.collective_repeats, processes)
            calls.append({"name": name, "bytes": size, "bus_gb": bus_gb, "times_ms": times})
    return calls


if __name__ == "__main__":
    main(measure)
