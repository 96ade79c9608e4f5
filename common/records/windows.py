"""Which consecutive runs of a series are its result, by MLPerf's rules: one function for the launcher, score, package and report.

MLPerf Training rules, "Benchmark Results" and "Scoring" (mlcommons/training_policies, training_rules.adoc at d73e20f): a result is ten
runs, of which one may have failed. Of more than ten runs each ten consecutive ones are a window, and the result is the window of the
median score. A window that is no valid result counts as infinite in the median; if the median is infinite, there is no result.

The rules do not say which window is the median of an even number of windows. Here it is the slower one of the two in the middle.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from common.records.rcp import SUBMISSION_RUNS

MAY_FAIL = (
    1  # runs of a result: the slowest one is dropped, and a failed run counts as infinitely slow
)

Item = TypeVar("Item")


def windows(runs: Sequence[Item]) -> list[Sequence[Item]]:
    """Return every ten consecutive items of `runs` in their order; all of them if there are no more than ten."""
    last = max(0, len(runs) - SUBMISSION_RUNS)
    return [runs[first : first + SUBMISSION_RUNS] for first in range(last + 1)]


def is_valid(good: Sequence[bool]) -> bool:
    """Return whether these runs can be a result: ten, with at most one that failed."""
    return len(good) == SUBMISSION_RUNS and good.count(False) <= MAY_FAIL


def median(scores: Sequence[float]) -> int:
    """Return the index of the window that counts. `scores` holds infinity for each window that is not valid."""
    order = sorted(range(len(scores)), key=lambda index: scores[index])
    return order[len(order) // 2]


def has_result(good: Sequence[bool]) -> bool:
    """Return whether a series of these runs has a valid median window, whatever the times of its good runs are."""
    invalid = [not is_valid(window) for window in windows(good)]
    return not sorted(invalid)[len(invalid) // 2]


def good_runs_needed(good: Sequence[bool]) -> int:
    """Return how many good runs must follow in a row until the series has a result; 0 if it has one."""
    followed = list(good)
    while not has_result(followed):
        followed.append(True)
    return len(followed) - len(good)
