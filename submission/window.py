"""Which ten attempts of a series are submitted: consecutive ones, and where there is a choice, the median.

The rules (MLPerf Training rules, "Benchmark Results", "Scoring"): the ten results must be independent and not picked; a group of
M > 10 may be run and the median window of ten consecutive ones submitted; one of the ten may have missed the target.
So every attempt that started its clock counts. One that left no run_stop has no result that could be submitted, and a window
that would leap over it is none: a run killed because it converges slowly must not vanish. One that failed before run_start
(no data, no GPU) was no run and is passed over. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckFailed, ConfigError
from records import ledger, rcp
from submission.log import Log, read

RUNS = rcp.SUBMISSION_RUNS
GOOD, MISSED, NOT_STARTED, LOST, UNCLEAN = "good", "missed the target", "never started its clock", "left no run_stop", "not clean"


@dataclass(frozen=True)
class Attempt:
    """One line of the ledger, and the log that belongs to it."""

    number: int
    run_dir: Path
    start: dict  # the ledger's lines
    end: dict
    log: Log
    state: str  # one of the five above

    @property
    def path(self) -> Path:
        return self.run_dir / "result.txt"

    @property
    def minutes(self) -> float:
        """run_start to run_stop by the log; infinite for a run that does not count."""
        start, stop = self.log.first("run_start"), self.log.first("run_stop")
        return (stop.time_ms - start.time_ms) / 60_000 if self.state == GOOD and start and stop else math.inf

    @property
    def samples(self) -> float:
        """Training sequences to the target, as the RCP checker takes them."""
        evaluations = self.log.all("eval_accuracy")
        count = evaluations[-1].samples if self.state == GOOD and evaluations else None
        return count if type(count) is int else rcp.NOT_CONVERGED

    def describe(self) -> str:
        result = f"{self.minutes:.2f} min, {self.samples:,.0f} samples" if self.state == GOOD else self.end.get("reason") or ""
        return f"attempt {self.number:>2}  {self.state}{', ' if result else ''}{result}"


@dataclass(frozen=True)
class Window:
    attempts: tuple[Attempt, ...]
    score: float  # minutes: olympic mean, with the RCP factor
    passes_rcp: bool

    @property
    def first(self) -> int:
        return self.attempts[0].number

    @property
    def missed(self) -> int:
        return sum(attempt.state == MISSED for attempt in self.attempts)

    def describe(self) -> str:
        rcp_text = "" if self.passes_rcp else ", fails the RCP test"
        return f"attempts {self.first} to {self.attempts[-1].number}: {self.score:.4f} min{rcp_text}"


def find_series(folder: Path, benchmark: str, series: str = "") -> tuple[Path, ledger.Record]:
    """Directory of the runs, and the series: the one named (its id, or how it begins), else the newest that wanted ten runs.

    `folder` is LOGDIR or LOGDIR/<benchmark>. Raises ConfigError if there is no such series.
    """
    for place in (folder, folder / benchmark):
        if (place / ledger.NAME).is_file():
            records = ledger.read(place / ledger.NAME)
            break
    else:
        raise ConfigError(f"{folder}: no series of {benchmark}", f"there is no {ledger.NAME} in it", "name the LOGDIR of the series")
    fitting = [record for record in records if record.id.startswith(series) and (series or record.goal >= RUNS)]
    if fitting and (not series or len(fitting) == 1):
        return place, fitting[-1]
    known = ", ".join(f"{record.id} ({record.goal} wanted)" for record in records) or "none"
    wanted = f"series {series} is not one of them" if series else f"none was started with NEXP={RUNS} or more"
    raise ConfigError(f"{place}: no series of ten runs", f"{wanted}; there are: {known}", f"run NEXP={RUNS}, or name one with --series")


def attempts_of(place: Path, record: ledger.Record) -> list[Attempt]:
    """All attempts of the series in their order, each with its state."""
    return [_attempt(place, start, record.ends.get(number, {})) for number, start in sorted(record.starts.items())]


def _attempt(place: Path, start: dict, end: dict) -> Attempt:
    run_dir = place / str(start.get("run", ""))
    path = run_dir / "result.txt"
    log = read(path) if path.is_file() and path.stat().st_size else Log()
    return Attempt(start["attempt"], run_dir, start, end, log, _state(log, end))


def attempts_without_ledger(folder: Path) -> list[Attempt]:
    """Every directory of a run in `folder`, by name; good is then what ended with success by its own log."""
    attempts = []
    for number, path in enumerate(sorted(folder.glob("*/result.txt")), start=1):
        log = read(path)
        stop = log.first("run_stop")
        end = {"exit_code": 0 if stop and stop.metadata.get("status") == "success" else 1}
        attempts.append(Attempt(number, path.parent, {"seed": log.value("seed")}, end, log, _state(log, end)))
    return attempts


def _state(log: Log, end: dict) -> str:
    stop = log.first("run_stop")
    if not log.first("run_start"):
        return NOT_STARTED if end and end.get("kind") != "lost" else LOST
    if not stop or not end or end.get("kind") == "lost":
        return LOST
    if end.get("exit_code") == 0:
        return GOOD
    return MISSED if stop.metadata.get("status") == "aborted" else UNCLEAN


def windows(attempts: list[Attempt], benchmark: str) -> list[Window]:
    """All that could be submitted. `attempts`: of one series, in their order."""
    runs = [attempt for attempt in attempts if attempt.state != NOT_STARTED]
    slices = [tuple(runs[index : index + RUNS]) for index in range(len(runs) - RUNS + 1)]
    return [_window(part, benchmark) for part in slices if _may_be_submitted(part)]


def _may_be_submitted(part: tuple[Attempt, ...]) -> bool:
    states = [attempt.state for attempt in part]
    return states.count(GOOD) >= RUNS - 1 and states.count(GOOD) + states.count(MISSED) == RUNS


def _window(part: tuple[Attempt, ...], benchmark: str) -> Window:
    batch = part[0].log.number("global_batch_size")
    verdict = rcp.judge(benchmark, int(batch or 0), [attempt.samples for attempt in part])
    return Window(part, rcp.trimmed_mean([attempt.minutes for attempt in part]) * verdict.factor, verdict.passed)


def choose(found: list[Window], attempts: list[Attempt], wish: str) -> Window:
    """`wish`: `median` (of two in the middle the slower), `first`, or the number of the attempt that a window begins with.

    Raises CheckFailed if no ten consecutive attempts can be submitted, ConfigError for a window that is none.
    """
    if not found:
        listing = "; ".join(attempt.describe() for attempt in attempts if attempt.state != GOOD) or f"there are {len(attempts)} attempts"
        what = f"no {RUNS} consecutive attempts can be submitted: {sum(a.state == GOOD for a in attempts)} of {len(attempts)} are good"
        why = f"at most one of ten may have missed the target, and none may be left out; {listing}"
        raise CheckFailed(what, why, "run more: NEXP with --resume, or a new series")
    if wish == "first":
        return found[0]
    if wish == "median":
        return sorted(found, key=lambda window: window.score)[len(found) // 2]
    match = [window for window in found if str(window.first) == wish]
    if not match:
        starts = ", ".join(str(window.first) for window in found)
        raise ConfigError(f"--window {wish}", f"windows that can be submitted begin with attempt {starts}", "choose one, or median")
    return match[0]
