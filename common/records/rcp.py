"""Reference convergence points (RCP): the number of training sequences that the reference needed.

The official RCP checker decides on a submission (submission/rcp.py). This module has only what is
known without it, for the launcher and the plan. The reference's runs are in each benchmark's
rules.py. All counts are training sequences. Standard library only, because the launcher imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.benchmarks import Rules

# for each benchmark here (rules, "Benchmark Results"; mlperf-logging benchmark_meta.py)
SUBMISSION_RUNS = 10


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of at least three values without the smallest and the largest."""
    counted = sorted(values)[1:-1]
    return sum(counted) / len(counted)


def mean_samples(rules: Rules, batch: int) -> float | None:
    """Return the reference's mean at exactly this global batch, or None if it has no runs there."""
    runs = rules.reference_runs.get(batch)
    return (
        trimmed_mean([samples for samples, count in runs for _ in range(count)]) if runs else None
    )


def learning_rate(rules: Rules, batch: int) -> tuple[float, bool] | None:
    """Return the reference's learning rate at a global batch, and whether it is interpolated.

    Between two batches of the reference the rate is interpolated linearly. None outside of their
    range, and for rules without reference runs.
    """
    rates = rules.reference_learning_rates
    if batch in rates:
        return rates[batch], False
    below = max((known for known in rates if known < batch), default=None)
    above = min((known for known in rates if known > batch), default=None)
    if below is None or above is None:
        return None
    share = (batch - below) / (above - below)
    return rates[below] + share * (rates[above] - rates[below]), True
