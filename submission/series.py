"""The score of a series of runs: which of them count, what their mean is, and what the RCP test makes of it.

MLPerf Training rules, "Benchmark Results" and "Reference Convergence Points". Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from records import rcp
from records.published import Pace
from submission.runs import Run, steady_samples_per_s


@dataclass(frozen=True)
class Series:
    """The score of the runs of one result. `minutes` is the mean of those that count, `score` that times the RCP factor."""

    runs: list[Run]
    counted: list[Run]  # without the fastest and the slowest
    minutes: float | None
    verdicts: list[rcp.Verdict]  # the first one decides; empty for a miniature
    invalid: str  # why these runs are no result; "" for a valid one

    @property
    def factor(self) -> float | None:
        """None without a verdict that passed."""
        return self.verdicts[0].factor if self.verdicts and self.verdicts[0].passed else None

    @property
    def score(self) -> float | None:
        """Minutes; None for what is no result, or failed the RCP test, or is a miniature."""
        return None if self.invalid or self.minutes is None or self.factor is None else self.minutes * self.factor

    @property
    def passed(self) -> bool:
        return not self.invalid and all(verdict.passed for verdict in self.verdicts[:1])


def score_runs(runs: list[Run], points: Sequence[str] = rcp.POINT_SETS) -> Series:
    """Score `runs` as one result, whatever their number; `invalid` says if it cannot be one."""
    counted = _counted(runs)
    minutes = sum(run.minutes or 0.0 for run in counted) / len(counted) if counted else None
    failed = [run.name for run in runs if not run.converged]
    invalid = ""
    if len(failed) > 1:
        invalid = f"{len(failed)} runs did not converge, one may: {', '.join(failed)}"
    elif len(runs) != rcp.SUBMISSION_RUNS:
        invalid = f"a result is {rcp.SUBMISSION_RUNS} runs, these are {len(runs)}"
    verdicts = []
    if len(runs) >= 3 and runs[0].division != "miniature":
        samples = [float(run.samples or 0) if run.converged else rcp.NOT_CONVERGED for run in runs]
        assert runs[0].batch is not None
        verdicts = [rcp.judge(runs[0].benchmark, runs[0].batch, samples, name) for name in points]
    return Series(runs, counted, minutes, verdicts, invalid)


def _counted(runs: list[Run]) -> list[Run]:
    """The runs whose minutes count, fastest first: without the fastest, and without the slowest, which may be one that failed.

    Of fewer than three runs, all that converged.
    """
    converged = sorted((run for run in runs if run.converged), key=lambda run: run.minutes or 0.0)
    if len(runs) < 3:
        return converged
    return converged[1:-1] if len(converged) == len(runs) else converged[1:]


def windows(runs: list[Run], points: Sequence[str] = rcp.POINT_SETS) -> list[Series]:
    """Every ten consecutive runs, in order; all runs if there are no more than ten."""
    last = max(0, len(runs) - rcp.SUBMISSION_RUNS)
    return [score_runs(runs[first : first + rcp.SUBMISSION_RUNS], points) for first in range(last + 1)]


def median_window(found: list[Series]) -> Series:
    """The one to submit: of those that are valid, by score whether or not the RCP test passes; of two in the middle the slower."""

    def minutes(series: Series) -> float:
        return math.inf if series.minutes is None else series.minutes * (series.verdicts[0].factor if series.verdicts else 1.0)

    fitting = [series for series in found if not series.invalid] or found
    return sorted(fitting, key=minutes)[len(fitting) // 2]


def pace(series: Series) -> Pace | None:
    """What the minutes are made of; None if the logs do not have the lines for it."""
    runs, rate = series.counted, steady_samples_per_s(series.counted)
    if not runs or rate is None or series.minutes is None:
        return None
    samples = sum(run.trained or 0 for run in runs) / len(runs)
    evaluations = sum(len(run.evaluations) for run in runs)
    seconds = sum(run.evaluation_s or 0.0 for run in runs)
    if not evaluations:
        return Pace(series.minutes, samples, rate, None, None)
    return Pace(series.minutes, samples, rate, evaluations / len(runs), seconds / evaluations)
