"""A series of runs, and the ten of them that are its result, for score, package and report.

docs/submission.md explains how attempts are classified by their logs, which ten runs count, and
names the sources in the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from common.errors import ConfigError
from common.records import intervals, ledger
from common.records import windows as window_rules
from common.records.published import Pace, Published
from common.records.rcp import SUBMISSION_RUNS, trimmed_mean
from common.records.run_states import MISSED
from submission import official_tools, rcp, rounds
from submission.log_rules import converts_to_int
from submission.run import NOT_STARTED, Run, numbered_logs, read_run

# Attributes of a Run that must be equal for all runs of a series.
SAME = ("benchmark", "division", "batch", "org", "gpu", "gpus")


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
        """The run from which the properties common to all runs are taken.

        It is the first good run, otherwise the first run with a benchmark, otherwise the first run.
        """
        return next((run for run in (*self.good, *self.runs) if run.benchmark), self.runs[0])

    @cached_property
    def windows(self) -> list[TenRuns]:
        """All windows of ten consecutive runs, valid or not, in order.

        A series of ten runs or fewer is one window.
        """
        groups = map(tuple, window_rules.windows(started_runs(self)))
        return [TenRuns(runs, _invalid(runs)) for runs in groups]


@dataclass(frozen=True)
class TenRuns:
    """Runs that are scored as one result, usually ten. Each value is computed once."""

    runs: tuple[Run, ...]
    invalid: str  # why these runs are not a valid result, or ""

    @cached_property
    def counted(self) -> list[Run]:
        """The runs in the mean: without the fastest and the slowest, fastest first.

        A run that did not converge is the slowest. With fewer than three runs, none is dropped.
        """
        converged = [run for run in self.runs if run.converged]
        converged.sort(key=lambda run: run.minutes or 0.0)
        if len(self.runs) < 3:
            return converged
        if len(converged) < len(self.runs):
            return converged[1:]
        return converged[1:-1]

    @cached_property
    def minutes(self) -> float | None:
        """Mean of the counted runs."""
        if not self.counted:
            return None
        return sum(run.minutes or 0.0 for run in self.counted) / len(self.counted)

    @cached_property
    def samples(self) -> float | None:
        """Mean of the samples without the lowest and the highest, as in the RCP checker.

        A run that did not converge needs infinitely many. None for fewer than three runs, or if the
        mean is infinite.
        """
        if len(self.runs) < 3:
            return None
        samples = []
        for run in self.runs:
            samples.append(float(run.samples or 0) if run.status == "success" else math.inf)
        mean = trimmed_mean(samples)
        return mean if math.isfinite(mean) else None

    @cached_property
    def verdict(self) -> rcp.RcpVerdict | None:
        """The verdict of the RCP checker. None for a miniature, and for fewer than three runs."""
        if len(self.runs) < 3 or any(run.is_miniature for run in self.runs):
            return None
        logs = [run.path if run.log.events else None for run in self.runs]
        bypass = official_tools.RCP_BYPASS in official_tools.bypasses(self.runs[0].folder)
        return rcp.judge(logs, self.runs[0].ruleset, bypass)

    @property
    def factor(self) -> float | None:
        """The RCP factor. None unless the RCP test passed."""
        return self.verdict.factor if self.verdict and self.verdict.passed else None

    @property
    def score(self) -> float | None:
        """`minutes` x `factor`. None for an invalid result, a failed RCP test, or a miniature."""
        if self.minutes is None or self.invalid or self.factor is None:
            return None
        return self.minutes * self.factor

    @property
    def rank(self) -> float:
        """Key by which windows are sorted: minutes x factor, even if the RCP test failed.

        Infinity if the result is invalid.
        """
        if self.minutes is None or self.invalid:
            return math.inf
        return self.minutes * (self.verdict.factor if self.verdict else 1.0)

    @property
    def passed(self) -> bool:
        """Whether the result is valid and the RCP test passed.

        For a miniature: whether a run converged and at most one did not.
        """
        if any(run.is_miniature for run in self.runs):
            failed = sum(not run.converged for run in self.runs)
            return failed < len(self.runs) and failed <= window_rules.MAY_FAIL
        return not self.invalid and (self.verdict is None or self.verdict.passed)


# Selecting ten runs.


def ten_runs(series: Series) -> TenRuns:
    """Return the median window of `series` (common/records/windows.py).

    If it is not valid, its `invalid` says why the series has no result.
    """
    all_windows = series.windows
    median = all_windows[window_rules.median([window.rank for window in all_windows])]
    if not median.invalid or len(all_windows) == 1:
        return median
    valid = sum(not window.invalid for window in all_windows)
    needed = window_rules.good_runs_needed([run.converged for run in started_runs(series)])
    failed = "; ".join(run.describe() for run in series.runs if not run.converged)
    why = (
        f"the median window is not valid ({valid} of {len(all_windows)} windows of"
        f" {SUBMISSION_RUNS} consecutive runs are); {needed} more good runs in a row would make it"
        f" valid; {failed}"
    )
    return replace(median, invalid=why)


def started_runs(series: Series) -> list[Run]:
    """Return the attempts that count as runs: those whose clock started."""
    return [run for run in series.runs if run.counts_as != NOT_STARTED]


def _invalid(runs: Sequence[Run]) -> str:
    """Return why `runs` are not a valid result, or ""."""
    if window_rules.is_valid([run.converged for run in runs]):
        return ""
    failed = [run for run in runs if not run.converged]
    if len(failed) <= window_rules.MAY_FAIL:
        return f"a result has {SUBMISSION_RUNS} runs, this series has {len(runs)}"
    names = []
    for run in failed:
        names.append(run.name if run.state == MISSED else f"{run.name} ({run.outcome})")
    text = f"{len(failed)} runs did not converge, and at most one may: {', '.join(names)}"
    if failed[0].reason:
        text += f"; the first: {failed[0].reason}"
    return text


def pace(ten: TenRuns) -> Pace | None:
    """Return the quantities that make up the minutes, or None if the logs do not contain them.

    A block is the training between two evaluations. The rate excludes each run's first block, in
    which the GPUs warm up, unless it is the only one.
    """
    runs = ten.counted
    blocks: list[intervals.Interval] = []
    for run in runs:
        blocks += run.blocks[1:] or run.blocks
    rate = intervals.rate(blocks)
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


@dataclass(frozen=True)
class LocalResult(Published):
    """The result of a local series, which may be one of miniatures."""

    sequence_length: int | None  # None if the rules of its runs are unknown


def result(series: Series, ten: TenRuns) -> LocalResult:
    """Return the result of `series` in the form of a published result. `ten`: its scored runs."""
    run = series.first
    measured = pace(ten)
    return LocalResult(
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
        samples=measured.samples if measured else None,
        samples_per_s=measured.samples_per_s if measured else None,
        evaluations=measured.evaluations if measured else None,
        evaluation_s=measured.evaluation_s if measured else None,
        sequence_length=run.rules.sequence_length if run.rules else None,
    )


# Reading.


def read_series(paths: Sequence[Path], wanted: str = "", ruleset: str = "") -> Series:
    """Return the runs at `paths` as one series.

    A path is a log, a folder of result_<n>.txt as in a submission, a run directory, or
    LOGDIR/<benchmark> with its ledger.

    `wanted`: ID of a series in the ledger, or its beginning (default: the newest series with more
    than one run, otherwise the newest series). `ruleset`: ruleset for the logs (default: the one of
    the newest round that a log shows). Raises ConfigError if there are no runs.
    """
    notes: list[str] = []
    names = []
    runs: list[Run] = []
    for path in paths:
        name, part = _read(path, wanted, notes)
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
    ruleset = ruleset or rounds.ruleset_of(run.shown_round for run in runs)
    for run in runs:
        run.ruleset = ruleset
    if note := rounds.difference(((run.name, run.shown_round) for run in runs), ruleset):
        notes.append(note)
    return Series(", ".join(names), runs, notes)


def _read(path: Path, wanted: str, notes: list[str]) -> tuple[str, list[Run]]:
    """Return the name of the series at `path` and its runs. See `read_series`."""
    name = path.resolve().name
    # Beside a ledger, a stray copy result_0.txt of a log is not the series.
    logs = [] if (path / ledger.NAME).is_file() else _logs(path)
    if logs and wanted:
        raise ConfigError(
            f"--series {wanted}: {path} is a log or a folder of logs",
            "only a run ledger has series",
            "name LOGDIR/<benchmark>, or leave out --series",
        )
    if logs:
        return name, [read_run(log) for log in logs]
    record = ledger.choose(path / ledger.NAME, wanted)
    if record:
        notes.append(f"series {record.id} of {path / ledger.NAME}")
        return f"series {record.id}", Run.in_series(path, record)
    runs = [run for run in Run.in_folder(path) if run.path.exists()]
    if runs:
        notes.append(f"{path} has no ledger: all runs in it are read, in the order of their starts")
        return name, runs
    why = "it does not exist"
    if path.exists():
        folders = sorted(item.name for item in path.glob("*/") if item.is_dir())
        why = "it has no logs and no folders"
        if folders:
            why = f"it has no logs, and its folders are: {', '.join(folders)}"
    raise ConfigError(
        f"{path} has no logs", why, "name LOGDIR/<benchmark>, a run, or a folder of result_<n>.txt"
    )


def _logs(path: Path) -> list[Path]:
    """Return the logs that `path` names: itself, its result_<n>.txt, or its result.txt."""
    if path.is_file() or path.is_fifo():
        return [path]
    return numbered_logs(path) or sorted(path.glob(ledger.LOG))


def check_same(series: Series) -> None:
    """Raise ConfigError if the runs cannot be one result.

    They must agree in SAME, have a global batch, and be different runs. If two seeds are equal, add
    a note to the series.
    """
    for key in SAME:
        values = {getattr(run, key) for run in series.runs} - {None, ""}
        if len(values) > 1:
            raise ConfigError(
                f"the logs differ in {key}: {', '.join(sorted(map(str, values)))}",
                "a series has one submitter, one benchmark, one global batch and one system",
                "name the logs of one series",
            )
    run_of_identity: dict[str, Run] = {}
    run_of_seed: dict[int, Run] = {}
    for run in series.runs:
        if run.benchmark and run.batch is None:
            raise ConfigError(
                f"{run.path} has no global_batch_size that is a number of at least 1",
                "the RCP test needs it",
                "name complete logs",
            )
        other = run_of_identity.setdefault(_identity(run), run)
        if other is not run:
            raise ConfigError(
                f"{run.path} is the same run as {other.path}",
                "the ten runs must be independent, and each counts once",
                "list each log once",
            )
        seed = run.log.value("seed")
        if not converts_to_int(seed):
            continue
        seed = int(seed)  # type: ignore[call-overload]  # as the official seed checker
        other = run_of_seed.setdefault(seed, run)
        if other is not run:
            series.notes.append(
                f"{other.name} and {run.name} have the same seed {seed}:"
                " the official seed checker may refuse them"
            )


def _identity(run: Run) -> str:
    """Return a text that is equal only for logs of the same run.

    It consists of the seed and the times of the clock. Without these times, it is the path.
    """
    events = [*run.log.all("run_start"), *run.log.all("run_stop")]
    times = [event.time_ms for event in events]
    if len(times) > 1:
        return f"{run.log.value('seed')} {times}"
    return str(run.path.resolve())
