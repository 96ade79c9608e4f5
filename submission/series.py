"""A series of runs, and the ten of them that are the result, for score, package and report.

The table in docs/submission.md says how the log classifies an attempt. It gives the source in the
rules, and says where the classification is our reading of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import ConfigError
from common.records import ledger
from common.records import windows as rule
from common.records.published import Pace, Published
from common.records.rcp import SUBMISSION_RUNS, trimmed_mean
from submission import intervals, rcp
from submission.runs import LOST, NOT_STARTED, Run, read_attempt, read_run

SAME = ("benchmark", "division", "batch", "org", "gpu", "gpus")  # equal for all runs of a series


@dataclass
class Series:
    """Runs in the order in which they ran."""

    name: str
    runs: list[Run]
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> list[Run]:
        return [run for run in self.runs if run.converged]

    @property
    def first(self) -> Run:
        """The run that stands for the properties common to all runs.

        It is the first good run, else the first with a benchmark, else the first.
        """
        return next((run for run in (*self.good, *self.runs) if run.benchmark), self.runs[0])


@dataclass(frozen=True)
class TenRuns:
    """Runs scored as one result, ten or any other number."""

    runs: tuple[Run, ...]
    counted: tuple[Run, ...]  # without the fastest and the slowest, fastest first
    minutes: float | None  # mean of the counted runs
    # Mean without the lowest and the highest, as in the RCP checker. None for fewer than three
    # runs, or if two did not converge.
    samples: float | None
    verdict: rcp.RcpVerdict | None  # None for a miniature, and for fewer than three runs
    invalid: str  # why these runs are not a valid result; "" for a valid one
    factor: float | None  # of the RCP checker; None unless its test passed
    # minutes x factor. None for an invalid result, a failed RCP test, or a miniature.
    score: float | None
    # Valid, and the RCP test passed. For a miniature: a run converged, and at most one did not.
    passed: bool
    # Windows are ordered by this: minutes x factor even if the RCP test failed, infinite if
    # invalid.
    rank: float


# Selecting ten runs.


def ten_runs(series: Series) -> TenRuns:
    """Return the median window (common/records/windows.py).

    If it is not valid, its `invalid` says why the series has no result.
    """
    every = windows(series)
    median = every[rule.median([window.rank for window in every])]
    if not median.invalid or len(every) == 1:
        return median
    valid = sum(not window.invalid for window in every)
    more = rule.good_runs_needed([run.converged for run in counted(series)])
    bad = "; ".join(run.describe() for run in series.runs if not run.converged)
    why = (
        f"the median window is not valid ({valid} of {len(every)} windows of {SUBMISSION_RUNS}"
        f" consecutive runs are); {more} more good runs in a row would make it valid; {bad}"
    )
    return replace(median, invalid=why)


def windows(series: Series) -> list[TenRuns]:
    """Return the scores of all windows of ten consecutive runs, valid or not, in order.

    A series of ten runs or fewer is one window.
    """
    return [score_runs(list(part), _invalid(list(part))) for part in rule.windows(counted(series))]


def counted(series: Series) -> list[Run]:
    """Return the attempts that are runs: those whose clock started."""
    return [run for run in series.runs if run.state != NOT_STARTED]


def _invalid(runs: list[Run]) -> str:
    if rule.is_valid([run.converged for run in runs]):
        return ""
    failed = [run for run in runs if not run.converged]
    if len(failed) <= rule.MAY_FAIL:
        return f"a result has {SUBMISSION_RUNS} runs, this series has {len(runs)}"
    names = [f"{run.name} ({LOST})" if run.state == LOST else run.name for run in failed]
    text = f"{len(failed)} runs did not converge, and at most one may: {', '.join(names)}"
    if failed[0].reason:
        text += f"; the first: {failed[0].reason}"
    return text


def score_runs(runs: list[Run], invalid: str = "") -> TenRuns:
    """Score any number of `runs` as one result. `invalid`: why they are not a valid one."""
    counted = sorted((run for run in runs if run.converged), key=lambda run: run.minutes or 0.0)
    if len(runs) >= 3:  # drop the fastest and the slowest, which may be one that failed
        counted = counted[1:-1] if len(counted) == len(runs) else counted[1:]
    minutes = sum(run.minutes or 0.0 for run in counted) / len(counted) if counted else None
    samples = [float(run.samples or 0) if run.status == "success" else math.inf for run in runs]
    mean = trimmed_mean(samples) if len(samples) >= 3 else math.inf
    judged = len(runs) >= 3 and not any(run.is_miniature for run in runs)
    ruleset = next((run.ruleset for run in runs if run.log.events), "")
    verdict = (
        rcp.judge([run.path if run.log.events else None for run in runs], ruleset)
        if judged
        else None
    )
    factor = verdict.factor if verdict and verdict.passed else None
    score = None if invalid or minutes is None or factor is None else minutes * factor
    passed = _passed(runs, invalid, verdict)
    rank = (
        math.inf if invalid or minutes is None else minutes * (verdict.factor if verdict else 1.0)
    )
    finite = mean if math.isfinite(mean) else None
    return TenRuns(
        tuple(runs), tuple(counted), minutes, finite, verdict, invalid, factor, score, passed, rank
    )


def _passed(runs: list[Run], invalid: str, verdict: rcp.RcpVerdict | None) -> bool:
    if any(run.is_miniature for run in runs):
        failed = sum(not run.converged for run in runs)
        return failed < len(runs) and failed <= rule.MAY_FAIL
    return not invalid and (verdict is None or verdict.passed)


def pace(ten: TenRuns) -> Pace | None:
    """Return the parts that the minutes consist of, or None if the logs lack the lines for it.

    The rate excludes each run's first block, which starts cold, unless it is the only one.
    """
    runs = ten.counted
    rate = intervals.rate([block for run in runs for block in run.blocks[1:] or run.blocks])
    if not runs or rate is None or ten.minutes is None:
        return None
    samples = sum(run.trained or 0 for run in runs) / len(runs)
    count = sum(len(run.evaluations) for run in runs)
    seconds = sum(run.evaluation_s or 0.0 for run in runs)
    return Pace(
        minutes=ten.minutes,
        samples=samples,
        samples_per_s=rate,
        evaluations=count / len(runs) if count else None,
        evaluation_s=seconds / count if count else None,
    )


def result(series: Series, ten: TenRuns) -> Published:
    """Return the result of the runs `ten` of `series` in the form of a published result."""
    run = series.first
    mine = pace(ten)
    return Published(
        round="",
        benchmark=run.benchmark,
        gpu=run.gpu,
        gpus=run.gpus,
        submitter="",
        system=series.name,
        batch=run.batch,
        runs=len(ten.runs),
        score=ten.score,
        minutes=ten.minutes,
        samples=mine.samples if mine else None,
        samples_per_s=mine.samples_per_s if mine else None,
        evaluations=mine.evaluations if mine else None,
        evaluation_s=mine.evaluation_s if mine else None,
    )


# Reading.


def read_series(paths: Sequence[Path], wanted: str = "", ruleset: str = "") -> Series:
    """Return the runs at `paths` as one series.

    A path is a log, a folder of result_*.txt as in a submission, the directory of one of our runs,
    or our LOGDIR/<benchmark> with its ledger.

    `wanted`: ID of a series in the ledger, or how it begins (default: the newest series with more
    than one run, else the newest). `ruleset`: ruleset for the logs (default: chosen by their keys).
    Raises ConfigError if there is nothing to read.
    """
    notes: list[str] = []
    names = []
    runs: list[Run] = []
    for path in paths:
        name, part = _read(path, wanted, ruleset, notes)
        names.append(name)
        runs += part
    for number, run in enumerate(runs, start=1):
        run.number = run.number or number
    if not runs:
        raise ConfigError(
            f"no runs in {', '.join(map(str, paths))}",
            "; ".join(notes),
            "start at least one run",
        )
    return Series(", ".join(names), runs, notes)


def _read(path: Path, wanted: str, ruleset: str, notes: list[str]) -> tuple[str, list[Run]]:
    """Return the name of the series at `path` and its runs. See `read_series`."""
    name = path.resolve().name
    logs = _logs(path)
    if logs:
        return name, [read_run(log, ruleset) for log in logs]
    record = ledger.choose(path / ledger.NAME, wanted)
    if record:
        notes.append(f"series {record.id} of {path / ledger.NAME}")
        alive = ledger.launcher_is_alive(path, record.id)
        attempts = []
        for number, start in sorted(record.starts.items()):
            log = path / str(start.get("run", "")) / "result.txt"
            end = record.ends.get(number)
            attempts.append(read_attempt(log, number, start, end, alive))
        return f"series {record.id}", attempts
    logs = sorted(path.glob("*/result.txt"))  # run directories begin with the date
    if logs:
        notes.append(f"{path} has no ledger: all runs in it, in the order of their names")
        return name, [read_attempt(log) for log in logs]
    why = "it does not exist"
    if path.exists():
        folders = sorted(item.name for item in path.glob("*/") if item.is_dir())
        why = f"it contains {', '.join(folders) or 'nothing'}"
    raise ConfigError(
        f"{path} has no logs", why, "name LOGDIR/<benchmark>, a run, or a folder of result_*.txt"
    )


def _logs(path: Path) -> list[Path]:
    """Return the logs that `path` names: itself, its result_*.txt, or its result.txt."""
    if path.is_file() or path.is_fifo():
        return [path]
    numbered = sorted(path.glob("result_*.txt"), key=lambda log: (len(log.name), log.name))
    return numbered or sorted(path.glob("result.txt"))


def check_same(series: Series) -> None:
    """Raise ConfigError if the runs cannot be one result.

    They must agree in SAME, have a global batch, and be different runs. Equal seeds add a note.
    """
    for key in SAME:
        values = {getattr(run, key) for run in series.runs} - {None, ""}
        if len(values) > 1:
            raise ConfigError(
                f"the logs differ in {key}: {', '.join(sorted(map(str, values)))}",
                "a series has one submitter, one benchmark, one global batch and one system",
                "name the logs of one series",
            )
    seen: dict[str, Run] = {}
    for run in series.runs:
        if run.benchmark and run.batch is None:
            raise ConfigError(
                f"{run.path} has no global_batch_size",
                "the RCP test depends on it",
                "name complete logs",
            )
        other = seen.setdefault(_identity(run), run)
        if other is not run:
            raise ConfigError(
                f"{run.path} is the same run as {other.path}",
                "the ten runs must be independent, and each counts once",
                "name every log once",
            )
        seed = run.log.value("seed")
        if type(seed) is not int:
            continue
        other = seen.setdefault(f"seed {seed}", run)
        if other is not run:
            series.notes.append(
                f"{other.name} and {run.name} have the same seed {seed}:"
                " the official seed checker may refuse them"
            )


def _identity(run: Run) -> str:
    """Return a text that only logs of the same run share: seed and times, or else the path."""
    times = [event.time_ms for key in ("run_start", "run_stop") for event in run.log.all(key)]
    if len(times) > 1:
        return f"{run.log.value('seed')} {times}"
    return str(run.path.resolve())
