"""Arrangements of weights and state of a model on some GPUs, with the memory of each.

Some arrangements are those of this package, others are common elsewhere. The memory of the first
is counted by `launch.plan.estimate.memory_peak` for the benchmark that trains so. The others have
the same activations and differ in the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.config import RunConfig
from common.gpu_kinds import GpuKind
from common.hardware import MAX_GPUS
from common.model.shapes import ModelShape
from launch.plan import estimate as plan
from launch.plan.estimate import BYTES, FROZEN_BUFFERS, Memory, Workload


@dataclass(frozen=True, kw_only=True)
class AnyConfig(RunConfig):
    """Config with every option that changes the memory, whichever benchmark has it."""

    recompute_layers: int = 0
    offload_layers: int = 0
    frozen_base: str = "sharded"


@dataclass(frozen=True)
class Arrangement:
    """A way to distribute weights, gradients and optimizer state over GPUs.

    `at(batch)` returns the peak memory of one GPU with `batch` sequences on it at once. `ours`:
    this package can train so, with `config`. `tokens_per_s_per_gpu`: planned speed of an
    arrangement of this package, None if the GPU's peaks are unknown.
    """

    name: str
    ours: bool
    batch: int
    at: Callable[[int], Memory]
    tokens_per_s_per_gpu: float | None = None
    config: RunConfig | None = None

    @property
    def memory(self) -> Memory:
        """Peak memory of one GPU at `batch`."""
        return self.at(self.batch)

    def largest_batch(self, kind: GpuKind) -> int:
        """Return the largest batch that fits on a GPU of `kind`, 0 if none does."""
        return plan.largest(lambda size: plan.fits(self.at(size), kind))


def arrangements(
    shape: ModelShape,
    kind: GpuKind,
    gpus: int,
    batch: int,
    sequence_length: int,
    fp8: bool,
    lora_rank: int,
) -> list[Arrangement]:
    """Return the arrangements from the fastest to the one with the least memory.

    More than 8 `gpus` are nodes of 8.
    """
    work = workload_of(shape, sequence_length, lora_rank)

    def config(size: int, **changes) -> RunConfig:
        nodes = max(1, gpus // MAX_GPUS)
        return AnyConfig(
            gpu=kind.name,
            nodes=nodes,
            gpus_per_node=gpus // nodes,
            global_batch_size=size * gpus,
            micro_batch_size=size,
            eval_micro_batch_size=1,
            opt_base_learning_rate=1.0,  # changes no memory
            max_samples=1,  # changes no memory
            linear="fp8" if fp8 else "bf16",
            **changes,
        )

    def ours(name: str, **changes) -> Arrangement:
        def at(size: int) -> Memory:
            return plan.memory_peak(config(size, **changes), work)

        speed = None
        own = config(batch, **changes)
        if kind.efficiency:
            speed = plan.estimate(own, work, kind, samples=None).tokens_per_s_per_gpu
        return Arrangement(name, True, batch, at, speed, own)

    def other(
        name: str, state: Callable[[RunConfig, Workload], dict[str, float]], **changes
    ) -> Arrangement:
        def at(size: int) -> Memory:
            memory = plan.memory_peak(config(size, **changes), work)
            parts = memory.parts | state(config(size, **changes), work)
            return Memory(memory.moment, {part: value for part, value in parts.items() if value})

        return Arrangement(name, False, batch, at)

    def recomputed(size: int) -> Memory:
        """Return the memory of LoRA with a sharded base and every layer recomputed from its input.

        No benchmark's code can do this.
        """
        return plan.memory_peak(config(size, recompute_layers=shape.num_layers), work)

    if lora_rank:
        name = "base sharded, all layers recomputed" if gpus > 1 else "all layers recomputed"
        of_lora = _of_lora(ours, shape, gpus, fp8)
        return [*of_lora, Arrangement(name, False, batch, recomputed)]
    all_layers = {"recompute_layers": shape.num_layers}
    plain = other("plain data parallel, Adam in bf16 without fp32 masters", _plain_16_bit)
    if gpus == 1:
        name = "everything on one GPU"
        return [plain, ours(name), ours(f"{name}, all layers recomputed", **all_layers)]
    name = "optimizer sharded over a node, bf16 weights on each GPU (ZeRO-2)"
    sharded = partial(_fully_sharded, gpus)
    return [
        plain,
        other("plain data parallel, fp32 masters and Adam", _plain_fp32),
        ours(name),
        ours(f"{name}, all layers recomputed", **all_layers),
        other("parameters sharded too (FSDP, ZeRO-3)", sharded),
        other("parameters sharded too, all layers recomputed", sharded, **all_layers),
    ]


def workload_of(shape: ModelShape, sequence_length: int, lora_rank: int) -> Workload:
    """Return the workload of a training without evaluations."""
    return Workload(
        shape,
        sequence_length,
        eval_samples=0,
        eval_interval=1,
        first_evaluation=1,
        lora_rank=lora_rank,
    )


def _of_lora(
    ours: Callable[..., Arrangement], shape: ModelShape, gpus: int, fp8: bool
) -> list[Arrangement]:
    offload = {"offload_layers": shape.num_layers}
    name = "base on each GPU"
    ways = []
    if fp8:
        ways.append(ours(f"{name}, W and W^T", frozen_base="replicated_both"))
    ways.append(ours(name, frozen_base="replicated"))
    if fp8:
        offloaded = f"{name}, SwiGLU inputs offloaded"
        ways.append(ours(offloaded, frozen_base="replicated", **offload))
    if gpus > 1:
        ways.append(ours("base sharded over a node"))
    if gpus > 1 and fp8:
        ways.append(ours("base sharded over a node, SwiGLU inputs offloaded", **offload))
    return ways


def _plain_16_bit(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the state of torch's DistributedDataParallel over a bf16 model.

    It consists of weights, gradients, two moments, and the buckets in which gradients are reduced.
    """
    count = work.shape.num_parameters
    size = BYTES["bf16"]
    state = {
        "weights": size * count,
        "gradients": size * count,
        "AdamW moments": 2 * size * count,
        "buckets": size * count,
    }
    return state | {"gathered weights": 0.0, "gradients in flight": 0.0}


def _plain_fp32(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the state that ZeRO-2 shards, here complete on each GPU."""
    state = plan.state_bytes(config, work)
    return {
        name: state[name] * config.gpus_per_node
        for name in ("weights", "gradients", "AdamW moments")
    }


def _fully_sharded(gpus: int, config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the state with masters, gradients and moments sharded over all GPUs.

    bf16 weights (and FP8 copies) exist only for the embedding and the gathered layers.
    """
    shape = work.shape
    state = plan.state_bytes(config, work)
    gathered = FROZEN_BUFFERS * shape.layer_parameters + shape.vocab_size * shape.hidden_size
    per_gpu = {
        name: state[name] * config.gpus_per_node / gpus
        for name in ("weights", "gradients", "AdamW moments")
    }
    copies = 2 * FROZEN_BUFFERS * shape.matrix_parameters if config.linear_format.in_fp8 else 0
    return per_gpu | {"gathered weights": BYTES["bf16"] * gathered, "quantized weights": copies}
