"""A series of runs: one attempt after the other until there are enough good ones, every one of them in the ledger.

Good is a run that reached its target and whose log is clean. A failed attempt stays where it is, and the next one starts, in a
directory of its own and with a seed of its own, until there were more than `max_failures` failures (those of one command count, so
that --resume starts with none). SIGINT, SIGTERM and SIGHUP end the series; --resume goes on with it, as after a launcher that was
killed itself: its last attempt is then entered as lost, and never counted as good, whatever its log says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError, Interrupted, RankLost, RunError, StorageError
from launch import rundir, supervise, verdict
from launch.choose import Choice
from launch.screen import series_closing, tell
from records import ledger

MAX_FAILURES = 2


@dataclass(frozen=True)
class Wish:
    """What NEXP, SEED, --max-failures and --resume ask for."""

    goal: int  # good runs
    max_failures: int
    seed: int | None = None  # fixed, for a single run that nobody wants to submit
    resume: bool = False


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended; `error` is None for a good run."""

    error: RunError | None
    result: verdict.Result = field(default_factory=verdict.Result)
    cache: str = ""


Execute = Callable[[Path, int], Outcome]  # run directory, seed


def wish(environment: Mapping[str, str], max_failures: int | None, resume: bool) -> Wish:
    """Raises ConfigError for values that are none, or that do not fit each other."""
    count, seed = environment.get("NEXP") or ("0" if resume else "1"), environment.get("SEED", "")
    if not count.isdigit() or (int(count) < 1 and not resume):
        raise ConfigError(f"NEXP={count} is not a number of runs", "it must be 1 or more", "correct or unset it")
    if max_failures is not None and max_failures < 0:
        raise ConfigError(f"--max-failures {max_failures} is not a number of runs", "it must be 0 or more", "correct it or leave it out")
    patience = max_failures if max_failures is not None else 0 if count == "1" else MAX_FAILURES
    if not seed:
        return Wish(int(count), patience, None, resume)
    if not seed.isdigit() or int(seed) >= 2**32:
        raise ConfigError(f"SEED={seed} is not a seed", "it must be from 0 to 2^32 - 1", "correct it, or unset it for a random one")
    if int(count) != 1 or patience or resume:
        why = "every run of a series needs its own seed from the system's randomness: a series with chosen seeds is no submission"
        raise ConfigError(f"SEED={seed} is for a single run only", why, "unset SEED; or leave out NEXP, --max-failures and --resume")
    return Wish(1, 0, int(seed))


def facts_of(choice: Choice, data_dir: Path, commit: str | None, root: Path, benchmark: str) -> dict:
    """What must stay the same within a series: system, code and configuration, as the rules ask (Benchmark Results)."""
    return {
        "config": choice.log_name,
        "config_sha256": hashlib.sha256(choice.config.as_toml().encode()).hexdigest(),
        "device": choice.device,
        "gpus": choice.found,
        "data": str(data_dir),
        "commit": commit,
        "code_sha256": _digest(root, ("common", "launch", benchmark)),  # sees what no commit shows: changes that are not committed
    }


def _digest(root: Path, packages: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for name in packages for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class Series:
    """One series in its ledger, with what is needed for the next attempt."""

    def __init__(self, folder: Path, record: ledger.Record, choice: Choice):
        self.folder, self.record, self.choice = folder, record, choice
        self.path = folder / ledger.NAME

    def append(self, event: str, **line) -> dict:
        full = {"event": event, "series": self.record.id, **line}
        ledger.append(self.path, full)
        return full

    def start(self, number: int, run_dir: Path, seed: int) -> dict:
        modified = self.choice.log_name != self.choice.path.name
        about = {"config": self.choice.log_name, "modified": modified, "commit": self.record.facts["commit"]}
        line = self.append("start", attempt=number, run=run_dir.name, seed=seed, started=_now(), **about)
        self.record.starts[number] = line
        return line

    def end(self, start: dict, outcome: Outcome) -> None:
        error, result = outcome.error, outcome.result
        line = start | {
            "event": "end",
            "exit_code": error.exit_code if error else 0,
            "kind": error.kind if error else "success",
            "reason": error.what if error else "",
            "minutes": None if result.seconds is None else round(result.seconds / 60, 6),
            "samples": result.samples,
            "cache": outcome.cache,
        }
        ledger.append(self.path, line)
        self.record.ends[start["attempt"]] = line

    def seed(self) -> int:
        """32 bits of the system's randomness that no run of this series has had."""
        while (seed := secrets.randbits(32)) in self.record.seeds:
            pass
        return seed


def run(log_dir: Path, benchmark: str, choice: Choice, facts: dict, wished: Wish, execute: Execute) -> int:
    """Attempts until the wish is fulfilled. 0 with all good runs, else the code of the first failure, or 128 + n after signal n.

    Raises ConfigError if there is nothing that can be resumed, StorageError if the ledger or a run directory cannot be written.
    """
    folder = log_dir / benchmark
    with _opened(folder, choice, facts, wished) as series:
        try:
            code = _attempts(series, log_dir, benchmark, wished, execute)
        finally:
            record = series.record
            if record.goal > 1 or len(record.starts) > 1:
                tell(*series_closing(benchmark, series.path, record, choice.config.miniature or choice.log_name != choice.path.name))
        return code


def _attempts(series: Series, log_dir: Path, benchmark: str, wished: Wish, execute: Execute) -> int:
    record = series.record
    failed: list[int] = []  # exit codes of this command's failures
    while len(record.good) < record.goal:
        number = max(record.starts, default=0) + 1
        if record.goal > 1:
            tell(f"attempt    {number}; {len(record.good)} of {record.goal} runs are good, {len(record.failed)} failed")
        seed = series.seed() if wished.seed is None else wished.seed
        run_dir = rundir.create(log_dir, benchmark, series.choice.path.stem, seed)
        start = series.start(number, run_dir, seed)
        outcome = _outcome(execute, run_dir, seed)
        series.end(start, outcome)
        if isinstance(outcome.error, Interrupted):
            return outcome.error.exit_code
        failed += [outcome.error.exit_code] if outcome.error else []
        if len(failed) > wished.max_failures:
            return failed[0]
    series.append("closed")
    record.closed = True
    return 0


def _outcome(execute: Execute, run_dir: Path, seed: int) -> Outcome:
    """Whatever happens in the launcher itself during an attempt belongs in its line of the ledger, too."""
    try:
        return execute(run_dir, seed)
    except RunError as error:
        failed = error
    except OSError as error:
        failed = StorageError(f"the launcher could not write: {error}", "the disk, or stdout's reader, took no more", "free space")
    tell(failed.lines())
    verdict.write_failure(run_dir, failed, {})
    return Outcome(failed, verdict.read_result(run_dir / "result.txt"))


# --- one series, found or begun, and nobody else's --------------------------------------------------------------------


@contextlib.contextmanager
def _opened(folder: Path, choice: Choice, facts: dict, wished: Wish) -> Iterator[Series]:
    records = ledger.read(folder / ledger.NAME) if wished.resume else []
    busy = []
    for name in [record.id for record in reversed(records) if record.goal > 1 and _lacks_runs(record, wished)]:
        with _held(folder, name) as mine:
            record = next(record for record in ledger.read(folder / ledger.NAME) if record.id == name)  # as it is now that we hold it
            if mine and _lacks_runs(record, wished):
                yield _resumed(Series(folder, record, choice), facts, wished)
                return
        busy += [name] if not mine else []
    if busy:
        raise ConfigError(f"series {', '.join(busy)} is still running", "its launcher is alive", "wait for it, or stop it first")
    if wished.resume:
        raise ConfigError(f"nothing to resume in {folder}", "its ledger has no series that lacks good runs", "start one with NEXP=10")
    record = ledger.Record(f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}", wished.goal, facts)
    rundir.require_writable(folder)
    with _held(folder, record.id):
        series = Series(folder, record, choice)
        series.append("series", started=_now(), goal=record.goal, facts=facts)
        yield series


@contextlib.contextmanager
def _held(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock of the series `name`; False if its launcher lives. A killed one leaves the file behind, but not the lock."""
    path = folder / f"series_{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", "two launchers must not share a series", "set LOGDIR") from None
    # A launcher that ends takes its file away: what we opened must still be what stands there.
    mine = ledger.lock(descriptor, wait=False) and path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino
    try:
        yield mine
    finally:
        if mine:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _lacks_runs(record: ledger.Record, wished: Wish) -> bool:
    """A larger NEXP opens a finished series again: one may run more than ten and submit the median window."""
    return not record.closed or wished.goal > record.goal


def _resumed(series: Series, facts: dict, wished: Wish) -> Series:
    """Raises ConfigError if anything that must stay the same has changed."""
    record = series.record
    changed = [f"{key} was {record.facts.get(key)}, now {value}" for key, value in facts.items() if record.facts.get(key) != value]
    if 0 < wished.goal < record.goal:
        changed.append(f"NEXP was {record.goal}, now {wished.goal}")
    if changed:
        why = "the runs of a series must be of the same system, code and configuration"
        raise ConfigError(f"series {record.id} cannot go on: {'; '.join(changed)}", why, "undo that, or start anew without --resume")
    if wished.goal > record.goal:
        series.append("goal", goal=wished.goal)
        record.goal, record.closed = wished.goal, False
    for start in record.open_starts:
        _enter_as_lost(series, start)
    tell(f"series     {record.id} goes on after {len(record.ends)} attempts, {len(record.good)} of {record.goal} good")
    return series


def _enter_as_lost(series: Series, start: dict) -> None:
    run_dir = series.folder / start["run"]
    supervise.end_processes_of(run_dir)
    why = "it was killed, or the machine went down; what the run directory holds stays there"
    lost = RankLost(f"attempt {start['attempt']}: its launcher ended without saying how", why, "nothing: the series goes on without it")
    lost.kind = "lost"
    if run_dir.is_dir():
        verdict.write_failure(run_dir, lost, {})
    series.end(start, Outcome(lost, verdict.read_result(run_dir / "result.txt")))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
