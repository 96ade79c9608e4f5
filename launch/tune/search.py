"""Search for the fastest config, with a journal of all measurements.

A round compares a few candidates. It measures all of them for a short time, and then the fastest
third for a longer time, if they are close (successive halving, Jamieson and Talwalkar,
arXiv:1502.07943). The first round compares the base config with the recommended value of every
setting, and the second one the memory candidates. Each further round compares the values of one
setting.

The search depends only on the measurements, so it can resume after a kill: it does not repeat
measurements that are in the journal.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import RunConfig
from common.errors import StorageError
from common.records import json_lines
from launch.tune.candidates import Changes, Value, reduced

JOURNAL = "journal.jsonl"
SECONDS = {"short": 6.0, "long": 20.0}  # of timed steps in a short and in a long measurement
STEPS = range(2, 40)  # smallest and largest number of timed steps, both included
FIRST_STEPS = 2  # timed steps of the first measurement, before the time of a step is known
MEMORY_SHARE = 0.5  # share of the time, after which no further memory candidate is tried
KEPT_SHARE = 1 / 3  # share of a round's candidates that get a long measurement; at least 2
# A candidate gets a long measurement only if its step takes at most this many times as long as the
# fastest one's.
CLOSE = 1.05
# Another candidate replaces the best one only if its step takes at most this share of the time.
GAIN = 0.998
# A measurement is stopped after this time, or after three times the longest one that succeeded if
# that is more. Until one has succeeded, the limit is a third of the time for the search.
LEAST_LIMIT_S = 60.0


class OutOfTime(Exception):
    """The time for the search has run out."""


@dataclass(frozen=True)
class Measurement:
    """Result of one bench."""

    changes: Changes
    length: str  # "short" or "long"
    outcome: str  # "done", "stopped", or the kind of the failure
    seconds: float  # of the whole bench, including the start of its processes
    times_ms: tuple[float, ...] = ()  # of each timed step
    peak_bytes: int = 0  # largest of all ranks; 0 on a CPU
    error: Mapping[str, object] | None = None

    @property
    def step_ms(self) -> float:
        """Median of the steps; infinite for a failure."""
        return statistics.median(self.times_ms) if self.times_ms else math.inf


# Function that measures a candidate: measure(changes, length, steps, stop). It calls `stop` with
# the seconds that it has run. If `stop` returns True, it ends early with the outcome "stopped".
Measure = Callable[[Changes, str, int, Callable[[float], bool]], Measurement]


class Journal:
    """The measurements of a search, written as JSON lines to a file in `folder`.

    `identity`: what must be equal to resume the search (config, commit, ...).
    """

    def __init__(self, folder: Path):
        self.path = folder / JOURNAL
        lines, _ = json_lines.read(self.path)
        self.identity = next((line for line in lines if "changes" not in line), {})
        # time.time() of its start, which earlier versions did not write
        self.started = self.identity.pop("started", 0.0)
        self.measurements = [_from_line(line) for line in lines if "changes" in line]

    def begin(self, identity: dict) -> None:
        """Write `identity` and the present time as the first line."""
        self.identity = identity
        self.started = time.time()
        self._append(identity | {"started": self.started})

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._append(dict(vars(measurement)))

    def find(self, changes: Changes, length: str) -> Measurement | None:
        """Return the newest measurement of `changes` with this length, None if there is none."""
        for each in reversed(self.measurements):
            if each.changes == changes and each.length == length:
                return each
        return None

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.measurements)

    def _append(self, line: dict) -> None:
        """Append `line` to the file. Raises StorageError."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if not _ends_with_newline(self.path):  # a line that a kill cut off
                    json_lines.append(descriptor, b"\n")
                json_lines.append_line(descriptor, line, sync=True)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written",
                error.strerror or str(error),
                "free space or correct the permissions, then continue with --resume",
            ) from None


def _ends_with_newline(path: Path) -> bool:
    return path.read_bytes()[-1:] in (b"", b"\n")


def _from_line(line: dict) -> Measurement:
    return Measurement(**line | {"times_ms": tuple(line["times_ms"])})


class Search:
    """The search for the fastest config, among candidates that are changes of `base`.

    `measure`: see Measure.
    `budget_s`: seconds for all measurements, including those already in the journal.
    `show`: called during and after each measurement with the seconds spent.
    `on_result`: called after each measurement.
    """

    def __init__(
        self,
        base: RunConfig,
        journal: Journal,
        measure: Measure,
        budget_s: float,
        show: Callable[[float], None] = lambda seconds: None,
        on_result: Callable[[Measurement], None] = lambda measurement: None,
    ):
        self.base = base
        self.journal = journal
        self.measure = measure
        self.budget_s = budget_s
        self.show = show
        self.on_result = on_result
        self.best: Changes = {}

    def run(
        self, memory_candidates: Sequence[Changes], settings: Mapping[str, Sequence[Value]]
    ) -> bool:
        """Search, and set `best`. Return False if the time ran out before the search was finished.

        `settings`: setting -> values to try, the recommended one first.
        """
        recommended = {name: values[0] for name, values in settings.items()}
        try:
            self.best = self._round([self._with(recommended), {}])
            self.best = self._round(
                [self.best, *map(self._with, memory_candidates)],
                until_s=MEMORY_SHARE * self.budget_s,
            )
            for name, values in settings.items():
                variants = [self._with({name: value}) for value in values]
                self.best = self._round([self.best, *variants])
            self._measured(self.best, "long")
            if self._measured({}, "short").outcome == "done":
                self._measured({}, "long")
        except OutOfTime:
            self.best = self._fastest()
            return False
        return True

    def _with(self, changes: Mapping[str, Value]) -> Changes:
        """Return the best candidate with further changes."""
        return reduced(self.base, {**self.best, **changes})

    def _round(self, candidates: Sequence[Changes], until_s: float = math.inf) -> Changes:
        """Return the fastest candidate, or the first one if no other one is faster by GAIN.

        No further candidate is tried once the search has taken `until_s` seconds.
        """
        tried: list[Measurement] = []
        for changes in candidates:
            if any(changes == each.changes for each in tried):
                continue
            is_known = self.journal.find(changes, "short") is not None
            if len(tried) >= 2 and self.journal.seconds >= until_s and not is_known:
                break
            tried.append(self._measured(changes, "short"))
        tried.sort(key=lambda each: each.step_ms)
        kept = tried[: max(2, math.ceil(KEPT_SHARE * len(tried)))]
        worst = CLOSE * kept[0].step_ms
        close = [each for each in kept if each.outcome == "done" and each.step_ms <= worst]
        if len(close) == 1:
            return close[0].changes
        final = [self._measured(each.changes, "long") for each in close]
        first = next((each for each in final if each.changes == candidates[0]), None)
        fastest = min(final, key=lambda each: each.step_ms, default=None)
        if fastest is None:
            return candidates[0]
        if first is not None and fastest.step_ms > GAIN * first.step_ms:
            return candidates[0]
        return fastest.changes

    def _measured(self, changes: Changes, length: str) -> Measurement:
        """Return the measurement in the journal, or measure and add it. Raises OutOfTime.

        A measurement that was stopped at a shorter limit is repeated.
        """
        limit_s = self._limit_s()
        known = self.journal.find(changes, length)
        if known and not (known.outcome == "stopped" and known.seconds < limit_s):
            return known
        spent_s = self.journal.seconds
        if spent_s >= self.budget_s:
            raise OutOfTime

        def stop(seconds: float) -> bool:
            self.show(spent_s + seconds)
            return seconds > limit_s or spent_s + seconds > self.budget_s

        began = time.monotonic()
        measurement = self.measure(changes, length, self._steps(length), stop)
        if measurement.outcome == "stopped" and (
            spent_s + time.monotonic() - began > self.budget_s
        ):
            raise OutOfTime
        self.journal.add(measurement)
        self.show(self.journal.seconds)
        self.on_result(measurement)
        return measurement

    def _limit_s(self) -> float:
        """Return the seconds after which a measurement is stopped."""
        done = self._done()
        if not done:
            return self.budget_s / 3
        return max(LEAST_LIMIT_S, 3 * max(each.seconds for each in done))

    def _steps(self, length: str) -> int:
        """Return the number of timed steps that take SECONDS, by the first measurement."""
        first = next(iter(self._done()), None)
        if first is None:
            return FIRST_STEPS
        steps = math.ceil(1e3 * SECONDS[length] / first.step_ms)
        return min(max(steps, STEPS.start), STEPS.stop)

    def _done(self) -> list[Measurement]:
        return [each for each in self.journal.measurements if each.outcome == "done"]

    def _fastest(self) -> Changes:
        """Return the fastest candidate if `best` takes more than CLOSE times as long, else `best`.

        It may come from the unfinished round. Only short measurements are compared.
        """
        short = [each for each in self._done() if each.length == "short"]
        fastest = min(short, key=lambda each: each.step_ms, default=None)
        best = self.journal.find(self.best, "short")
        if fastest is None or (best is not None and best.step_ms <= CLOSE * fastest.step_ms):
            return self.best
        return fastest.changes


def best_of(journal: Journal, changes: Changes) -> Measurement | None:
    """Return the longest successful measurement of `changes`, None if there is none."""
    for length in ("long", "short"):
        measurement = journal.find(changes, length)
        if measurement is not None and measurement.outcome == "done":
            return measurement
    return None


def text_of(changes: Mapping[str, Value]) -> str:
    """Describe changes in one line: "micro_batch_size=2, NCCL_MAX_NCHANNELS unset"."""
    parts = []
    for name, value in changes.items():
        parts.append(f"{name} unset" if value is None else f"{name}={value}")
    return ", ".join(parts) or "the base config"


def text_of_value(value: Value) -> str:
    return "unset" if value is None else str(value)


def as_json(identity: Mapping[str, object]) -> str:
    """Return `identity` as a text that is the same before and after a round trip through JSON."""
    return json.dumps(identity, sort_keys=True)
