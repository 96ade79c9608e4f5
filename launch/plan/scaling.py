"""Time to the target, or for a number of tokens, against the number of GPUs.

`plan --scaling` prints it (launch/plan/scaling_table.py).

Everything is calculated. Each row of a benchmark is one number of GPUs with the global batch that
reaches the target first. Three effects decide:

- A GPU needs at least one sequence, so the batch grows with the GPUs.
- A larger batch needs more sequences to the target (the reference's runs, RCPs).
- Gradients cross the links between GPUs. The time that the backward does not hide is added to the
  step.

A config of `open_llama` keeps its global batch and its sequences. A model without a config keeps
the sequences of a GPU, so its global batch grows with the GPUs.

The step's arithmetic is in common/estimate/step_time.py. The traffic is what
common/sharding/zero.py sends: per micro-batch a reduce-scatter within the node and an all-reduce
between nodes, per step an all-gather within the node. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from common.benchmarks import Rules, rules_of
from common.config import ANY_GPU, RunConfig
from common.errors import ConfigError, OutOfMemory
from common.estimate.memory import BYTES
from common.estimate.step_time import minutes_to_target
from common.estimate.workload import Workload
from common.gpu_kinds import GpuKind
from common.machine.hardware import config_name, config_names
from common.paths import ROOT
from common.records.rcp import mean_samples
from launch.plan.model import fitting, on_gpus
from launch.plan.plans import Plan, config_plan
from launch.selection.choose import choose
from launch.selection.machine import Machine
from launch.selection.request import Request

LARGEST = 512  # GPUs
# GPUs of one host: 4 on the trays of GB200 and GB300, 8 elsewhere.
ON_TRAYS = ("GB200", "GB300")
RACK = 72  # GPUs that NVLink connects across trays
# GB/s in one direction that all links of a GPU in the node offer, from data sheets.
LINK_PEAKS = {
    "NVLink 4": 450.0,
    "NVLink 5": 900.0,
    "AMD Infinity Fabric (XGMI)": 448.0,  # MI300X: 7 links of 64; later kinds have faster ones
}
# Share of the links' peak that collectives reach: 316.4 GB/s, all-reduce on 2 H200
# (docs/results.md). Assumed for every kind and for the network.
LINK_SHARE = 316.4 / 450.0
NETWORK_GB_S = 50.0  # per GPU between nodes: one network card of 400 Gbit/s for each GPU, assumed
BACKWARD_SHARE = 2 / 3  # share of the backward in the time of a forward and backward
# Twice the GPUs should save at least this share of the time. Below it, scaling has stopped paying.
PAYING_SAVING = 0.25


@dataclass(frozen=True)
class ScalingPoint:
    """Time to the target with one number of GPUs, at one global batch."""

    config: RunConfig
    samples: float  # training sequences to the target
    measured: bool  # the reference was run at this batch; otherwise `samples` is interpolated
    step_s: float
    tokens_per_s_per_gpu: float
    exposed_s: float  # part of the step in which only links work
    minutes: float

    @property
    def gpus(self) -> int:
        return self.config.world_size

    @property
    def gpu_hours(self) -> float:
        return self.minutes / 60 * self.gpus


def interpolated(values: Mapping[int, float], batch: int) -> tuple[float, bool]:
    """Return the value at `batch`, and whether it is one of `values`.

    Between two batches the value is interpolated linearly, as the RCP checker does. Beyond the
    largest one it continues the last line. Raises ValueError below the smallest.
    """
    if batch in values:
        return values[batch], True
    batches = sorted(values)
    if batch < batches[0]:
        raise ValueError(f"batch {batch} is below the smallest of the reference, {batches[0]}")
    above = next((each for each in batches if each > batch), batches[-1])
    below = batches[batches.index(above) - 1]
    slope = (values[above] - values[below]) / (above - below)
    return values[below] + slope * (batch - below), False


@cache
def reference_samples(rules: Rules) -> dict[int, float]:
    """Return batch -> mean training sequences to the target, of the reference's runs."""
    means = {batch: mean_samples(rules, batch) for batch in rules.reference_runs}
    return {batch: mean for batch, mean in means.items() if mean is not None}


def exposed_seconds(
    config: RunConfig, work: Workload, kind: GpuKind, compute_s: float, network_gb_s: float
) -> float:
    """Return the part of a step in which a GPU waits for links.

    `compute_s`: seconds of the step's arithmetic. `network_gb_s`: per GPU between nodes.

    In pre-training, collectives overlap with the arithmetic. The GPU waits for the last module's
    reduction, for the first module's gather, and for traffic that takes longer than the arithmetic
    beside it. With LoRA it waits for the whole all-reduce of the adapters' gradients.
    """
    gpus = config.gpus_per_node
    nodes = config.nodes
    shape = work.shape
    modules = shape.num_layers + 2  # the blocks, embedding and head
    in_node = LINK_PEAKS[kind.interconnect] * LINK_SHARE * 1e9
    in_rack = kind.name in ON_TRAYS and config.world_size <= RACK
    between = in_node if in_rack else network_gb_s * LINK_SHARE * 1e9
    if work.lora_rank:
        # Every rank holds all adapters. Their fp32 gradients are summed once per step.
        values = 4 * shape.lora_parameters(work.lora_rank)
        reduce_s = 2 * (1 - 1 / gpus) * values / in_node
        reduce_s += 2 * (1 - 1 / nodes) * values / gpus / between
        return reduce_s
    values = BYTES[config.precision] * shape.num_parameters
    reduce_s = (1 - 1 / gpus) * values / in_node
    reduce_s += 2 * (1 - 1 / nodes) * values / gpus / between
    gather_s = (1 - 1 / gpus) * values / in_node
    passes = config.gradient_accumulation_steps
    pass_s = compute_s / passes
    # The first reduction starts with the first backward, and the first gather is needed at once.
    behind_reductions_s = compute_s - pass_s * (1 - BACKWARD_SHARE)
    late_reduction_s = max(0.0, passes * reduce_s - behind_reductions_s)
    late_gather_s = max(0.0, gather_s - pass_s * (1 - BACKWARD_SHARE))
    return late_reduction_s + late_gather_s + (reduce_s + gather_s) / modules


def benchmark_point(
    benchmark: str, kind: GpuKind, gpus: int, batch: int, network_gb_s: float
) -> ScalingPoint:
    """Return the time to the target on `gpus` GPUs at global batch `batch`.

    Raises ConfigError if the GPUs cannot share the batch, OutOfMemory if nothing fits, ValueError
    below the reference's smallest batch.
    """
    per_node = gpus_per_node(kind, gpus)
    nodes = gpus // per_node
    machine = Machine.imagined(kind, per_node)
    name = config_name(kind, per_node)
    share = batch // nodes
    overrides = {"global_batch_size": str(share)}
    if name in config_names(ROOT, benchmark) and share % per_node == 0:
        file = choose(Request(benchmark, system=name), machine).config
        sequences = share // per_node  # of one GPU and step
        overrides["micro_batch_size"] = str(math.gcd(sequences, file.micro_batch_size))
        if nodes > 1 and file.has_key("reduce_scatter"):
            overrides["reduce_scatter"] = "nccl"  # copy engines reach the GPUs of one node only
    config = choose(Request(benchmark, system=name, overrides=overrides), machine).config
    rules = rules_of(benchmark, config)
    samples, is_measured = interpolated(reference_samples(rules), batch)
    learning_rate, _ = interpolated(rules.reference_learning_rates, batch)
    config = replace(
        config, nodes=nodes, global_batch_size=batch, opt_base_learning_rate=learning_rate
    )
    plan = replace(config_plan(benchmark, name, config, kind), samples=samples)
    return scaling_point(plan, network_gb_s, is_measured)


def scaling_point(plan: Plan, network_gb_s: float, is_measured: bool = True) -> ScalingPoint:
    """Return the time that a plan needs for its training sequences and the evaluations."""
    config = plan.config
    work = plan.work
    batch = config.global_batch_size
    arithmetic = plan.estimate
    assert plan.kind and plan.samples and arithmetic, "the caller requires a GPU with known peaks"
    exposed_s = exposed_seconds(config, work, plan.kind, arithmetic.step_s, network_gb_s)
    step_s = arithmetic.step_s + exposed_s
    minutes = minutes_to_target(work, plan.samples, batch / step_s, arithmetic.eval_s)
    rate = batch * work.sequence_length / config.world_size / step_s
    return ScalingPoint(config, plan.samples, is_measured, step_s, rate, exposed_s, minutes)


def model_points(plan: Plan, network_gb_s: float) -> dict[int, ScalingPoint | None]:
    """Return number of GPUs -> the time for a model's tokens, None if no layout fits."""
    points: dict[int, ScalingPoint | None] = {}
    for gpus in counts():
        layout = fitting(on_gpus(plan, gpus))
        points[gpus] = scaling_point(layout, network_gb_s) if layout else None
    return points


def config_points(
    benchmark: str,
    path: Path,
    kind: GpuKind,
    overrides: dict[str, str],
    network_gb_s: float,
) -> dict[int, ScalingPoint | None]:
    """Return number of GPUs -> the time of the config in `path`, None if it does not fit.

    The machine of the config is replaced. Numbers of GPUs that cannot share its global batch are
    left out.
    """
    points: dict[int, ScalingPoint | None] = {}
    for gpus in counts():
        per_node = gpus_per_node(kind, gpus)
        machine = {"gpu": ANY_GPU, "nodes": str(gpus // per_node)}
        request = Request(benchmark, file=str(path), overrides=overrides | machine)
        try:
            config = choose(request, Machine.imagined(kind, per_node)).config
        except OutOfMemory:
            points[gpus] = None
            continue
        except ConfigError:
            if gpus == 1:  # the config itself is wrong
                raise
            break
        plan = config_plan(benchmark, str(path), config, kind)
        points[gpus] = scaling_point(replace(plan, samples=config.max_samples), network_gb_s)
    return points


def gpus_per_node(kind: GpuKind, gpus: int) -> int:
    return min(gpus, 4 if kind.name in ON_TRAYS else 8)


def counts() -> list[int]:
    """Return the numbers of GPUs in the table: 1, 2, 4, ... LARGEST."""
    return [2**power for power in range(LARGEST.bit_length())]


def batches(rules: Rules, gpus: int) -> Iterator[int]:
    """Yield the global batches that `gpus` GPUs could use.

    They are the reference's batches, and one sequence for each GPU.
    """
    smallest = min(rules.reference_runs)
    for batch in sorted({*rules.reference_runs, gpus}):
        if batch >= smallest and batch % gpus == 0:
            yield batch


def best_points(
    benchmark: str, kind: GpuKind, rules: Rules, network_gb_s: float
) -> dict[int, ScalingPoint | None]:
    """Return number of GPUs -> the point that reaches the target first, None if nothing fits."""
    best: dict[int, ScalingPoint | None] = {}
    for gpus in counts():
        points = []
        for batch in batches(rules, gpus):
            try:
                points.append(benchmark_point(benchmark, kind, gpus, batch, network_gb_s))
            except (ConfigError, OutOfMemory):
                continue
        best[gpus] = min(points, key=lambda each: each.minutes, default=None)
    return best


def last_paying(best: Mapping[int, ScalingPoint | None]) -> int | None:
    """Return the most GPUs that still save PAYING_SAVING of the time of half as many."""
    last = None
    for gpus, point in best.items():
        before = best.get(gpus // 2)
        if point is None or before is None or gpus == 1:
            continue
        if point.minutes > (1 - PAYING_SAVING) * before.minutes:
            break
        last = gpus
    return last
