"""Workload of a benchmark or of any model: the input of memory.py and step_time.py.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.benchmarks import rules_of
from common.config import RunConfig
from common.model.shapes import ModelShape


@dataclass(frozen=True)
class Workload:
    """Quantities that the benchmark's rules fix.

    Samples are sequences. The intervals are those at the config's global batch.
    """

    shape: ModelShape
    sequence_length: int
    eval_samples: int
    eval_interval: int
    first_evaluation: int
    # 0: all weights train; otherwise the base is frozen and adapters of this rank train.
    lora_rank: int = 0


def benchmark_workload(benchmark: str, config: RunConfig) -> Workload:
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


def model_workload(shape: ModelShape, sequence_length: int, lora_rank: int) -> Workload:
    """Return the workload of training any model, without evaluations."""
    return Workload(
        shape,
        sequence_length,
        eval_samples=0,
        eval_interval=1,
        first_evaluation=1,
        lora_rank=lora_rank,
    )
