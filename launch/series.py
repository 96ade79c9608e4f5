"""A series of runs: attempts until enough are good, each recorded in the ledger.

Every attempt has its own directory and seed. A run is good if it reached its target and its log
passed the checks. A failed attempt is followed by the next one, until more than `max_failures`
attempts have failed since the command was started. A signal ends the series, and --resume continues
it.

A series can also be continued after its launcher was killed. The last attempt then counts as good
if its log has a result, else it is recorded as lost. While a launcher may be alive, no other one
continues its series (common/lock_files.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common import lock_files
from common.config import RunConfig
from common.errors import (
    RESERVE_FILE,
    ConfigError,
    Interrupted,
    RankLost,
    RunError,
    StorageError,
    failure_of,
    with_reserve,
)
from common.records import ledger, run_states
from common.records.rcp import SUBMISSION_RUNS
from common.records.run_record import RunRecord
from common.terminal import duration, plural, print_stderr, shown
from common.training.continuation import SavedCheckpoint, require_same
from common.values import of_variable, whole_number
from launch import diagnosis, run_directory
from launch.console import runs_still_needed, series_closing
from launch.processes import supervise
from launch.selection.check import Choice

MAX_FAILURES = 2


@dataclass(frozen=True)
class SeriesRequest:
    """Options of a series: NEXP, SEED, --max-failures and --resume."""

    goal: int  # number of good runs; 0: the goal of the resumed series
    max_failures: int  # most failed attempts since the command was started
    seed: int | None = None  # fixed seed for a single run, which cannot be submitted
    resume: bool = False
    take_over: bool = False  # resume also if the launcher cannot be examined and is silent
    name: str = ""  # in the names of the runs' directories, instead of the config's


@dataclass(frozen=True)
class RunOutcome:
    """Result of one attempt; `error` is None for a good run."""

    error: RunError | None
    result: RunRecord
    cache: str = ""
    # Failures after run_stop, which leave a good run good: a signal, or a file that is missing.
    late_errors: tuple[RunError, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code of a command that makes only this run.

        After a good run it is 17 if a file that the user asked for may be missing, such as the
        model of --save, and 128 + n after signal n. Any other late error is only told.
        """
        if self.error:
            return self.error.exit_code
        for late in self.late_errors:
            if late.kind == StorageError.kind or isinstance(late, Interrupted):
                return late.exit_code
        return 0


Execute = Callable[[Path, int], RunOutcome]  # arguments: run directory, seed
Report = Callable[[Path], None]  # writer of a run's page. Argument: run directory


def request_from(
    environment: Mapping[str, str],
    max_failures: int | None,
    resume: bool,
    take_over: bool = False,
) -> SeriesRequest:
    """Return the request. Raise ConfigError for invalid values and for values that conflict."""
    least = 0 if resume else 1
    goal = of_variable(environment, "NEXP", whole_number(least))
    goal = least if goal is None else goal
    seed = of_variable(environment, "SEED", whole_number(0, 2**32 - 1))
    limit = max_failures
    if limit is None:
        limit = 0 if goal == 1 else MAX_FAILURES
    if seed is None:
        return SeriesRequest(goal, limit, None, resume, take_over)
    if goal != 1 or limit or resume:
        raise ConfigError(
            f"SEED={seed} is for a single run only",
            "each run of a series needs a random seed of its own, or it cannot be submitted",
            "unset SEED, or leave out NEXP, --max-failures and --resume",
        )
    return SeriesRequest(1, 0, seed)


def require_single_run(request: SeriesRequest) -> None:
    """Raise ConfigError if `request` is for a series, which --continue cannot continue."""
    if request.goal != 1 or request.max_failures or request.resume:
        raise ConfigError(
            "--continue is for a single run",
            "it uses the seed of the run that it continues, but each run of a series needs a "
            "random seed of its own",
            "leave out NEXP, --max-failures and --resume",
        )


def continued(
    request: SeriesRequest, checkpoint: SavedCheckpoint, benchmark: str, config: RunConfig
) -> SeriesRequest:
    """Return the request for a single run that resumes from `checkpoint`, with its seed.

    Raise ConfigError if the checkpoint is not of this benchmark, seed and config.
    """
    folder, facts = checkpoint
    seed = facts["seed"] if request.seed is None else request.seed
    require_same(folder, facts, benchmark, seed, config)
    print_stderr(
        f"NOTE       continues {folder} after {facts['samples']:,} samples: not for submission"
    )
    # The name is what the launcher put between date and seed.
    name = request.name or checkpoint.run.name.partition("_")[2].rpartition("_seed")[0]
    return SeriesRequest(1, 0, seed, name=name)


def identity_of(
    selection: Choice, data_dir: Path, commit: str | None, root: Path, benchmark: str
) -> dict:
    """Return what must not change within a series: system, code and configuration.

    The MLPerf rules require it (section Benchmark Results).
    """
    # Digest of the training code, which also covers changes that are not committed.
    digest = hashlib.sha256()
    packages = [root / name for name in ("common", "launch", benchmark)]
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        if any(path.is_relative_to(root / name) for name in ("launch/plan", "launch/preflight")):
            # A run uses neither, except to derive its config, which config_sha256 covers.
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)}\0{content}\n".encode())
    return {
        "config": selection.log_name,
        "config_sha256": hashlib.sha256(selection.config.as_toml().encode()).hexdigest(),
        "device": selection.device,
        "gpus": selection.gpus,
        "data": str(data_dir),
        "commit": commit,
        "code_sha256": digest.hexdigest(),
    }


class SeriesRunner:
    """A series that is running, and its ledger."""

    def __init__(self, folder: Path, record: ledger.SeriesRecord, selection: Choice):
        self.folder = folder
        self.record = record
        self.selection = selection
        self.path = folder / ledger.NAME

    def append(self, event: str, **values) -> dict:
        """Add an event to the ledger and to the record. Raises StorageError if that fails."""
        line = {"event": event, "series": self.record.id, **values}
        ledger.append(self.path, line)
        self.record.add(line)
        return line

    def start(self, run_dir: Path, seed: int) -> dict:
        """Enter the start of an attempt in the ledger, and return its line."""
        return self.append(
            "start",
            attempt=self.record.next_attempt,
            run=run_dir.name,
            seed=seed,
            started=_now(),
            config=self.selection.log_name,
            modified=self.selection.log_name != f"{self.selection.stem}.toml",
            commit=self.record.identity["commit"],
        )

    def end(self, start: dict, outcome: RunOutcome) -> None:
        """Enter the end of the attempt that began with line `start`.

        If the disk is full, RESERVE_FILE is removed. Raises StorageError if that is not enough.
        """
        error = outcome.error
        result = outcome.result
        ending = {
            "exit_code": 0,
            "kind": run_states.GOOD,
            "reason": "; ".join(late.what for late in outcome.late_errors),
            "minutes": None if result.minutes is None else round(result.minutes, 6),
            "samples": result.trained or 0,
            "cache": outcome.cache,
            "clock": result.clock_started,
        }
        if error:
            ending |= {"exit_code": error.exit_code, "kind": error.kind, "reason": error.what}
        run_dir = self.folder / start["run"]
        with_reserve(run_dir, lambda: self.append(**start | ending | {"event": "end"}))
        with contextlib.suppress(OSError):
            (run_dir / RESERVE_FILE).unlink()

    def seed(self) -> int:
        """Return a random 32-bit seed that no run of this series has used."""
        seed = secrets.randbits(32)
        while seed in self.record.seeds:
            seed = secrets.randbits(32)
        return seed


def run(
    folder: Path,
    selection: Choice,
    identity: dict,
    request: SeriesRequest,
    execute: Execute,
    report: Report,
) -> int:
    """Start runs in `folder`, LOGDIR/<benchmark>, until the request is fulfilled.

    Return the exit code:

    - 0 if enough runs are good and their files were saved as requested
    - 128 + n after signal n
    - the code of this command's first failure if more than `max_failures` runs failed
    - 17 if enough runs are good, but a file such as a model was not saved

    Raise ConfigError if no series can be resumed, and StorageError if the ledger or a run directory
    cannot be written.
    """
    with _open(folder, selection, identity, request) as series:
        try:
            return make_attempts(series, request, execute, report)
        finally:
            record = series.record
            if record.goal > 1 or len(record.starts) > 1:
                not_for_submission = (
                    selection.config.miniature or selection.log_name != f"{selection.stem}.toml"
                )
                print_stderr(*series_closing(folder.name, series.path, record, not_for_submission))


def make_attempts(
    series: SeriesRunner, request: SeriesRequest, execute: Execute, report: Report
) -> int:
    """Start runs until the series has its number of good ones, and return the exit code."""
    record = series.record
    failed: list[int] = []  # exit codes of this command's failures
    unsaved: list[int] = []  # exit codes of good runs that lack a file
    while len(record.good) < record.goal:
        if record.goal > 1:
            counts = (
                f"{len(record.good)} of {record.goal} runs are good, {len(record.failed)} failed"
            )
            print_stderr(f"attempt    {record.next_attempt}; {counts}")
        seed = series.seed() if request.seed is None else request.seed
        run_dir = run_directory.create(series.folder, request.name or series.selection.stem, seed)
        start = series.start(run_dir, seed)
        outcome = _outcome(execute, run_dir, seed)
        series.end(start, outcome)
        report(run_dir)
        for failure in (outcome.error, *outcome.late_errors):
            if isinstance(failure, Interrupted):
                return failure.exit_code
        if outcome.error and record.goal >= SUBMISSION_RUNS:
            needed = runs_still_needed(record.outcomes)
            if needed:
                print_stderr(f"NOTE       {needed}")
        if outcome.error:
            failed.append(outcome.exit_code)
        elif outcome.exit_code:
            unsaved.append(outcome.exit_code)
        if len(failed) > request.max_failures:
            return failed[0]
    try:
        series.append("closed")
    except StorageError as error:
        print_stderr(f"note: the series is complete, but not closed: {error.what}: {error.why}")
    return unsaved[0] if unsaved else 0


def _outcome(execute: Execute, run_dir: Path, seed: int) -> RunOutcome:
    """Execute one run. Turn the launcher's own errors into outcomes, for the ledger.

    An error after the run reached its target is a late one.
    """
    try:
        return execute(run_dir, seed)
    except Exception as error:
        failed = failure_of(error)
        if failed is None:
            traceback.print_exc()
            failed = RunError(
                f"internal error in the launcher: {type(error).__name__}: {error}",
                "the launcher does not handle this failure",
                "report it with the traceback above",
            )
    print_stderr(failed.lines())
    result = diagnosis.read_result(run_dir / "result.txt")
    if result.stands:
        print_stderr(f"do:   ./run_and_time.sh check {shlex.quote(str(run_dir))}")
        return RunOutcome(None, result, late_errors=(failed,))
    diagnosis.write_failure(run_dir, failed, {})
    return RunOutcome(failed, result)


# --- open a series, and lock it -------------------------------------------------------------------


@contextlib.contextmanager
def _open(
    folder: Path, selection: Choice, identity: dict, request: SeriesRequest
) -> Iterator[SeriesRunner]:
    """Start a series, or resume the newest one that lacks runs, and lock it during the block.

    A series of one run is never resumed. Raise ConfigError if there is no series to resume.
    """
    if not request.resume:
        record = ledger.SeriesRecord(
            f"{run_directory.date()}-{secrets.token_hex(3)}",
            request.goal,
            identity,
        )
        run_directory.require_writable(folder)
        with lock_files.owned(folder, ledger.lock_name(record.id)):
            series = SeriesRunner(folder, record, selection)
            series.append("series", started=_now(), goal=record.goal, facts=identity)
            yield series
        return
    unfinished = []
    for record in reversed(ledger.read(folder / ledger.NAME)):
        if record.goal > 1 and _lacks_runs(record, request):
            unfinished.append(record.id)
    launchers = {}
    for name in unfinished:
        with lock_files.owned(folder, ledger.lock_name(name), request.take_over) as launcher:
            # Read again: the ledger may have changed before the lock was acquired.
            records = ledger.read(folder / ledger.NAME)
            record = next(record for record in records if record.id == name)
            if launcher is None and _lacks_runs(record, request):
                yield resume_series(SeriesRunner(folder, record, selection), identity, request)
                return
        if launcher:
            launchers[name] = launcher
    if launchers:
        raise _still_running(launchers)
    raise ConfigError(
        f"nothing to resume in {folder}",
        "its ledger has no unfinished series",
        "start one with NEXP=10",
    )


def _still_running(launchers: dict[str, lock_files.Owner]) -> ConfigError:
    """Return the error for series whose launchers are alive, or silent: series ID -> launcher."""
    name, launcher = next(iter(launchers.items()))
    if not launcher.is_silent:
        return ConfigError(
            f"series {', '.join(launchers)} is still running",
            f"its launcher, {launcher}, is alive",
            "wait for it, or stop it first",
        )
    return ConfigError(
        f"series {name} may still be running",
        f"its launcher, {launcher}, cannot be examined from here; it was last heard of "
        f"{duration(launcher.silent_s)} ago",
        "make sure that it has ended, then repeat the command with --take-over",
    )


def _lacks_runs(record: ledger.SeriesRecord, request: SeriesRequest) -> bool:
    """Return whether the series needs more runs.

    A larger NEXP reopens a closed series. The rules allow more than ten runs: of all windows of ten
    consecutive runs, the one with the median score is submitted (common/records/windows.py).
    """
    return not record.closed or request.goal > record.goal


def resume_series(series: SeriesRunner, identity: dict, request: SeriesRequest) -> SeriesRunner:
    """Prepare `series` for further attempts.

    Raise ConfigError if anything that must stay the same has changed.
    """
    record = series.record
    if not record.identity:
        raise ConfigError(
            f"cannot resume series {record.id}: its first line in {series.path} is damaged",
            "the line has the system, code and configuration of all its runs",
            "restore the line from a copy, or start a new series without --resume",
        )
    changed = [
        f"{key} was {record.identity.get(key)}, now {value}"
        for key, value in identity.items()
        if record.identity.get(key) != value
    ]
    if 0 < request.goal < record.goal:
        changed.append(f"NEXP was {record.goal}, now {request.goal}")
    if changed:
        why = "all runs of a series must have the same system, code and configuration"
        do = "undo the change, or start a new series without --resume"
        raise ConfigError(f"cannot resume series {record.id}: {'; '.join(changed)}", why, do)
    if request.goal > record.goal:
        series.append("goal", goal=request.goal)
    for start in record.open_starts:
        _enter_as_lost(series, start)
    print_stderr(
        f"series     {record.id} resumed after {plural(len(record.ends), 'attempt')}, "
        f"{len(record.good)} of {record.goal} good"
    )
    return series


def _enter_as_lost(series: SeriesRunner, start: dict) -> None:
    """End the attempt that began with line `start`, whose launcher was killed.

    If its log has a result, the attempt is good all the same. Otherwise it is lost.
    """
    run_dir = series.folder / start["run"]
    supervise.kill_processes_of(run_dir, grace_s=supervise.GRACE_S)
    what = f"attempt {start['attempt']}: its launcher ended without an entry in the ledger"
    why = "it was killed, or the machine went down"
    result = diagnosis.read_result(run_dir / "result.txt")
    if result.stands:
        do = f"check its log, which has not been checked: ./run_and_time.sh check {shown(run_dir)}"
        series.end(start, RunOutcome(None, result, late_errors=(RankLost(what, why, do),)))
        return
    do = "nothing to do: the series continues without this run, whose directory is kept"
    lost = RankLost(what, why, do)
    lost.kind = run_states.LOST
    if run_dir.is_dir():
        diagnosis.write_failure(run_dir, lost, {})
    series.end(start, RunOutcome(lost, result))


def _now() -> str:
    return time.strftime(ledger.TIME, time.gmtime())
