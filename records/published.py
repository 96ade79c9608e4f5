"""The published MLPerf Training v5.1 results of the GPUs we run on, and what a difference to one of them is made of.

The minutes of a series are T = S/r + n*e + rest, as means over the eight runs that count: S sequences to the target, r sequences
per second, n evaluations of e seconds; the rest is what remains (a slow first block, pauses). Against a series 0 the difference
is split by logarithmic means (LMDI-I; Ang, Energy Policy 33 (2005) 867), L(a, b) = (a - b) / ln(a / b), L(a, a) = a:

  throughput   L(S/r, S0/r0) * ln(r0/r)
  samples      L(S/r, S0/r0) * ln(S/S0) + L(n*e, n0*e0) * ln(n/n0)    luck of the seeds; and the global batch, if it differs
  evaluation   L(n*e, n0*e0) * ln(e/e0)
  rest         rest - rest0

These are minutes and add up to T - T0. Each divided by L(T, T0) is the logarithm of a factor, and the factors multiply to T/T0.
No order of the terms is preferred, and exchanging the series only turns the signs. The RCP factor f leads from minutes to score:
its line is (f - 1) * T - (f0 - 1) * T0 minutes, and f/f0.
Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from submission.runs import CLOSED


@dataclass(frozen=True)
class Pace:
    """What the minutes of a series are made of, as means over the eight runs that count."""

    minutes: float  # run_start to run_stop, without the RCP factor
    samples: float  # training sequences to the target
    samples_per_s: float  # of the whole system, over training blocks without each run's first one
    evaluations: float | None  # per run; None where evaluations are not timed
    evaluation_s: float | None  # of one

    @property
    def training_minutes(self) -> float:
        return self.samples / self.samples_per_s / 60

    @property
    def evaluation_minutes(self) -> float:
        return (self.evaluations or 0.0) * (self.evaluation_s or 0.0) / 60


@dataclass(frozen=True)
class Published:
    """One result of the round v5.1."""

    benchmark: str
    gpu: str
    gpus: int
    submitter: str
    batch: int
    score: float  # minutes, with the RCP factor
    minutes: float  # without it
    samples: float | None  # to the target, mean of the eight runs that count; counted after the optimizer step
    samples_per_s: float
    evaluation_s: float

    @property
    def pace(self) -> Pace:
        """Only where the samples are known."""
        assert self.samples is not None
        rules = CLOSED[self.benchmark]
        first, interval = rules.first_evaluation(self.batch), rules.eval_interval(self.batch)
        return Pace(self.minutes, self.samples, self.samples_per_s, (self.samples - first) / interval + 1, self.evaluation_s)

    @property
    def factor(self) -> float:
        return self.score / self.minutes


# Source: the result logs of mlcommons/training_results_v5.1 (<submitter>/results/...) and the scaling.json beside them, read with
# a parser of our own. samples/s: sequences per second over all training blocks but each run's first, which starts cold.
# Samples: from the logs' counts for AMD GPUs, which the 8B logs give one optimizer step short and this table does not; for LoRA on
# H200, RCP mean 3,178.67 / factor; not known for the 64 GPUs. All reached the target ten times out of ten.
_8B, _LORA = "llama31_8b", "llama2_70b_lora"
RESULTS = (
    #         benchmark, GPU, GPUs, submitter, batch, score, minutes, samples, samples/s, evaluation s
    Published(_8B, "MI355X", 8, "AMD", 32, 99.709, 99.310, 178_176, 30.679, 9.88),
    Published(_8B, "MI355X", 8, "Supermicro", 32, 103.559, 103.559, 179_712, 29.705, 10.61),
    Published(_8B, "MI355X", 8, "GigaComputing", 32, 105.667, 105.667, 179_712, 29.094, 10.73),
    Published(_8B, "MI355X", 8, "Dell", 32, 107.462, 107.462, 184_320, 29.349, 10.62),
    Published(_8B, "MI350X", 8, "AMD", 32, 122.929, 122.438, 178_176, 24.904, 12.36),
    Published(_8B, "MI350X", 8, "Cisco", 32, 127.625, 127.625, 179_712, 24.094, 13.11),
    Published(_8B, "H200", 64, "HPE", 32, 37.753, 37.753, None, 90.41, 2.86),
    Published(_LORA, "MI355X", 8, "AMD", 8, 10.185, 10.151, 3168, 5.876, 12.23),
    Published(_LORA, "MI355X", 8, "Supermicro", 8, 10.244, 10.210, 3168, 5.858, 12.38),
    Published(_LORA, "MI355X", 8, "Dell", 8, 10.274, 10.239, 3168, 5.826, 12.35),
    Published(_LORA, "MI355X", 8, "GigaComputing", 8, 10.416, 10.224, 3120, 5.751, 12.52),
    Published(_LORA, "MI350X", 8, "AMD", 8, 12.231, 12.190, 3168, 4.876, 14.69),
    Published(_LORA, "MI350X", 8, "Cisco", 8, 12.502, 12.272, 3120, 4.790, 15.22),
    Published(_LORA, "MI325X", 8, "MangoBoost", 8, 20.738, 20.042, 3072, 2.878, 25.89),
    Published(_LORA, "MI325X", 8, "MiTAC", 8, 21.023, 20.317, 3072, 2.838, 26.18),
    Published(_LORA, "MI325X", 8, "AMD", 8, 21.049, 20.661, 3120, 2.835, 25.74),
    Published(_LORA, "MI325X", 8, "ASUS", 8, 21.498, 21.101, 3120, 2.780, 26.92),
    Published(_LORA, "MI325X", 8, "Supermicro", 8, 21.543, 20.495, 3024, 2.765, 26.82),
    Published(_LORA, "MI325X", 8, "QCT", 8, 21.631, 20.905, 3072, 2.757, 26.96),
    Published(_LORA, "MI300X", 8, "AMD", 8, 27.969, 27.875, 3168, 2.109, 30.78),
    Published(_LORA, "MI300X", 8, "MangoBoost", 8, 28.374, 27.422, 3072, 2.084, 31.07),
    Published(_LORA, "MI300X", 8, "Krai", 8, 28.648, 28.648, 3216, 2.084, 31.10),
    Published(_LORA, "H200", 8, "Dell XE9680", 8, 23.369, 22.937, 3120, 2.556, 28.44),
    Published(_LORA, "H200", 8, "QCT", 8, 23.474, 23.395, 3168, 2.542, 28.16),
    Published(_LORA, "H200", 8, "Dell XE9680L", 8, 23.527, 23.448, 3168, 2.543, 30.54),
    Published(_LORA, "H200", 8, "Cisco", 8, 23.629, 23.193, 3120, 2.512, 28.23),
)


@dataclass(frozen=True)
class Part:
    """A cause of a difference between two series: minutes, and the factor on the time. Below zero and below one is faster."""

    name: str
    minutes: float
    factor: float


def split(ours: Pace, theirs: Pace) -> list[Part]:
    """What `ours.minutes - theirs.minutes` is made of: the sum of the minutes and the product of the factors are exact."""
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
    return [Part(name, part, math.exp(part / whole)) for name, part in minutes.items()]


def _timed(pace: Pace) -> bool:
    return bool(pace.evaluations and pace.evaluation_s)


def _logarithmic_mean(a: float, b: float) -> float:
    relative = (a - b) / b
    return a if abs(relative) < 1e-12 else (a - b) / math.log1p(relative)


def published(benchmark: str, gpu: str | None) -> list[Published]:
    """What was published for this kind of GPU, the best first."""
    return sorted((entry for entry in RESULTS if (entry.benchmark, entry.gpu) == (benchmark, gpu)), key=lambda entry: entry.score)
