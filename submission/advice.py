"""Advice by symptom, from what a run leaves: the symptom with its number, what it is worth, what to do, and where that is from.

A healthy run on H200s gives none: at its board's power limit a busy GPU's clock swings, and steps are up to 6 % slower than planned. What is
worth "at most" some percent was not measured. Nothing here was seen on an AMD GPU, whose driver gives no reason for a lower clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from common import config as configs
from common.errors import ConfigError
from common.gpu_kinds import KINDS
from common.gpu_stats import FAULTS
from pages.page import median, points
from plan.benchmark import config_class, workload
from plan.estimate import estimate
from submission.gpu_samples import Samples, read_samples
from submission.runs import Run

# Power of a board, W: data sheets of NVIDIA (SXM) and AMD.
BOARD_W = {"H100": 700, "H200": 700, "B200": 1000, "MI300X": 750, "MI325X": 1000, "MI350X": 1000, "MI355X": 1400}
LOW = 0.95  # a clock beside the other GPUs', or a power limit beside the board's
OFTEN = 0.02  # of the samples
FRAGMENTED = 1.15  # memory reserved over allocated; torch takes up to 5 % more where it can (docs/plan.md)
SLOW = 0.9  # tokens/s over those planned
BUSY = 90  # % of the time with a kernel on the GPU


class Advice(NamedTuple):
    symptom: str
    worth: str
    do: str
    source: str


def advice(run: Run) -> list[Advice]:
    samples = read_samples(run)
    return [] if run.gpu == "CPU" else [*_clocks(run, samples), *_memory(run), *_speed(run, samples), *_ranks(run)]


def _clocks(run: Run, samples: Samples) -> Iterator[Advice]:
    clocks = {gpu: values for gpu in range(len(samples.rows)) if (values := samples.values(gpu, "clock_mhz"))}
    usual, highest = (pick([pick(values) for values in clocks.values()]) if clocks else 0 for pick in (median, max))
    for gpu, values in clocks.items():
        now, lost = median(values), 1 - median(values) / highest
        worth = f"at most {lost:.0%} of a step: its clock is so far below the highest of this run, and all ranks wait for it"
        if now < LOW * usual:
            symptom = f"GPU {gpu}: median clock {now:,.0f} MHz, {1 - now / usual:.0%} below the median GPU's"
            yield Advice(symptom, worth, f"./run_and_time.sh {run.benchmark} preflight measures it alone", "gpu_samples.jsonl")
        for reason, share in (samples.held_down(gpu) or {}).items():
            if reason in FAULTS and share > OFTEN:
                do = "look at the cooling and the power of the chassis: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE"
                yield Advice(f"GPU {gpu}: held down by {reason} in {share:.1%} of the samples", worth, do, "nvml.h")
        power, limit, board = samples.values(gpu, "power_w"), samples.values(gpu, "power_limit_w"), BOARD_W.get(run.gpu or "", 0)
        if limit and min(limit) < LOW * board and (share := fmean(watts > LOW * min(limit) for watts in power)) > OFTEN:
            symptom = (
                f"GPU {gpu}: its power limit, {min(limit):,.0f} W where the board has {board}, is reached in {share:.0%} of the samples"
            )
            do = f"ask who set it; as root, nvidia-smi -pl {board} or amd-smi set --power-cap {board} gives the board's"
            yield Advice(symptom, worth, do, "the board's data sheet")


def _memory(run: Run) -> Iterator[Advice]:
    sizes = points(run.records, "memory_gib", "allocated_gib")
    if sizes and sizes[-1][0] > FRAGMENTED * sizes[-1][1]:
        reserved, allocated = sizes[-1]
        symptom = f"memory is fragmented: {reserved:.0f} GiB reserved, {allocated:.0f} GiB allocated at the peak"
        worth = f"{reserved - allocated:.0f} GiB, where memory decides on recomputation, offload or the micro-batch; no time by itself"
        do = 'PYTORCH_CUDA_ALLOC_CONF = "expandable_segments:True" under [env] of the config, as H200s have it'
        yield Advice(symptom, worth, do, "docs/plan.md")


def _speed(run: Run, samples: Samples) -> Iterator[Advice]:
    speeds = [speed for _, speed in points(run.records, "samples", "tokens_per_s_per_gpu")]
    use = [value for gpu in range(len(samples.rows)) for value in samples.values(gpu, "utilization_percent")]
    planned = _planned(run) if speeds and run.rules else 0.0
    if not planned or (late := 1 - median(speeds) / planned) < 1 - SLOW:
        return
    if use and median(use) < BUSY:
        symptom = (
            f"the GPUs wait for their host: {median(use):.0f} % of the time a kernel runs, and steps are {late:.0%} slower than planned"
        )
        do = "./run_and_time.sh tuning check, or --tune; end other programs of the host; `profile` shows the gaps"
        yield Advice(symptom, f"at most {100 - median(use):.0f} % of a step", do, "docs/system_tuning.md")
    symptom = f"{median(speeds):,.0f} tokens/s/GPU, {late:.0%} below what is planned for {run.gpu}, {planned:,.0f}; MFU falls as much"
    do = f"./run_and_time.sh {run.benchmark} profile shows where the time goes, preflight whether each GPU is fit"
    yield Advice(symptom, f"{late / (1 - late):.0%} more tokens/s", do, "docs/plan.md; on AMD's GPUs that is AMD's software")


def _planned(run: Run) -> float:
    """Tokens/s/GPU; 0 where there is no plan for the config."""
    with contextlib.suppress(ConfigError, KeyError):
        config = configs.load(run.folder / "config.toml", config_class(run.benchmark))
        return estimate(config, workload(run.benchmark, config), KINDS[config.gpu], None).tokens_per_s_per_gpu
    return 0.0


def _ranks(run: Run) -> Iterator[Advice]:
    compared = [record for record in run.records if record.get("event") == "ranks" and record.get("block_ms")]
    for rank in compared[-1]["slow"] if compared else ():
        late = fmean(record["block_ms"][rank] / min(record["block_ms"]) for record in compared[-5:]) - 1
        do = f"look at its clock and temperature below; ./run_and_time.sh {run.benchmark} preflight measures each GPU alone"
        yield Advice(f"rank {rank} takes {late:.1%} longer than the fastest", f"at most {late:.1%} of a step: all wait", do, "events.jsonl")
