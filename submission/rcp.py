"""The convergence test of mlperf-logging's RCP checker, called as the package checker calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from common.errors import PreflightError
from submission.official_tools import INSTALL, silent

POINTS = "pruned_rcps"  # the points that the package checker and the summarizer use


@dataclass(frozen=True)
class ReferencePoint:
    """A reference convergence point: training sequences to the target at one global batch.

    The RCP checker computes the numbers.
    """

    mean: float  # of the reference runs, without the fastest and the slowest
    sigma: float  # population standard deviation of all reference runs
    minimum: float  # lowest mean with which a submission passes

    def z_score(self, samples: float) -> float:
        """Return the distance of `samples` from the reference mean, in standard deviations.

        It is negative for a run that needs fewer sequences than the reference.
        """
        return (samples - self.mean) / self.sigma


@dataclass(frozen=True)
class RcpVerdict:
    """The verdict of the RCP checker on a series of runs."""

    passed: bool
    message: str  # of the checker
    factor: float  # multiplies the score; at least 1, and meaningless if the test failed


def judge(logs: Sequence[Path | None], ruleset: str, bypass: bool = False) -> RcpVerdict:
    """Return the verdict on the logs of at least three runs.

    None stands for a run that left no log. It counts as infinitely slow, like a log without
    run_stop. `bypass`: whether the result passes if it fails the test. Its factor is 1 then. Raises
    PreflightError without mlperf-logging.
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
            # set_scaling makes the checker write scaling.json into the folder. Otherwise it would
            # remove /scaling.json.
            passed, message, factor = checker.check_directory(
                folder,
                "training",
                ruleset,
                verbose=False,
                bert_train_samples=False,
                rcp_pass=POINTS,
                rcp_bypass=bypass,
                set_scaling=True,
            )
            if message.endswith("rcp_bypass"):
                factor = 1.0
        except Exception as error:  # any exception means that there is no verdict; see `silent`
            reason = f"{type(error).__name__}: {error}"
            return RcpVerdict(False, f"the official RCP checker crashed: {reason}", 1.0)
    return RcpVerdict(bool(passed), message, float(factor))


def _identity(path: Path) -> str:
    """Return the lines of a log that name its benchmark and global batch.

    The RCP checker requires them for every run.
    """
    lines = []
    with path.open(encoding="latin-1") as file:
        for line in file:
            if '"submission_benchmark"' in line or '"global_batch_size"' in line:
                lines.append(line)
    return "".join(lines)


@cache
def point_at(benchmark: str, batch: int, ruleset: str) -> ReferencePoint | None:
    """Return the reference convergence point for the global batch `batch`.

    The checker's `check_directory` selects it in the same way. None if `batch` exceeds the batch of
    every point, or if `ruleset` lacks the benchmark.
    """
    try:
        checker = _rcp_checker().RCP_Checker("training", ruleset, benchmark, verbose=False)
    except FileNotFoundError:  # the file of the points, which the checker opens
        return None
    record = checker._find_rcp(batch, POINTS)
    if record is None:
        low = checker._find_top_min_rcp(batch, POINTS)
        high = checker._find_bottom_max_rcp(batch, POINTS)
        if high is None:
            return None
        if low:
            _, record = checker._create_interp_rcp(batch, low, high)
        else:
            record = checker._find_min_rcp(POINTS)
    return ReferencePoint(*(float(record[key]) for key in ("RCP Mean", "RCP Stdev", "Min Epochs")))


def _rcp_checker() -> ModuleType:
    """Return the module of the RCP checker. Raises PreflightError without mlperf-logging."""
    try:
        from mlperf_logging.rcp_checker import rcp_checker
    except ImportError as error:
        raise PreflightError("the official tools cannot be imported", str(error), INSTALL) from None
    return rcp_checker
