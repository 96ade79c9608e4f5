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
    verdict: rcp.Verdict | None  # None for a miniature, and for fewer than three runs
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
    found = windows(series)
    median = found[rule.median([window.rank for window in found])]
    if not median.invalid or len(found) == 1:
        return median
    valid = sum(not window.invalid for window in found)
    more = rule.good_runs_needed([run.converged for run in counted(series)])
    bad = "; ".join(run.describe() for run in series.runs if not run.converged)
    why = f"{valid} of {len(found)} windows of {SUBMISSION_RUNS} consecutive runs are valid, and the median window is not one of them; "
    why += f"{more} more good runs in a row would make it one; {bad}"
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
    if len(failed) > rule.MAY_FAIL:
        names = ", ".join(
            f"{run.name} ({run.state})" if run.state == LOST else run.name for run in failed
        )
        return f"{len(failed)} runs did not converge, one may: {names}" + (
            f"; the first: {failed[0].reason}" if failed[0].reason else ""
        )
    return f"a result is {SUBMISSION_RUNS} runs, these are {len(runs)}"


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


def _passed(runs: list[Run], invalid: str, verdict: rcp.Verdict | None) -> bool:
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
    count, seconds = (
        sum(len(run.evaluations) for run in runs),
        sum(run.evaluation_s or 0.0 for run in runs),
    )
    return Pace(
        ten.minutes,
        samples,
        rate,
        *((count / len(runs), seconds / count) if count else (None, None)),
    )


def result(series: Series, ten: TenRuns) -> Published:
    """Return the result of the runs `ten` of `series` in the form of a published result."""
    run, mine = series.first, pace(ten)
    rates = (
        (mine.samples, mine.samples_per_s, mine.evaluations, mine.evaluation_s)
        if mine
        else (None, None, None, None)
    )
    return Published(
        "",
        run.benchmark,
        run.gpu,
        run.gpus,
        "",
        series.name,
        run.batch,
        len(ten.runs),
        ten.score,
        ten.minutes,
        *rates,
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
    found = [_read(path, wanted, ruleset, notes) for path in paths]
    runs = [run for _, part in found for run in part]
    for number, run in enumerate(runs, start=1):
        run.number = run.number or number
    if not runs:
        raise ConfigError(
            f"there is no run in {', '.join(map(str, paths))}",
            "; ".join(notes),
            "let at least one run start",
        )
    return Series(", ".join(name for name, _ in found), runs, notes)


def _read(path: Path, wanted: str, ruleset: str, notes: list[str]) -> tuple[str, list[Run]]:
    name = path.resolve().name
    in_order = sorted(path.glob("result_*.txt"), key=lambda log: (len(log.name), log.name))
    if (
        results := [path]
        if path.is_file() or path.is_fifo()
        else in_order or sorted(path.glob("result.txt"))
    ):
        return name, [read_run(result, ruleset) for result in results]
    if record := _record(path / ledger.NAME, wanted):
        notes.append(f"series {record.id} of {path / ledger.NAME}")
        attempts = sorted(record.starts.items())
        logs = [
            (path / str(start.get("run", "")) / "result.txt", number, start)
            for number, start in attempts
        ]
        return f"series {record.id}", [
            read_attempt(log, number, start, record.ends.get(number, {}))
            for log, number, start in logs
        ]
    if results := sorted(path.glob("*/result.txt")):  # run directories begin with the date
        notes.append(f"{path} has no ledger: all runs in it, in the order of their names")
        return name, [read_attempt(result) for result in results]
    inside = ", ".join(sorted(item.name for item in path.glob("*/") if item.is_dir())) or "nothing"
    why = f"it holds {inside}" if path.exists() else "it does not exist"
    raise ConfigError(
        f"{path} has no logs", why, "name LOGDIR/<benchmark>, a run, or a folder of result_*.txt"
    )


def _record(path: Path, wanted: str) -> ledger.Record | None:
    records = ledger.read(path)
    found = [record for record in records if record.id.startswith(wanted)]
    if wanted and len(found) != 1:
        known = (
            ", ".join(f"{record.id} ({record.goal} runs wanted)" for record in records) or "none"
        )
        why = f"{len(found) or 'none'} of its series begins so; they are: {known}"
        raise ConfigError(f"{path}: no series {wanted}", why, "name one of those")
    several = [record for record in found if record.goal > 1 or wanted]
    return next(reversed(several or found), None)


def check_same(series: Series) -> None:
    """Raise ConfigError if the runs cannot be one result.

    They must agree in SAME, have a global batch, and be different runs. Equal seeds add a note.
    """
    for what in SAME:
        if (
            len(
                found := {
                    value for run in series.runs if (value := getattr(run, what)) not in (None, "")
                }
            )
            > 1
        ):
            why = "the runs of a series are of one submitter, one benchmark, one global batch and one system"
            raise ConfigError(
                f"the logs differ in {what}: {', '.join(sorted(map(str, found)))}",
                why,
                "name the logs of one series",
            )
    seen: dict[str, Run] = {}
    for run in series.runs:
        if run.benchmark and run.batch is None:
            raise ConfigError(
                f"{run.path} has no global_batch_size",
                "the RCP test goes by it",
                "name complete logs",
            )
        seed, times = (
            run.log.value("seed"),
            [event.time_ms for key in ("run_start", "run_stop") for event in run.log.all(key)],
        )
        if (
            other := seen.setdefault(
                f"{seed} {times}" if len(times) > 1 else str(run.path.resolve()), run
            )
        ) is not run:
            what = f"{run.path} is the run of {other.path} again"
            raise ConfigError(
                what,
                "the ten runs must be independent, and each counts once",
                "name every log once",
            )
        if type(seed) is int and (other := seen.setdefault(f"seed {seed}", run)) is not run:
            series.notes.append(
                f"{other.name} and {run.name} have the same seed {seed}: the official seed checker may refuse them"
            )
