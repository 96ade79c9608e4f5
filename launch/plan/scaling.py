"""Time to the target, or for a number of tokens, against the number of GPUs.

`plan --scaling` prints it (launch/plan/scaling_table.py).

Everything is calculated. Each row of a benchmark is the config that `choose` returns for one number
of GPUs: its file, or one derived with the global batch that reaches the target first. Three effects
decide:

- At most 8 GPUs share a sequence, so the batch grows with the GPUs.
- A larger batch needs more sequences to the target (the reference's runs, RCPs).
- Gradients cross the links between GPUs. The time that the backward does not hide is added to the
  step.

A config of `open_llama` keeps its global batch and its sequences. A model without a config keeps
the sequences of a GPU, so its global batch grows with the GPUs.

The formulas are in common/estimate/. Standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common.benchmarks import rules_of
from common.config import ANY_GPU, RunConfig
from common.errors import ConfigError, OutOfMemory
from common.estimate.links import NETWORK_GB_S, ON_TRAYS
from common.estimate.step_time import Estimate, estimate
from common.gpu_kinds import GpuKind
from common.machine.hardware import config_name
from common.records import rcp
from launch.plan.model import fitting, on_gpus
from launch.plan.plans import Plan, config_plan
from launch.selection.choose import choose
from launch.selection.machine import Machine
from launch.selection.request import Request

LARGEST = 512  # GPUs
# Twice the GPUs should save at least this share of the time. Below it, scaling has stopped paying.
PAYING_SAVING = 0.25


@dataclass(frozen=True)
class ScalingPoint:
    """Time to the target with one number of GPUs, at one global batch."""

    config: RunConfig
    samples: float  # training sequences to the target
    measured: bool  # the reference was run at this batch; otherwise `samples` is interpolated
    speed: Estimate

    @property
    def minutes(self) -> float:
        assert self.speed.minutes is not None, "the number of sequences is known"
        return self.speed.minutes

    @property
    def gpus(self) -> int:
        return self.config.world_size

    @property
    def gpu_hours(self) -> float:
        return self.minutes / 60 * self.gpus


def benchmark_point(
    benchmark: str, kind: GpuKind, gpus: int, network_gb_s: float = NETWORK_GB_S, batch: int = 0
) -> ScalingPoint:
    """Return the time to the target of the config for `gpus` GPUs.

    `batch`: its global batch, 0 for the config's own. Raises ConfigError if the GPUs cannot share
    it or if it is below the reference's smallest, OutOfMemory if nothing fits.
    """
    per_node = gpus_per_node(kind, gpus)
    name = config_name(kind, per_node, gpus // per_node)
    overrides = {"global_batch_size": str(batch)} if batch else {}
    machine = Machine.imagined(kind, per_node, network_gb_s)
    config = choose(Request(benchmark, system=name, overrides=overrides), machine).config
    rules = rules_of(benchmark, config)
    samples, source = rcp.samples_to_target(rules, config.global_batch_size)
    plan = replace(config_plan(benchmark, name, config, kind), samples=samples)
    return scaling_point(plan, network_gb_s, source == rcp.MEASURED)


def scaling_point(plan: Plan, network_gb_s: float, is_measured: bool = True) -> ScalingPoint:
    """Return the time that a plan needs for its training sequences and the evaluations."""
    assert plan.kind and plan.samples, "the caller requires a GPU with known peaks"
    speed = estimate(plan.config, plan.work, plan.kind, plan.samples, network_gb_s)
    return ScalingPoint(plan.config, plan.samples, is_measured, speed)


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


def benchmark_points(
    benchmark: str, kind: GpuKind, network_gb_s: float = NETWORK_GB_S
) -> dict[int, ScalingPoint | None]:
    """Return number of GPUs -> the time of the config for them, None if nothing fits."""
    points: dict[int, ScalingPoint | None] = {}
    for gpus in counts():
        points[gpus] = None
        with contextlib.suppress(OutOfMemory):
            points[gpus] = benchmark_point(benchmark, kind, gpus, network_gb_s)
    return points


def last_paying(points: Mapping[int, ScalingPoint | None]) -> int | None:
    """Return the most GPUs that still save PAYING_SAVING of the time of half as many."""
    last = None
    for gpus, point in points.items():
        before = points.get(gpus // 2)
        if point is None or before is None or gpus == 1:
            continue
        if point.minutes > (1 - PAYING_SAVING) * before.minutes:
            break
        last = gpus
    return last
