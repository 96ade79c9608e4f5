"""Compute the RCP test from its formulas, to check the verdict of the official tools.

The rule is in the MLPerf Training rules ("Reference Convergence Points") and rcp_checker.py of
mlcommons/logging. The reference ran 20 times for each global batch. A submission fails if it
converges so fast that chance alone would do so in less than 5 % of all cases. If it is a little
faster than the reference, a factor on its score brings it back to the reference's mean. If it is
slower, its time counts unchanged.

The formulas and the order of operations are the official ones, so the numbers agree to the last
digit that the official tools print. The code is our own. All counts are training sequences. Uses
only the standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from common.benchmarks import divisions
from common.records.rcp import SUBMISSION_RUNS, trimmed_mean

SIGNIFICANCE = 0.05  # one-sided
TOLERANCE = 1e-4  # sequences; the official bisection stops there
# samples of a run that does not reach the target; as the slowest run, it is dropped
NOT_CONVERGED = 1e9

POINT_SETS = ("pruned", "full")  # package checker and summarizer judge by the pruned set


@dataclass(frozen=True)
class Point:
    """Sequences that the reference needs at one global batch."""

    batch: int
    mean: float  # without the best and the worst run
    sigma: float  # population standard deviation, of all runs
    minimum: float  # the lowest mean of a submission that passes
    counted: int  # reference runs that the test uses: 18 for a measured point, 20 if interpolated
    # Sequences of each reference run, ascending. Empty for an interpolated point.
    samples: tuple[int, ...] = ()

    @property
    def max_speedup(self) -> float:
        return self.mean / self.minimum

    @property
    def threshold(self) -> float:
        """Return the number that a mean is compared with.

        It is `minimum` but for rounding, because the official tools compute it from the speed-up.
        """
        return self.mean / self.max_speedup


@dataclass(frozen=True)
class Verdict:
    """Result of the RCP test for a series."""

    points: str  # pruned or full
    passed: bool
    message: str  # in the official checker's words
    mean: float  # sequences, without the best and the worst run
    point: Point | None  # the reference that it was compared with
    factor: float  # multiplies the score; at least 1, and undefined if the test failed


def judge(benchmark: str, batch: int, samples: Sequence[float], points: str = "pruned") -> Verdict:
    """Return the verdict on the runs of a series.

    `samples` holds the sequences of each run to the target, or NOT_CONVERGED.

    Needs at least three runs. Two or more that did not converge fail. Batches between two points
    are interpolated. A batch below the smallest is compared with the smallest, and one above the
    largest fails, because there is no reference.
    """
    mean = trimmed_mean(samples)
    if sum(value >= NOT_CONVERGED for value in samples) > 1:
        return Verdict(points, False, "Insufficient convergence", mean, None, 1.0)
    point, message = _select(_points(benchmark, points), batch)
    if point is None:
        return Verdict(points, False, message, mean, None, 1.0)
    passed = mean >= point.threshold
    if batch < point.batch and not passed:
        message = _missing(batch)
    return Verdict(points, passed, message, mean, point, max(1.0, point.mean / mean))


def point_at(benchmark: str, batch: int, points: str = "pruned") -> Point | None:
    """Return the point that a series at `batch` is compared with, None above the largest."""
    return _select(_points(benchmark, points), batch)[0]


def _select(points: Sequence[Point], batch: int) -> tuple[Point | None, str]:
    lower = [point for point in points if point.batch < batch]
    upper = [point for point in points if point.batch > batch]
    exact = [point for point in points if point.batch == batch]
    if exact:
        return exact[0], "RCP found"
    if lower and upper:
        return _interpolated(batch, lower[-1], upper[0]), "RCP Interpolation"
    if upper:
        return upper[0], "RCP not found but slower convergence on smaller batch size"
    return None, _missing(batch)


def _missing(batch: int) -> str:
    return f"Missing RCP, please submit RCP with BS = {batch}"


@cache
def _points(benchmark: str, points: str) -> tuple[Point, ...]:
    assert points in POINT_SETS, points
    measured = [
        _measured(batch, runs)
        for batch, runs in divisions(benchmark)["closed"].reference_runs.items()
    ]
    return tuple(pruned(measured) if points == "pruned" else measured)


def _measured(batch: int, runs: Sequence[tuple[int, int]]) -> Point:
    samples = sorted(value for value, count in runs for _ in range(count))
    mean, sigma, counted = trimmed_mean(samples), statistics.pstdev(samples), len(samples) - 2
    return Point(batch, mean, sigma, _minimum(mean, sigma, counted), counted, tuple(samples))


def _interpolated(batch: int, low: Point, high: Point) -> Point:
    """Return a point with the mean and sigma interpolated linearly between two points.

    The test then counts all 20 runs, as the official checker does.
    """

    def between(start: float, stop: float) -> float:
        return (stop - start) / (high.batch - low.batch) * (batch - low.batch) + start

    mean = between(low.mean, high.mean)
    sigma = between(low.sigma, high.sigma)
    counted = 2 * SUBMISSION_RUNS
    return Point(batch, mean, sigma, _minimum(mean, sigma, counted), counted)


def pruned(points: list[Point]) -> list[Point]:
    """Remove the points that would make the test too easy.

    These are batches below that of the fastest point, and every point that is slower than the line
    between its neighbors.
    """
    fastest = min(points, key=lambda point: point.mean)
    kept = [point for point in points if point.batch >= fastest.batch]
    index = 1
    while index < len(kept) - 1:
        if (
            kept[index].mean
            > _interpolated(kept[index].batch, kept[index - 1], kept[index + 1]).mean
        ):
            del kept[index]
        else:
            index += 1
    return kept


@cache
def _minimum(mean: float, sigma: float, counted: int) -> float:
    """Return the lowest mean that a pooled t-test, with the reference's sigma, does not call
    faster.

    The official number is where a bisection between 0 and `mean` stops, which is up to TOLERANCE
    from mean - t(0.95, counted + 8 - 2) * sigma * sqrt(1/counted + 1/8).
    """
    runs = SUBMISSION_RUNS - 2
    margin = (
        t_quantile(1 - SIGNIFICANCE, counted + runs - 2) * sigma * math.sqrt(1 / counted + 1 / runs)
    )
    low, high = 0.0, mean
    middle = (low + high) / 2
    while high - low > TOLERANCE:
        if mean - middle < margin:
            high = middle
        else:
            low = middle
        middle = (low + high) / 2
    return middle


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for a `probability` in [0.5, 1)."""
    low, high = 0.0, 1e6
    while (middle := (low + high) / 2) not in (low, high):
        if 1 - t_tail(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return middle


def t_tail(t: float, freedom: int) -> float:
    """Return P(T > t) for t >= 0.

    I_x(freedom/2, 1/2) / 2 at x = freedom / (freedom + t^2) (DLMF 8.17; Abramowitz, Stegun 26.7.1).
    """
    square = t * t
    return (
        _incomplete_beta(
            freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square)
        )
        / 2
    )


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), y = 1 - x.

    Uses the continued fraction DLMF 8.17.22.
    """
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - _incomplete_beta(b, a, y, x)
    front = (
        math.exp(
            a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        )
        / a
    )
    value = 1.0
    for m in range(
        60, 0, -1
    ):  # from the inside out; 60 pairs are far more than a double can tell apart here
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        value = 1 + even / (1 + odd / value)
    first = -(a + b) * x / (a + 1)
    return front / (1 + first / value)
