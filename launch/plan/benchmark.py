"""Workload of a benchmark, for the plan. Standard library only."""

from __future__ import annotations

from common.benchmarks import rules_of
from common.config import RunConfig
from launch.plan.estimate import Workload


def workload(benchmark: str, config: RunConfig) -> Workload:
    """Return the workload that the benchmark's rules fix, at the config's global batch."""
    rules = rules_of(benchmark, config)
    batch = config.global_batch_size
    return Workload(
        shape=rules.shape,
        sequence_length=rules.sequence_length,
        eval_samples=rules.eval_samples,
        eval_interval=rules.eval_interval(batch),
        first_evaluation=rules.first_evaluation(batch),
        lora_rank=rules.lora_rank,
    )
