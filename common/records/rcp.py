"""Reference convergence points (RCP): how many training sequences the reference needed, for the launcher and the plan.

The verdict on a submission is the official RCP checker's (submission/rcp.py); here is only what can be known without it.
Everything counts training sequences. Standard library only: the launcher reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

SUBMISSION_RUNS = 10  # of both benchmarks (rules, "Benchmark Results"; mlperf-logging benchmark_meta.py)

# Sequences to the target of the 20 reference runs, by global batch, as (sequences, runs).
# Source: mlperf-logging 4.1.68, rcp_checker/training_6.1.0/rcps_llama31_8b.json ("Epochs to converge", which are samples) and
# rcps_llama2_70b_lora.json ("samples to converge"); the files of 5.1.0 and 6.0.0 are identical.
REFERENCE_RUNS: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {
    "llama31_8b": {
        16: ((159744, 17), (172032, 3)),
        32: ((172032, 9), (184320, 10), (196608, 1)),
        64: ((208896, 4), (221184, 4), (233472, 11), (245760, 1)),
        96: ((260064, 2), (272448, 10), (284832, 4), (297216, 4)),
        128: ((307200, 2), (319488, 2), (331776, 4), (344064, 4), (356352, 3), (368640, 3), (380928, 1), (405504, 1)),
    },
    "llama2_70b_lora": {
        8: ((2688, 3), (3072, 9), (3456, 7), (3840, 1)),
        16: ((3456, 1), (3840, 13), (4224, 2), (4608, 2), (4992, 2)),
        32: ((5376, 1), (5760, 8), (6144, 7), (6528, 4)),
        128: ((9984, 2), (10752, 5), (11136, 7), (11520, 2), (12288, 1), (12672, 1), (13056, 2)),
    },
}


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest; of at least three values."""
    counted = sorted(values)[1:-1]
    return sum(counted) / len(counted)


def mean_samples(benchmark: str, batch: int) -> float | None:
    """What the reference needs on average at exactly this global batch; None where it was never run."""
    runs = REFERENCE_RUNS[benchmark].get(batch)
    return trimmed_mean([samples for samples, count in runs for _ in range(count)]) if runs else None
