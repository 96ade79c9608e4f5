"""Arrangements of a model's weights and state on some GPUs, with the memory of each.

This package can train with some of them; others are common elsewhere. The memory of the former is
that of `common.estimate.memory.memory_peak`. The others have the same activations, but other state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.config import RunConfig
from common.estimate.memory import (
    BYTES,
    FROZEN_BUFFERS,
    Memory,
    fits,
    largest,
    memory_peak,
    state_bytes,
)
from common.estimate.step_time import estimate
from common.estimate.workload import Workload, model_workload
from common.gpu_kinds import GpuKind
from common.machine.hardware import MAX_GPUS
from common.model.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class AnyConfig(RunConfig):
    """Config with every option of any benchmark that changes the memory."""

    recompute_layers: int = 0
    offload_layers: int = 0
    frozen_base: str = "sharded"


@dataclass(frozen=True)
class Arrangement:
    """A way to distribute weights, gradients and optimizer state over GPUs.

    `at(batch)`: returns the peak memory of one GPU with `batch` sequences at once.
    `is_supported`: whether this package can train in this way, with `config`.
    `tokens_per_s_per_gpu`: planned speed if supported, None if the GPU's peaks are unknown.
    """

    name: str
    is_supported: bool
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
        return largest(lambda size: fits(self.at(size), kind))


State = Callable[[RunConfig, Workload], dict[str, float]]  # bytes by kind of tensor


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its GPUs and its batch, from which arrangements are made."""

    work: Workload
    kind: GpuKind
    gpus: int
    batch: int
    fp8: bool

    def config(self, batch: int, **changes) -> RunConfig:
        """Return the config of a run with `batch` sequences on each GPU at once."""
        nodes = max(1, self.gpus // MAX_GPUS)
        return AnyConfig(
            gpu=self.kind.name,
            nodes=nodes,
            gpus_per_node=self.gpus // nodes,
            global_batch_size=batch * self.gpus,
            micro_batch_size=batch,
            eval_micro_batch_size=1,
            opt_base_learning_rate=1.0,  # changes no memory
            max_samples=1,  # changes no memory
            linear="fp8" if self.fp8 else "bf16",
            **changes,
        )

    def supported(self, name: str, **changes) -> Arrangement:
        """Return a layout that this package supports: its config with `changes`."""

        def at(batch: int) -> Memory:
            return memory_peak(self.config(batch, **changes), self.work)

        speed = None
        config = self.config(self.batch, **changes)
        if self.kind.efficiency:
            planned = estimate(config, self.work, self.kind, samples=None)
            speed = planned.tokens_per_s_per_gpu
        return Arrangement(name, True, self.batch, at, speed, config)

    def unsupported(self, name: str, state: State | None, **changes) -> Arrangement:
        """Return an arrangement that this package does not support.

        `state`: returns the tensors whose bytes differ from those of the config with `changes`;
            None if none do.
        """

        def at(batch: int) -> Memory:
            config = self.config(batch, **changes)
            memory = memory_peak(config, self.work)
            if state is None:
                return memory
            parts = memory.parts | state(config, self.work)
            return Memory(memory.moment, {part: value for part, value in parts.items() if value})

        return Arrangement(name, False, self.batch, at)


def arrangements(
    shape: ModelShape,
    kind: GpuKind,
    gpus: int,
    batch: int,
    sequence_length: int,
    fp8: bool,
    lora_rank: int,
) -> list[Arrangement]:
    """Return the arrangements, from the fastest to the one with the least memory.

    More than 8 `gpus` are nodes of 8.
    """
    work = model_workload(shape, sequence_length, lora_rank)
    setup = TrainingSetup(work, kind, gpus, batch, fp8)
    all_layers = {"recompute_layers": shape.num_layers}
    if lora_rank:
        name = "base sharded, all layers recomputed" if gpus > 1 else "all layers recomputed"
        return [*_lora_arrangements(setup), setup.unsupported(name, None, **all_layers)]
    plain = setup.unsupported(
        "plain data parallel, Adam in bf16 without fp32 masters", _plain_16_bit
    )
    if gpus == 1:
        name = "everything on one GPU"
        return [
            plain,
            setup.supported(name),
            setup.supported(f"{name}, all layers recomputed", **all_layers),
        ]
    name = "optimizer sharded over a node, bf16 weights on each GPU (ZeRO-2)"
    sharded = partial(_fully_sharded, gpus)
    return [
        plain,
        setup.unsupported("plain data parallel, fp32 masters and Adam", _plain_fp32),
        setup.supported(name),
        setup.supported(f"{name}, all layers recomputed", **all_layers),
        setup.unsupported("parameters sharded too (FSDP, ZeRO-3)", sharded),
        setup.unsupported("parameters sharded too, all layers recomputed", sharded, **all_layers),
    ]


def _lora_arrangements(setup: TrainingSetup) -> list[Arrangement]:
    """Return the arrangements of LoRA that this package supports, the fastest first."""
    offload = {"offload_layers": setup.work.shape.num_layers}
    name = "base on each GPU"
    found: list[Arrangement] = []
    if setup.fp8:
        found.append(setup.supported(f"{name}, W and W^T", frozen_base="replicated_both"))
    found.append(setup.supported(name, frozen_base="replicated"))
    if setup.fp8:
        offloaded = f"{name}, SwiGLU inputs offloaded"
        found.append(setup.supported(offloaded, frozen_base="replicated", **offload))
    if setup.gpus > 1:
        found.append(setup.supported("base sharded over a node"))
    if setup.gpus > 1 and setup.fp8:
        found.append(
            setup.supported("base sharded over a node, SwiGLU inputs offloaded", **offload)
        )
    return found


def _plain_16_bit(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the state of a bf16 model with torch's DistributedDataParallel.

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
    """Return the state that ZeRO-2 shards, complete on each GPU."""
    state = state_bytes(config, work)
    return {
        name: state[name] * config.gpus_per_node
        for name in ("weights", "gradients", "AdamW moments")
    }


def _fully_sharded(gpus: int, config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the state with masters, gradients and moments sharded over all GPUs.

    Weights in bf16 and copies in FP8 exist only for the embedding and the gathered layers.
    """
    shape = work.shape
    state = state_bytes(config, work)
    gathered = FROZEN_BUFFERS * shape.layer_parameters + shape.vocab_size * shape.hidden_size
    per_gpu = {
        name: state[name] * config.gpus_per_node / gpus
        for name in ("weights", "gradients", "AdamW moments")
    }
    copies = 2 * FROZEN_BUFFERS * shape.matrix_parameters if config.linear_format.in_fp8 else 0
    return per_gpu | {"gathered weights": BYTES["bf16"] * gathered, "quantized weights": copies}
