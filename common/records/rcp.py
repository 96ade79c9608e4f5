"""Reference convergence points (RCP): how many training sequences the reference needed, for the launcher and the plan.

The verdict on a submission is the official RCP checker's (submission/rcp.py); here is only what can be known without it.
The reference's runs are in each benchmark's rules.py. Everything counts training sequences. Standard library only: the launcher reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.benchmarks import Rules

SUBMISSION_RUNS = (
    10  # of each benchmark here (rules, "Benchmark Results"; mlperf-logging benchmark_meta.py)
)


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest; of at least three values."""
    counted = sorted(values)[1:-1]
    return sum(counted) / len(counted)


def mean_samples(rules: Rules, batch: int) -> float | None:
    """Return the reference's mean at exactly this global batch; None if it was never run, as for a miniature."""
    runs = rules.reference_runs.get(batch)
    return (
        trimmed_mean([samples for samples, count in runs for _ in range(count)]) if runs else None
    )
