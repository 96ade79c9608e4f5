"""Reference convergence points (RCP): the number of training sequences that the reference needed.

The official RCP checker decides on a submission (submission/rcp.py). These functions do not need
it. The runs of the reference are in each benchmark's rules.py. All counts are training sequences.
Standard library only, because the launcher imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.benchmarks import Rules
from common.errors import ConfigError

# Runs of a result (MLPerf Training rules, "Benchmark Results"; mlperf-logging benchmark_meta.py).
SUBMISSION_RUNS = 10
MEASURED = "the RCP's"  # source of a value: the reference was run at this global batch


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


def at_batch(values: Mapping[int, float], batch: int) -> tuple[float, str]:
    """Return the value at a global batch, and its source in words: `MEASURED` or another.

    `values`: those of the reference, by its global batches. Between two of them the value is
    interpolated linearly, as the RCP checker does. Beyond the largest one it continues the last
    line. Raises ConfigError below the smallest.
    """
    if batch in values:
        return values[batch], MEASURED
    batches = sorted(values)
    if not batches or batch < batches[0]:
        raise ConfigError(
            f"the reference has no runs at global batch {batch} or below",
            "learning rate and sequences to the target are unknown there",
            f"use one of its global batches: {', '.join(map(str, batches)) or 'it has none'}",
        )
    above = next((each for each in batches if each > batch), batches[-1])
    below = batches[batches.index(above) - 1]
    slope = (values[above] - values[below]) / (above - below)
    source = "interpolated between the RCPs" if batch < above else "continued beyond the RCPs"
    return values[below] + slope * (batch - below), source


def samples_to_target(rules: Rules, batch: int) -> tuple[float, str]:
    """Return the training sequences to the target at a global batch, and their source."""
    means = {}
    for each in rules.reference_runs:
        mean = mean_samples(rules, each)
        if mean is not None:
            means[each] = mean
    return at_batch(means, batch)


def batches(rules: Rules, ranks: int) -> list[int]:
    """Return the global batches that `ranks` processes could use, each with whole sequences.

    They are the reference's batches, and the smallest batch that is not below these.
    """
    smallest = -(-min(rules.reference_runs) // ranks) * ranks
    return [batch for batch in sorted({*rules.reference_runs, smallest}) if batch % ranks == 0]


def keys_at(rules: Rules, batch: int) -> dict[str, int | float]:
    """Return the config keys that depend on the global batch, as in the reference's runs.

    `max_samples` is twice the mean number of sequences to the target, in whole intervals. Raises
    ConfigError below the reference's smallest batch.
    """
    interval = rules.eval_interval(batch)
    twice = 2 * samples_to_target(rules, batch)[0]
    rate, _ = at_batch(rules.reference_learning_rates, batch)
    keys: dict[str, int | float] = {
        "global_batch_size": batch,
        "opt_base_learning_rate": float(f"{rate:.3g}"),
        "max_samples": max(rules.first_evaluation(batch), int(twice // interval) * interval),
    }
    if rules.reference_warmup_samples:
        samples = at_batch(rules.reference_warmup_samples, batch)[0]
        keys["opt_learning_rate_warmup_steps"] = round(samples / batch)
    return keys
