"""Windows: groups of ten consecutive runs of a series, one of which is its result.

Source: MLPerf Training rules, "Benchmark Results" and "Scoring" (mlcommons/training_policies,
training_rules.adoc at d73e20f). A result is ten runs, of which one may have failed. If a series has
more than ten runs, every ten consecutive ones are a window, and the result is the window with the
median score. The score of a window with too many failures is infinite. If the median is infinite,
there is no result.

The rules do not define the median of an even number of windows. This module uses the slower of the
two in the middle. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from common.records.rcp import SUBMISSION_RUNS

# Number of runs of a result that may fail. A failed run counts as infinitely slow, and the slowest
# run is dropped.
MAY_FAIL = 1

Item = TypeVar("Item")


def windows(runs: Sequence[Item]) -> list[Sequence[Item]]:
    """Return all groups of ten consecutive items, or one group of all items if they are fewer."""
    last = max(0, len(runs) - SUBMISSION_RUNS)
    return [runs[first : first + SUBMISSION_RUNS] for first in range(last + 1)]


def is_valid(good: Sequence[bool]) -> bool:
    """Return whether these runs can be a result: ten runs, at most one of which failed."""
    return len(good) == SUBMISSION_RUNS and good.count(False) <= MAY_FAIL


def median(scores: Sequence[float]) -> int:
    """Return the index of the window that is the result.

    `scores`: score of each window; infinity for an invalid one.
    """
    order = sorted(range(len(scores)), key=lambda index: scores[index])
    return order[len(order) // 2]


def has_result(good: Sequence[bool]) -> bool:
    """Return whether the median window is valid, which does not depend on the times of the runs."""
    invalid = sorted(not is_valid(window) for window in windows(good))
    return not invalid[len(invalid) // 2]


def good_runs_needed(good: Sequence[bool]) -> int:
    """Return how many more consecutive good runs the series needs for a result, or 0."""
    followed = list(good)
    while not has_result(followed):
        followed.append(True)
    return len(followed) - len(good)
