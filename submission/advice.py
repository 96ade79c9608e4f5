"""Advice on the speed of a run, from symptoms in its log, events and GPU samples.

advice.toml has the texts, the thresholds and their sources.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from common import config as configs
from common.benchmarks import config_class
from common.errors import ConfigError
from common.estimate.step_time import FITTED_HIDDEN_SIZE, estimate
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import KINDS
from common.html.page import median, points
from common.machine.gpu_stats import FAULTS
from submission.gpu_samples import Samples, rank_comparisons, read_samples
from submission.run import Run

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RANK_COMPARISONS = 5  # number of comparisons, the last of the run, that a slow rank's mean covers
Symptom = tuple[str, dict[str, Any]]  # its name in TABLE, and the numbers for its texts


class Advice(NamedTuple):
    """The texts of one symptom in advice.toml, with the numbers of the run filled in."""

    symptom: str
    worth: str
    do: str
    source: str


def advice(run: Run) -> list[Advice]:
    """Return the advice for `run`, which is empty for a miniature and for a run on the CPU."""
    if run.gpu == "CPU" or run.is_miniature:
        return []
    samples = read_samples(run)
    symptoms = [*_clocks(run, samples), *_memory(run), *_speed(run, samples), *_ranks(run)]
    hints = []
    for name, facts in symptoms:
        texts = TABLE[name]
        filled_in = {field: texts[field].format(run=run, **facts) for field in Advice._fields}
        hints.append(Advice(**filled_in))
    return hints


def _clocks(run: Run, samples: Samples) -> Iterator[Symptom]:
    """Yield GPUs with a low clock, an active fault, or a lowered power limit that is reached."""
    clocks = {}
    for gpu in range(len(samples.rows)):
        if values := samples.values(gpu, "clock_mhz"):
            clocks[gpu] = values
    if not clocks:
        return
    medians = {gpu: median(values) for gpu, values in clocks.items()}
    highest = max(map(max, clocks.values()))
    median_of_gpus = median(list(medians.values()))
    fastest = max(medians.values())
    board_w = KINDS[run.gpu].board_watts if run.gpu in KINDS else 0
    for gpu, clock in medians.items():
        facts = {
            "gpu": gpu,
            "now": clock,
            "board": board_w,
            "below": 1 - clock / median_of_gpus,
            "behind": 1 - clock / fastest,
            "lost": 1 - clock / highest,
        }
        if clock < TABLE["low_clock"] * median_of_gpus:
            yield "clock", facts
        for reason, share in (samples.throttled(gpu) or {}).items():
            if reason in FAULTS and share > TABLE["often"]:
                yield "throttled", facts | {"reason": reason, "share": share}
        limit_w = min(samples.values(gpu, "power_limit_w"), default=board_w)
        reached = [watts > TABLE["low_limit"] * limit_w for watts in samples.values(gpu, "power_w")]
        share = fmean(reached or [0])
        if limit_w < TABLE["low_limit"] * board_w and share > TABLE["often"]:
            yield "power_limit", facts | {"limit": limit_w, "share": share}


def _memory(run: Run) -> Iterator[Symptom]:
    """Yield fragmentation, if the last step that logged its memory shows it."""
    last = points(run.records, "memory_gib", "allocated_gib")[-1:]
    for reserved, allocated in last:
        if reserved > TABLE["fragmented"] * allocated:
            free = reserved - allocated
            yield "fragmentation", {"reserved": reserved, "allocated": allocated, "free": free}


def _speed(run: Run, samples: Samples) -> Iterator[Symptom]:
    """Yield slow steps and, if the GPUs are not busy, a slow host as well."""
    speeds = [speed for _, speed in points(run.records, "samples", "tokens_per_s_per_gpu")]
    planned = planned_speed(run) if speeds and run.rules else 0.0
    if not planned:
        return
    speed = median(speeds) / (1 - run.padding)  # the plan counts padding
    if speed >= TABLE["slow"] * planned:
        return
    facts = {
        "speed": speed,
        "planned": planned,
        "late": 1 - speed / planned,
        "more": planned / speed - 1,
    }
    utilization: list[float] = []
    for gpu in range(len(samples.rows)):
        utilization += samples.values(gpu, "utilization_percent")
    if utilization and median(utilization) < TABLE["busy"]:
        use = median(utilization)
        yield "host", facts | {"use": use, "idle": 100 - use}
    yield "steps", facts


def planned_speed(run: Run) -> float:
    """Return the planned tokens/s/GPU, or 0 if there is no plan that fits the run's config."""
    with contextlib.suppress(ConfigError, KeyError):
        config = configs.load(run.folder / "config.toml", config_class(run.benchmark))
        work = benchmark_workload(run.benchmark, config)
        if work.shape.hidden_size < FITTED_HIDDEN_SIZE:
            return 0.0
        return estimate(config, work, KINDS[config.gpu], None).tokens_per_s_per_gpu
    return 0.0


def _ranks(run: Run) -> Iterator[Symptom]:
    """Yield the ranks that were slow in the last rank comparison."""
    compared = rank_comparisons(run)
    if not compared:
        return
    for rank in compared[-1]["slow"]:
        ratios = []
        for record in compared[-RANK_COMPARISONS:]:
            ratios.append(record["block_ms"][rank] / min(record["block_ms"]))
        yield "rank", {"rank": rank, "late": fmean(ratios) - 1}
