"""Reference convergence points (RCP): the number of training sequences that the reference needed.

The official RCP checker decides on a submission (submission/rcp.py). These functions do not need
it. The runs of the reference are in each benchmark's rules.py. All counts are training sequences.
Standard library only, because the launcher imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.benchmarks import Rules

# Runs of a result (MLPerf Training rules, "Benchmark Results"; mlperf-logging benchmark_meta.py).
SUBMISSION_RUNS = 10


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of at least three values without the smallest and the largest."""
    counted = sorted(values)[1:-1]
    return sum(counted) / len(counted)


def mean_samples(rules: Rules, batch: int) -> float | None:
    """Return the trimmed mean of the reference's runs at this batch, or None if it has none."""
    runs = rules.reference_runs.get(batch)
    if not runs:
        return None
    values: list[int] = []
    for samples, count in runs:
        values += [samples] * count
    return trimmed_mean(values)


def learning_rate(rules: Rules, batch: int) -> tuple[float, bool] | None:
    """Return the reference's learning rate at a global batch, and whether it is interpolated.

    Between two batches of the reference, the rate is interpolated linearly. Returns None for a
    batch outside of the reference's range, and for rules without reference runs.
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
