"""One measurement of `throughput llama`: a model on a number of GPUs, with settings that fit.

The settings come from the nearest file in configs/, changed as little as the memory requires.
They are found by calculation: nothing runs here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from common.benchmarks import divisions, measured_in
from common.config import RunConfig
from common.errors import ConfigError, OutOfMemory
from common.estimate.memory import (
    Memory,
    fits,
    gib,
    largest_micro_batch,
    memory_peak,
    usable_bytes,
    with_micro_batch,
)
from common.estimate.workload import Workload, model_workload
from common.gpu_kinds import GpuKind
from common.model.families import Family, family_of
from launch.plan.derive_config import fitting
from launch.selection.choose import nearest_config
from launch.tune.candidates import changed
from throughput import shared_options
from throughput.memory import require_host_memory
from throughput.options import TINY

# Mode -> key of the config that reduces memory, one layer at a time.
SAVES_MEMORY = {"full": "recompute_layers", "lora": "offload_layers"}


@dataclass(frozen=True)
class LlamaCase:
    """One model on one number of GPUs, with its settings."""

    family: Family
    mode: str  # "full" or "lora"
    config: RunConfig
    work: Workload
    kind: GpuKind | None  # None: a CPU
    source: str  # origin of the settings, "" if it is a file in configs/
    largest: bool = False  # whether the batch is the largest that fits by calculation

    @property
    def benchmark(self) -> str:
        return measured_in(self.mode)

    @property
    def memory(self) -> Memory:
        """The calculated memory of one process."""
        # There is no evaluation: its micro-batch is set to the smallest.
        return memory_peak(replace(self.config, eval_micro_batch_size=1), self.work)

    def row(self) -> dict[str, Any]:
        """Return the columns that are known before the measurement."""
        config = self.config
        settings = []
        if config.recompute_layers:
            settings.append(f"{config.recompute_layers} layers recomputed")
        if config.offload_layers:
            settings.append(f"{config.offload_layers} layers offloaded")
        if config.frozen_base:
            settings.append(f"base {config.frozen_base}")
        if config.moment_precision == "bf16":
            settings.append("moments bf16")
        notes = []
        window = self.family.sliding_window
        if window is not None and self.work.sequence_length > window:
            notes.append(f"without the sliding window of {window}: attention sees all tokens")
        if self.source:
            notes.append(self.source)
        return {
            "model": self.family.name,
            "mode": self.mode,
            "precision": "fp8" if config.linear_format.in_fp8 else config.precision,
            "layers": self.work.shape.num_layers,
            "seq": self.work.sequence_length,
            "gpus": config.world_size,
            "batch": config.micro_batch_size,
            "micro_batches": config.gradient_accumulation_steps,
            "settings": ", ".join(settings),
            "note": "; ".join(notes),
            "planned_gib": gib(self.memory.allocated) if self.kind else None,
        }


def model_of(options: argparse.Namespace) -> Family:
    """Return the model of --model with the layers of --layers. Raises ConfigError."""
    name = options.model or (TINY if options.device == "cpu" else "llama3.1-8b")
    if name == TINY and options.device != "cpu":
        raise ConfigError(
            f"--model {TINY}",
            "it is only for a CPU: on a GPU its steps would measure the time of kernel launches",
            "name another model, with --layers 1 if it must be small",
        )
    if name == TINY:
        family = Family(TINY, divisions(measured_in("full"))["miniature"].shape)
    else:
        family = family_of(name)
    layers = options.layers or family.shape.num_layers
    if layers > family.shape.num_layers:
        raise ConfigError(
            f"--layers {layers} is too large",
            f"{family.name} has {family.shape.num_layers} layers",
            f"use --layers {family.shape.num_layers} or less",
        )
    return replace(family, shape=replace(family.shape, num_layers=layers))


def case_to_tune(options: argparse.Namespace, kind: GpuKind | None, gpus: int) -> LlamaCase:
    """Return the case that a search starts from. Raises the errors of `case_of`.

    The value of --batch need not fit as one micro-batch, because the search may divide it.
    """
    if options.batch in (None, shared_options.MAX):
        return case_of(options, kind, gpus)
    smallest = argparse.Namespace(**vars(options) | {"batch": 1})
    case = case_of(smallest, kind, gpus)
    return replace(case, config=changed(case.config, {"global_batch_size": options.batch * gpus}))


def case_of(options: argparse.Namespace, kind: GpuKind | None, gpus: int) -> LlamaCase:
    """Return the case for `gpus` GPUs, with its batch and the settings that fit.

    `kind`: None for a CPU. Raises ConfigError, and OutOfMemory if no batch fits by calculation.
    """
    family = model_of(options)
    mode = "lora" if options.lora else "full"
    rules = divisions(measured_in(mode))["closed"]
    length = options.seq
    work = model_workload(family.shape, length, rules.lora_rank)
    config, source = nearest_config(measured_in(mode), kind, gpus, options.precision)
    case = LlamaCase(family, mode, config, work, kind, source)
    if kind is None:
        return _case_on_cpu(case, options.batch or 1)
    # The benchmark's model with fewer layers counts as well, as for `bench --layers`.
    as_benchmark = (
        replace(family.shape, num_layers=rules.shape.num_layers) == rules.shape
        and length == rules.sequence_length
    )
    if as_benchmark and not options.batch and fits(memory_peak(config, work), kind):
        return case
    largest = options.batch in (None, shared_options.MAX)
    config = with_micro_batch(config, 1 if largest else options.batch)
    config = replace(config, eval_micro_batch_size=1)
    config = settings_that_fit(replace(case, config=config), as_benchmark)
    if largest:
        config = with_micro_batch(config, largest_micro_batch(config, work, kind))
    return replace(case, config=config, largest=largest)


def _case_on_cpu(case: LlamaCase, batch: int | str) -> LlamaCase:
    """Return the case with this batch. Raises OutOfMemory if the host has too little memory."""
    case = replace(case, config=with_micro_batch(case.config, int(batch)))
    require_host_memory(case_name(case), case.config.world_size * case.memory.allocated)
    return case


def settings_that_fit(case: LlamaCase, as_benchmark: bool) -> RunConfig:
    """Return a config that fits by calculation, with as few changes as possible.

    It recomputes or offloads only as many layers as necessary. LoRA shards the base only if
    necessary. A benchmark's config that fits (`as_benchmark`) is returned unchanged. Raises
    OutOfMemory if no settings fit.
    """
    config = case.config
    work = case.work
    kind = case.kind
    key = SAVES_MEMORY[case.mode]
    assert kind is not None
    if as_benchmark and fits(memory_peak(config, work), kind):
        return config
    starts = [changed(config, {key: 0})]
    if case.mode == "full":
        starts.append(changed(starts[0], {"moment_precision": "bf16"}))
    kept = {"micro_batch_size": str(config.micro_batch_size)}
    for start in starts:
        if fitted := fitting(start, start, work, kind, kept):
            return fitted
    smallest = starts[-1]
    most_layers = work.shape.num_layers
    if case.mode == "lora":
        smallest = changed(smallest, {"frozen_base": "sharded"})
        if not config.linear_format.in_fp8:
            most_layers = 0  # LoRA in bf16 offloads no layers
    raise does_not_fit(replace(case, config=changed(smallest, {key: most_layers})))


def case_name(case: LlamaCase) -> str:
    """Return model, mode, batch and number of GPUs (on a CPU: of processes), for an error."""
    config = case.config
    kind = case.kind.name if case.kind else "CPU"
    batch = f"batch {config.micro_batch_size} of {case.work.sequence_length} tokens"
    return f"{case.family.name}, {case.mode}, {batch} on {config.world_size} x {kind}"


def does_not_fit(case: LlamaCase) -> OutOfMemory:
    """Return the error for a case that does not fit, with its four largest parts of memory."""
    memory = case.memory
    kind = case.kind
    assert kind is not None
    usable = usable_bytes(kind)
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {gib(size):.0f}" for name, size in largest)
    needed = f"{gib(memory.needed):.0f} of {gib(usable):.0f} GiB"
    why = f"by calculation the smallest settings need {needed} on each GPU: {parts} GiB"
    do = "use --lora, fewer --layers, a smaller --batch or --seq, or more --gpus"
    if case.mode == "full" and memory.parts.get("gathered weights", 0) > usable / 2:
        do = (
            "use --lora or fewer --layers; more GPUs do not help, "
            "because ZeRO-2 keeps all weights in bf16 on each GPU"
        )
    return OutOfMemory(f"{case_name(case)} does not fit", why, do)
