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


def judge(logs: Sequence[Path | None], ruleset: str) -> Verdict:
    """Return the verdict over the logs of at least three runs. Raises PreflightError without mlperf-logging.

    None stands for a run that left no log: it counts as infinitely slow, like a log without run_stop.
    """
    checker = _rcp_checker()
    whole = next((path for path in logs if path is not None), None)
    with silent(), tempfile.TemporaryDirectory() as folder:
        for index, path in enumerate(logs):
            link = Path(folder, f"result_{index}.txt")
            if path is not None:
                link.symlink_to(path.resolve())
            elif whole is not None:
                link.write_text(_identity(whole), encoding="latin-1")
        try:
            # set_scaling: it writes scaling.json into the folder; without, it removes /scaling.json.
            found = checker.check_directory(
                folder, "training", ruleset, False, False, rcp_pass=POINTS, set_scaling=True
            )
            passed, message, factor = found
        except Exception as error:  # whatever it is, the checker gave no verdict
            return Verdict(
                False, f"the official RCP checker broke off: {type(error).__name__}: {error}", 1.0
            )
    return Verdict(bool(passed), message, float(factor))


def _identity(path: Path) -> str:
    """Return the lines of a log that name its benchmark and global batch; the RCP checker wants them of every run."""
    named = ('"submission_benchmark"', '"global_batch_size"')
    with path.open(encoding="latin-1") as file:
        return "".join(line for line in file if any(name in line for name in named))


@cache
def point_at(benchmark: str, batch: int, ruleset: str) -> Point | None:
    """The point that a series at `batch` is held against, as `check_directory` selects it; None above the largest."""
    checker = _rcp_checker().RCP_Checker("training", ruleset, benchmark, verbose=False)
    record = checker._find_rcp(batch, POINTS)
    if record is None:
        low, high = (
            checker._find_top_min_rcp(batch, POINTS),
            checker._find_bottom_max_rcp(batch, POINTS),
        )
        if high is None:
            return None
        record = (
            checker._create_interp_rcp(batch, low, high)[1]
            if low
            else checker._find_min_rcp(POINTS)
        )
    return Point(*(float(record[key]) for key in ("RCP Mean", "RCP Stdev", "Min Epochs")))


def _rcp_checker() -> ModuleType:
    try:
        from mlperf_logging.rcp_checker import rcp_checker
    except ImportError as error:
        raise PreflightError("the official tools cannot be imported", str(error), INSTALL) from None
    return rcp_checker
