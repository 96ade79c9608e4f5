"""Windows: the consecutive runs of a series that can be its result by MLPerf's rules.

The launcher, score, package and report all use this module.

MLPerf Training rules, "Benchmark Results" and "Scoring" (mlcommons/training_policies,
training_rules.adoc at d73e20f): a result is ten runs, of which one may have failed. Of more than
ten runs each ten consecutive ones are a window, and the result is the window with the median score.
A window that is not a valid result counts as infinite in the median. If the median is infinite,
there is no result.

The rules do not define the median of an even number of windows. This module uses the slower one of
the two in the middle. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from common.records.rcp import SUBMISSION_RUNS

# Runs of a result that may fail: the slowest one is dropped, and a failed run counts as infinitely
# slow.
MAY_FAIL = 1

Item = TypeVar("Item")


def windows(runs: Sequence[Item]) -> list[Sequence[Item]]:
    """Return every ten consecutive items of `runs`, or all of them if there are at most ten."""
    last = max(0, len(runs) - SUBMISSION_RUNS)
    return [runs[first : first + SUBMISSION_RUNS] for first in range(last + 1)]


def is_valid(good: Sequence[bool]) -> bool:
    """Return whether these runs can be a result: ten, at most one of them failed."""
    return len(good) == SUBMISSION_RUNS and good.count(False) <= MAY_FAIL


def median(scores: Sequence[float]) -> int:
    """Return the index of the window that counts. The score of an invalid window is infinity."""
    order = sorted(range(len(scores)), key=lambda index: scores[index])
    return order[len(order) // 2]


def has_result(good: Sequence[bool]) -> bool:
    """Return whether these runs have a valid median window, whatever their times."""
    invalid = [not is_valid(window) for window in windows(good)]
    return not sorted(invalid)[len(invalid) // 2]


def good_runs_needed(good: Sequence[bool]) -> int:
    """Return how many more consecutive good runs the series needs for a result, or 0."""
    followed = list(good)
    while not has_result(followed):
        followed.append(True)
    return len(followed) - len(good)
