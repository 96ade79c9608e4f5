"""Any model on some GPUs: its layouts, and the changes that make it fit. Standard library only.

A layout is a way to distribute weights, gradients and optimizer state over GPUs. This package
trains some of them: each is a config, planned like any other. The others are common elsewhere: they
have the activations of a config, but other state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.config import RunConfig
from common.estimate.memory import BYTES, FROZEN_BUFFERS, largest, state_bytes, with_micro_batch
from common.estimate.workload import Workload
from common.gpu_kinds import KINDS, GpuKind
from common.machine.hardware import MAX_GPUS
from launch.plan.plans import Plan

LORA_RANK = 16  # the rank of the benchmark llama2_70b_lora
SHARDED = ("weights", "gradients", "AdamW moments")  # state that ZeRO-2 shards over a node


@dataclass(frozen=True, kw_only=True)
class AnyConfig(RunConfig):
    """Config with every option of any benchmark that changes the memory."""

    recompute_layers: int = 0
    offload_layers: int = 0
    frozen_base: str = "sharded"


def model_plan(
    name: str,
    work: Workload,
    kind: GpuKind,
    gpus: int,
    batch: int,
    linear: str = "bf16",
    train_tokens: float | None = None,
) -> Plan:
    """Return the plan of a model in no layout yet.

    `batch`: sequences on one GPU that pass through the model at once. `linear`: number format of
    the blocks' products. `train_tokens`: tokens of the run, None if unknown.
    """
    config = AnyConfig(
        gpu=kind.name,
        nodes=1,
        gpus_per_node=1,
        global_batch_size=batch,
        micro_batch_size=batch,
        eval_micro_batch_size=1,
        opt_base_learning_rate=1.0,  # changes no memory
        max_samples=1,  # changes no memory
        linear=linear,
    )
    samples = train_tokens / work.sequence_length if train_tokens else None
    return on_gpus(Plan(name, "", config, work, kind, samples), gpus)


def on_gpus(plan: Plan, gpus: int) -> Plan:
    """Return the plan on `gpus` GPUs, each with the same batch. More than 8 are nodes of 8."""
    nodes = max(1, gpus // MAX_GPUS)
    batch = plan.config.micro_batch_size * gpus
    machine = {"nodes": nodes, "gpus_per_node": gpus // nodes, "global_batch_size": batch}
    return replace(plan, config=replace(plan.config, **machine))  # type: ignore[arg-type]


def layouts(plan: Plan) -> list[Plan]:
    """Return the layouts of a model, from the fastest to the one with the least memory."""
    gpus = plan.config.world_size
    all_layers = {"recompute_layers": plan.work.shape.num_layers}
    if plan.work.lora_rank:
        name = "base sharded, all layers recomputed" if gpus > 1 else "all layers recomputed"
        return [*_lora_layouts(plan), _untrained(plan, name, {}, **all_layers)]
    plain = _untrained(
        plan, "plain data parallel, Adam in bf16 without fp32 masters", _plain_16_bit(plan)
    )
    if gpus == 1:
        name = "everything on one GPU"
        return [
            plain,
            _trained(plan, name),
            _trained(plan, f"{name}, all layers recomputed", **all_layers),
        ]
    name = "optimizer sharded over a node, bf16 weights on each GPU (ZeRO-2)"
    fp32 = _sharded_state(plan, plan.config.gpus_per_node)  # complete on each GPU
    zero_3 = _fully_sharded(plan)
    return [
        plain,
        _untrained(plan, "plain data parallel, fp32 masters and Adam", fp32),
        _trained(plan, name),
        _trained(plan, f"{name}, all layers recomputed", **all_layers),
        _untrained(plan, "parameters sharded too (FSDP, ZeRO-3)", zero_3),
        _untrained(plan, "parameters sharded too, all layers recomputed", zero_3, **all_layers),
    ]


def _trained(plan: Plan, name: str, **keys: int | str) -> Plan:
    """Return a layout that this package trains: the config with these keys."""
    return replace(plan, source=name, config=replace(plan.config, **keys))  # type: ignore[arg-type]


def _untrained(plan: Plan, name: str, other_state: dict[str, float], **keys: int) -> Plan:
    """Return a layout that this package does not train. `other_state`: see `memory_peak`."""
    return replace(_trained(plan, name, **keys), is_trained=False, other_state=other_state)


def _lora_layouts(plan: Plan) -> list[Plan]:
    """Return the layouts of LoRA that this package trains, the fastest first."""
    fp8 = plan.config.linear_format.in_fp8
    offload = {"offload_layers": plan.work.shape.num_layers}
    name = "base on each GPU"
    found = []
    if fp8:
        found.append(_trained(plan, f"{name}, W and W^T", frozen_base="replicated_both"))
    found.append(_trained(plan, name, frozen_base="replicated"))
    if fp8:
        offloaded = f"{name}, SwiGLU inputs offloaded"
        found.append(_trained(plan, offloaded, frozen_base="replicated", **offload))
    if plan.config.world_size > 1:
        name = "base sharded over a node"
        found.append(_trained(plan, name))
        if fp8:
            found.append(_trained(plan, f"{name}, SwiGLU inputs offloaded", **offload))
    return found


def _plain_16_bit(plan: Plan) -> dict[str, float]:
    """Return the state of a bf16 model with torch's DistributedDataParallel.

    It consists of weights, gradients, two moments, and the buckets in which gradients are reduced.
    """
    size = BYTES["bf16"] * plan.work.shape.num_parameters
    state = {"weights": size, "gradients": size, "AdamW moments": 2 * size, "buckets": size}
    return state | {"gathered weights": 0.0, "gradients in flight": 0.0}


def _sharded_state(plan: Plan, factor: float) -> dict[str, float]:
    """Return `factor` times the state that ZeRO-2 shards over a node."""
    state = state_bytes(plan.config, plan.work)
    return {name: state[name] * factor for name in SHARDED}


def _fully_sharded(plan: Plan) -> dict[str, float]:
    """Return the state with masters, gradients and moments sharded over all GPUs.

    Weights in bf16 and copies in FP8 exist only for the embedding and the gathered layers.
    """
    config = plan.config
    shape = plan.work.shape
    gathered = FROZEN_BUFFERS * shape.layer_parameters + shape.vocab_size * shape.hidden_size
    copies = 2 * FROZEN_BUFFERS * shape.matrix_parameters if config.linear_format.in_fp8 else 0
    state = _sharded_state(plan, config.gpus_per_node / config.world_size)
    return state | {"gathered weights": BYTES["bf16"] * gathered, "quantized weights": copies}


# --- what fits ------------------------------------------------------------------------------------


def fitting(plan: Plan) -> Plan | None:
    """Return the first layout that this package trains and that fits, None if there is none."""
    return next((each for each in layouts(plan) if each.is_trained and each.fits), None)


def chosen(plan: Plan) -> Plan:
    """Return the layout of `fitting`, or else the trained layout with the least memory."""
    trained = (each for each in layouts(plan) if each.is_trained)
    return fitting(plan) or min(trained, key=lambda each: each.memory.allocated)


def fitting_options(plan: Plan) -> Iterator[str]:
    """Yield the options, any of which would make the model fit."""
    config = plan.config
    one = replace(plan, config=with_micro_batch(config, 1))
    if config.micro_batch_size > 1 and fitting(one):
        yield "--batch 1"
    if length := _longest(plan):
        yield f"--seq {length}"
    other = "fp8" if config.linear == "bf16" else "bf16"
    if fitting(replace(plan, config=replace(config, linear=other))):
        yield f"--precision {other}"
    counts = range(config.world_size + 1, MAX_GPUS + 1)
    if gpus := next((count for count in counts if fitting(on_gpus(plan, count))), None):
        yield f"--gpus {gpus}"
    for kind in sorted(KINDS.values(), key=lambda kind: kind.memory_bytes):
        is_larger = plan.kind is not None and kind.memory_bytes > plan.kind.memory_bytes
        if is_larger and fitting(replace(plan, config=replace(config, gpu=kind.name), kind=kind)):
            yield f"--gpu {kind.name}"
            break
    if not plan.work.lora_rank:
        lora = replace(plan, work=replace(plan.work, lora_rank=LORA_RANK))
        if fitting(lora):
            yield "--lora"
        elif length := _longest(lora):
            yield f"--lora --seq {length}"


def _longest(plan: Plan) -> int:
    """Return the longest shorter sequence that fits, in steps of 64 tokens, or 0 if none does."""
    longest = 64 * largest(
        lambda steps: (
            fitting(replace(plan, work=replace(plan.work, sequence_length=64 * steps))) is not None
        )
    )
    return longest if longest < plan.work.sequence_length else 0
