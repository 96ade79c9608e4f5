"""Advice by symptom, from the files that a run leaves behind.

The texts, the thresholds and their sources are in advice.toml.
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
from common.gpu_kinds import KINDS
from common.gpu_stats import FAULTS
from common.html.page import median, points
from launch.plan.benchmark import workload
from launch.plan.estimate import estimate
from submission.gpu_samples import Samples, comparisons, read_samples
from submission.runs import Run

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Symptom = tuple[str, dict[str, Any]]  # name in TABLE, and the numbers for its texts


class Advice(NamedTuple):
    """The texts of one row of advice.toml, with the numbers of the run filled in."""

    symptom: str
    worth: str
    do: str
    source: str


def advice(run: Run) -> list[Advice]:
    """Return the advice for `run`: none for a miniature or on the CPU."""
    if run.gpu == "CPU" or run.is_miniature:
        return []
    samples = read_samples(run)
    hints = []
    for name, facts in (
        *_clocks(run, samples),
        *_memory(run),
        *_speed(run, samples),
        *_ranks(run),
    ):
        texts = TABLE[name]
        hints.append(Advice(*(texts[field].format(run=run, **facts) for field in Advice._fields)))
    return hints


def _clocks(run: Run, samples: Samples) -> Iterator[Symptom]:
    every = {gpu: samples.values(gpu, "clock_mhz") for gpu in range(len(samples.rows))}
    clocks = {gpu: values for gpu, values in every.items() if values}
    if not clocks:
        return
    medians = {gpu: median(values) for gpu, values in clocks.items()}
    highest = max(map(max, clocks.values()))
    usual = median(list(medians.values()))
    fastest = max(medians.values())
    board = TABLE["board_w"].get(run.gpu, 0)
    for gpu, now in medians.items():
        facts = {
            "gpu": gpu,
            "now": now,
            "board": board,
            "below": 1 - now / usual,
            "behind": 1 - now / fastest,
            "lost": 1 - now / highest,
        }
        if now < TABLE["low_clock"] * usual:
            yield "clock", facts
        for reason, share in (samples.held_down(gpu) or {}).items():
            if reason in FAULTS and share > TABLE["often"]:
                yield "held_down", facts | {"reason": reason, "share": share}
        limit = min(samples.values(gpu, "power_limit_w"), default=board)
        reached = [watts > TABLE["low_limit"] * limit for watts in samples.values(gpu, "power_w")]
        if limit < TABLE["low_limit"] * board and (share := fmean(reached or [0])) > TABLE["often"]:
            yield "power_limit", facts | {"limit": limit, "share": share}


def _memory(run: Run) -> Iterator[Symptom]:
    for reserved, allocated in points(run.records, "memory_gib", "allocated_gib")[-1:]:
        if reserved > TABLE["fragmented"] * allocated:
            yield (
                "fragmentation",
                {"reserved": reserved, "allocated": allocated, "free": reserved - allocated},
            )


def _speed(run: Run, samples: Samples) -> Iterator[Symptom]:
    speeds = [speed for _, speed in points(run.records, "samples", "tokens_per_s_per_gpu")]
    planned = _planned(run) if speeds and run.rules else 0.0
    if not planned or (speed := median(speeds)) >= TABLE["slow"] * planned:
        return
    facts = {
        "speed": speed,
        "planned": planned,
        "late": 1 - speed / planned,
        "more": planned / speed - 1,
    }
    uses = [
        value
        for gpu in range(len(samples.rows))
        for value in samples.values(gpu, "utilization_percent")
    ]
    if uses and (use := median(uses)) < TABLE["busy"]:
        yield "host", facts | {"use": use, "idle": 100 - use}
    yield "steps", facts


def _planned(run: Run) -> float:
    """Return the planned tokens/s/GPU, or 0 if there is no plan for the run's config."""
    with contextlib.suppress(ConfigError, KeyError):
        config = configs.load(run.folder / "config.toml", config_class(run.benchmark))
        return estimate(
            config, workload(run.benchmark, config), KINDS[config.gpu], None
        ).tokens_per_s_per_gpu
    return 0.0


def _ranks(run: Run) -> Iterator[Symptom]:
    compared = comparisons(run)
    if not compared:
        return
    for rank in compared[-1]["slow"]:
        ratios = [record["block_ms"][rank] / min(record["block_ms"]) for record in compared[-5:]]
        yield "rank", {"rank": rank, "late": fmean(ratios) - 1}
