"""What one rank measures for `throughput scaling`: `python -m throughput.scaling_rank FOLDER`, started by torchrun on n GPUs.

FOLDER/request.json says what; rank 0 writes FOLDER/measured.json after each part, so that a part that runs out of memory does not lose
those before it: collectives by size, then the sharded Llama, then the GPT under data parallelism, which takes the most memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import config as configs
from common.benchmarks import Rules, config_class, divisions, measured_in, trainer_of
from common.hardware import config_path
from common.kernels import accumulate
from common.kernels.attention import attention_backends
from common.paths import ROOT
from common.sharding.processes import Processes, start_processes
from common.sharding.zero import ZeroOptimizer
from common.training.assembly import Batching
from common.training.loop import train_step as llama_step
from common.training.warmup import synthetic_batches
from throughput.gpt_model import LEARNING_RATE, GptShape, Size, build_gpt, train_step
from throughput.memory import free_memory, peak_bytes
from throughput.ranks import MEASURED, REQUEST, Unsent, main, max_over_ranks
from throughput.timing import step_ms

TIMEOUT_S = 300.0  # of a collective: while one rank still compiles kernels
COLLECTIVES = ("all-reduce", "all-gather")


@dataclass(frozen=True)
class Request:
    """What all counts of GPUs measure."""

    gpu: str  # a name of common.gpu_kinds.KINDS, or another GPU's, or CPU
    gpt: Size
    llama_layers: int
    fp8: bool  # of the Llama's linear layers
    warmup: int
    steps: int
    collective_bytes: tuple[int, ...]
    collective_repeats: int

    @staticmethod
    def read(path: Path) -> Request:
        table = json.loads(path.read_text())
        gpt = table.pop("gpt")
        return Request(gpt=Size(**gpt | {"shape": GptShape(**gpt["shape"])}), **table)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @property
    def rules(self) -> Rules:
        """The benchmark's, with fewer layers; on a CPU those of the miniature."""
        rules = divisions(measured_in("full"))["miniature" if self.gpu == "CPU" else "closed"]
        return replace(rules, shape=replace(rules.shape, num_layers=self.llama_layers))


def measure(folder: Path) -> None:
    request = Request.read(folder / REQUEST)
    processes = start_processes("cpu" if request.gpu == "CPU" else "cuda", TIMEOUT_S)
    found: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {
        "collectives": partial(measure_collectives, request, processes),
        "sharded": partial(measure_sharded, request, processes),
        "plain": partial(measure_plain, request, processes),
    }
    with attention_backends(processes.device.type):
        for name, part in parts.items():
            free_memory(processes.device)
            found[name] = part()
            if processes.rank == 0:
                (folder / MEASURED).write_text(json.dumps(found))
    dist.destroy_process_group()


# --- steps ----------------------------------------------------------------------------------------


def measure_plain(request: Request, processes: Processes) -> dict:
    """The GPT, whole on each rank; torch's DistributedDataParallel averages the gradients during backward. One rank has no wrapper."""
    model = build_gpt(request.gpt.shape, request.gpt.sequence_length, processes.device)
    if processes.world_size == 1:
        return measure_steps(request, processes, train_step(model, request.gpt), None)
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    step = train_step(wrapped, request.gpt)

    def alone() -> None:
        with wrapped.no_sync():
            step()

    return measure_steps(request, processes, step, alone)


def measure_sharded(request: Request, processes: Processes) -> dict:
    """The Llama that this package trains: ZeRO-2, fused blocks, gradients reduced and weights gathered beside the computation."""
    rules, ranks = request.rules, processes.world_size
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
    assembly = trainer_of(benchmark).assemble_random(config, rules, processes, seed=1)
    optimizer = assembly.optimizer
    assert isinstance(optimizer, ZeroOptimizer)
    batches = synthetic_batches(
        rules.shape.vocab_size, rules.sequence_length, processes, config.micro_batch_size
    )
    step = partial(llama_step, assembly, batches, Batching(ranks, 1), LEARNING_RATE, processes)
    unsent = Unsent(
        processes.shard_group,
        None,
        optimizer.shards[0].parameter.dtype,
        accumulate.ENGINES[config.kernels],
    )

    def alone() -> None:
        optimizer.reduce_scatter = unsent
        step()

    return measure_steps(request, processes, step, alone if ranks > 1 else None)


def measure_steps(
    request: Request,
    processes: Processes,
    step: Callable[[], object],
    alone: Callable[[], object] | None,
) -> dict:
    """`times_ms`: milliseconds of each step, of the slowest rank; `alone_ms`: of `alone`, the same step without the reduction of gradients,
    empty if there is none; `memory_bytes`: peak of the fullest rank, 0 on a CPU.
    """
    device = processes.device
    processes.barrier()
    times = max_over_ranks(step_ms(step, device.type, request.warmup, request.steps), processes)
    memory = peak_bytes(device)
    processes.barrier()
    alone_ms = (
        max_over_ranks(step_ms(alone, device.type, request.warmup, request.steps), processes)
        if alone
        else []
    )
    return {
        "times_ms": times,
        "alone_ms": alone_ms,
        "memory_bytes": int(max_over_ranks([memory], processes)[0]),
    }


# --- collectives ----------------------------------------------------------------------------------


def measure_collectives(request: Request, processes: Processes) -> list[dict]:
    """For each collective and size: milliseconds of each call, of the slowest rank. Empty with one rank."""
    found = []
    for name in COLLECTIVES if processes.world_size > 1 else ():
        for size in request.collective_bytes:
            call = prepare_collective(name, size, processes)
            processes.barrier()
            times = max_over_ranks(
                step_ms(call, processes.device.type, 3, request.collective_repeats), processes
            )
            found.append({"name": name, "bytes": size, "times_ms": times})
    return found


def prepare_collective(name: str, size: int, processes: Processes) -> Callable[[], object]:
    """`size`: bytes, as NCCL's tests count them: of the tensor that is reduced, or of the whole that is gathered. Random bf16."""
    whole = torch.randn(size // 2, device=processes.device, dtype=torch.bfloat16)
    if name == "all-reduce":
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX)  # sums of sums would overflow
    part = whole[: len(whole) // processes.world_size].clone()
    target = whole[: len(part) * processes.world_size]
    return lambda: dist.all_gather_into_tensor(target, part)


if __name__ == "__main__":
    main(measure)
