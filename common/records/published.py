"""Published MLPerf Training results, and why the times of two results differ.

The time of a series is T = S/r + n*e + rest. S is the number of sequences to the target, r the
sequences per second, and n the number of evaluations of e seconds. All are means over the eight
runs that count. The rest is the remaining time (a slow first block, pauses). The difference from a
series 0 is split by logarithmic means (LMDI-I; Ang, Energy Policy 33 (2005) 867),
L(a, b) = (a - b) / ln(a / b), L(a, a) = a:

  throughput   L(S/r, S0/r0) * ln(r0/r)
  samples      L(S/r, S0/r0) * ln(S/S0) + L(n*e, n0*e0) * ln(n/n0)
               randomness of the seeds; and the global batch, if it differs
  evaluation   L(n*e, n0*e0) * ln(e/e0)
  rest         rest - rest0

These terms are minutes and add up to T - T0. Each divided by L(T, T0) is the logarithm of a factor,
and the product of the factors is T/T0. No order of the terms is preferred, and exchanging the
series only changes the signs. A score is the minutes times the RCP factor f. The factor contributes
(f - 1) * T - (f0 - 1) * T0 minutes, and f/f0.

The results are in published.json, which `python3 -m tests.tools.survey --round R` creates from a
repository of results. Its "sources" name the source of each round. Standard library only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Pace:
    """The quantities that make up the time of a series, as means over the eight runs that count."""

    minutes: float  # run_start to run_stop, without the RCP factor
    samples: float  # training sequences to the target
    samples_per_s: float  # of all GPUs, over all training blocks except each run's first
    evaluations: float | None  # per run; None if evaluations are not timed
    evaluation_s: float | None  # seconds of one evaluation

    @property
    def training_minutes(self) -> float:
        return self.samples / self.samples_per_s / 60

    @property
    def evaluation_minutes(self) -> float:
        return (self.evaluations or 0.0) * (self.evaluation_s or 0.0) / 60


@dataclass(frozen=True)
class Published:
    """A result: a row of published.json, whose columns have these names, or a local series."""

    round: str  # such as 5.1; "" for a local series
    benchmark: str
    gpu: str | None  # for example H200; None if unknown
    gpus: int | None
    submitter: str  # the organization's directory in the results
    system: str  # the directory below it, or the name of a local series
    batch: int | None
    runs: int  # number of runs read: 10, or 1 if only one log could be read
    # minutes times the RCP factor; None if the series is not a valid result or has only one log
    score: float | None
    minutes: float | None  # without the factor; None if no run converged
    samples: float | None  # to the target, counted after the optimizer step
    samples_per_s: float | None
    evaluations: float | None  # per run
    evaluation_s: float | None

    @property
    def pace(self) -> Pace | None:
        """Pace of the result, or None if its logs do not contain it."""
        if self.minutes is None or self.samples is None or self.samples_per_s is None:
            return None
        return Pace(
            self.minutes, self.samples, self.samples_per_s, self.evaluations, self.evaluation_s
        )

    @property
    def name(self) -> str:
        """Name for display, such as "v5.1 <submitter> <system>"."""
        return f"v{self.round} {self.submitter} {self.system}" if self.round else self.system

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key of results, best first. Results without a score come last."""
        return self.score is None, self.score or self.minutes or math.inf


def load(path: Path = DATA) -> tuple[Published, ...]:
    """Return the rows of published.json."""
    table = json.loads(path.read_text())
    results = []
    for row in table["rows"]:
        values = dict(zip(table["columns"], row, strict=True))
        results.append(Published(**values))
    return tuple(results)


RESULTS = load()


@dataclass(frozen=True)
class TimePart:
    """One cause of the difference between two series, in minutes and as a factor on the time.

    Minutes below 0 and factors below 1 mean faster.
    """

    name: str
    minutes: float
    factor: float


def split(ours: Pace, theirs: Pace) -> list[TimePart]:
    """Split `ours.minutes - theirs.minutes` into its causes.

    The sum of the minutes and the product of the factors are exact.
    """
    training = _logarithmic_mean(ours.training_minutes, theirs.training_minutes)
    minutes = {
        "throughput": training * math.log(theirs.samples_per_s / ours.samples_per_s),
        "samples to the target": training * math.log(ours.samples / theirs.samples),
    }
    if _timed(ours) and _timed(theirs):
        evaluating = _logarithmic_mean(ours.evaluation_minutes, theirs.evaluation_minutes)
        change = math.log(ours.evaluation_minutes / theirs.evaluation_minutes)
        more = math.log(ours.evaluations / theirs.evaluations)  # type: ignore[operator]
        minutes["samples to the target"] += evaluating * more
        minutes["time per evaluation"] = evaluating * (change - more)
        name = "other"
    else:
        name = "evaluation and other"
    minutes[name] = ours.minutes - theirs.minutes - sum(minutes.values())
    whole = _logarithmic_mean(ours.minutes, theirs.minutes)
    return [TimePart(name, part, math.exp(part / whole)) for name, part in minutes.items()]


def _timed(pace: Pace) -> bool:
    return bool(pace.evaluations and pace.evaluation_s)


def _logarithmic_mean(a: float, b: float) -> float:
    relative = (a - b) / b
    return a if abs(relative) < 1e-12 else (a - b) / math.log1p(relative)


def published(benchmark: str, gpu: str | None = None, gpus: int | None = None) -> list[Published]:
    """Return the published results for this GPU kind (and number of GPUs, if given), best first."""
    rows = [
        row
        for row in RESULTS
        if row.benchmark == benchmark and gpu in (None, row.gpu) and gpus in (None, row.gpus)
    ]
    return sorted(rows, key=lambda row: row.rank)
