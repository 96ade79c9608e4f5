"""The verdict on convergence by mlperf-logging's own RCP checker, called in this process as the package checker calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from common.errors import PreflightError
from submission.official_tools import INSTALL, silent

POINTS = "pruned_rcps"  # by which package checker and summarizer judge


@dataclass(frozen=True)
class Point:
    """What the reference needs at one global batch, in training sequences, as the RCP checker computes it."""

    mean: float  # without the best and the worst run
    sigma: float  # population standard deviation of all runs
    minimum: float  # the lowest mean of a submission that passes

    def z_score(self, samples: float) -> float:
        """Distance of one run from the reference's mean, in standard deviations of the reference; negative is faster."""
        return (samples - self.mean) / self.sigma


@dataclass(frozen=True)
class Verdict:
    """What the RCP checker says about a series."""

    passed: bool
    message: str  # in its words
    factor: float  # on the score, from 1; of no meaning where the test failed


def judge(logs: Sequence[Path], ruleset: str) -> Verdict:
    """The verdict over the logs of a series, of at least three runs. Raises PreflightError without mlperf-logging."""
    checker = _rcp_checker()
    with silent(), tempfile.TemporaryDirectory() as folder:
        for index, path in enumerate(logs):
            Path(folder, f"result_{index}.txt").symlink_to(path.resolve())
        try:
            # set_scaling: it writes scaling.json into the folder; without, it removes /scaling.json.
            found = checker.check_directory(folder, "training", ruleset, False, False, rcp_pass=POINTS, set_scaling=True)
            passed, message, factor = found
        except Exception as error:  # whatever it is, the checker gave no verdict
            return Verdict(False, f"the official RCP checker broke off: {type(error).__name__}: {error}", 1.0)
    return Verdict(bool(passed), message, float(factor))


@cache
def point_at(benchmark: str, batch: int, ruleset: str) -> Point | None:
    """The point that a series at `batch` is held against, as `check_directory` selects it; None above the largest."""
    checker = _rcp_checker().RCP_Checker("training", ruleset, benchmark, verbose=False)
    record = checker._find_rcp(batch, POINTS)
    if record is None:
        low, high = checker._find_top_min_rcp(batch, POINTS), checker._find_bottom_max_rcp(batch, POINTS)
        if high is None:
            return None
        record = checker._create_interp_rcp(batch, low, high)[1] if low else checker._find_min_rcp(POINTS)
    return Point(*(float(record[key]) for key in ("RCP Mean", "RCP Stdev", "Min Epochs")))


def _rcp_checker() -> ModuleType:
    try:
        from mlperf_logging.rcp_checker import rcp_checker
    except ImportError as error:
        raise PreflightError("the official tools cannot be imported", str(error), INSTALL) from None
    return rcp_checker
