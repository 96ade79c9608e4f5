"""Workload of a benchmark, for the plan. Standard library only."""

from __future__ import annotations

from common.benchmarks import rules_of
from common.config import RunConfig
from launch.plan.estimate import Workload


def workload(benchmark: str, config: RunConfig) -> Workload:
    """Return the workload that the benchmark's rules fix, at the config's global batch."""
    rules = rules_of(benchmark, config)
    batch = config.global_batch_size
    intervals = rules.eval_interval(batch), rules.first_evaluation(batch)
    return Workload(
        rules.shape, rules.sequence_length, rules.eval_samples, *intervals, rules.lora_rank
    )
