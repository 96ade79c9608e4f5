"""GPU samples and rank comparisons of a run, for its report.

The samples are gpu_samples.jsonl (launch/monitor/gpu_sampler.py). Ranks are compared at every tenth
step. A missing file is not a finding, because the sampler is optional. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from common.html import page
from common.html.page import Block, Curve, finite, points, span
from common.records import json_lines
from submission import terminal
from submission.runs import Run

NAME = "gpu_samples.jsonl"
CURVES = {"power_w": "power, W", "temperature_c": "temperature, °C", "clock_mhz": "clock, MHz"}
CURVES |= {"utilization_percent": "utilization, %", "memory_gib": "memory, GiB"}


@dataclass
class Samples:
    """The samples of one run.

    `rows`: for each GPU, its records within the timed run. `minute` in a record counts from
    run_start.
    """

    source: str = ""
    gpus: list[dict] = field(default_factory=list)
    rows: list[list[dict]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self, gpu: int, key: str) -> list[float]:
        return [value for _, value in points(self.rows[gpu], "minute", key)]

    def held_down(self, gpu: int) -> dict[str, float] | None:
        """Return, for each throttle reason, the share of samples (0 to 1) in which it was active.

        None if the GPU does not report throttle reasons.
        """
        samples = [
            record["throttle"]
            for record in self.rows[gpu]
            if isinstance(record.get("throttle"), list)
        ]
        if not samples:
            return None
        counts = Counter(reason for reasons in samples for reason in {*reasons})
        return {reason: counts[reason] / len(samples) for reason in sorted(counts)}


@cache
def read_samples(run: Run) -> Samples:
    """Return the samples within the timed run. Lines that are not complete objects are skipped."""
    samples = Samples()
    low = 0.0
    high = float("inf")
    for record in json_lines.read(run.folder / NAME)[0]:
        if record.get("event") == "start":
            samples.source = record["source"]
            samples.gpus = record["gpus"]
            samples.rows = [[] for _ in record["gpus"]]
            start = run.log.first("run_start")
            stop = run.log.first("run_stop")
            low = start.time_ms / 1e3 - record["time"] if start else 0.0
            # A killed run has no run_stop. Samples after its failure are not training.
            end = stop.time_ms / 1e3 if stop else run.failure.get("time", float("inf"))
            high = end - record["time"] if start else float("inf")
        elif (
            record.get("event") == "sample"
            and finite(record.get("time_s"))
            and low <= record["time_s"] <= high
        ):
            for rows, gpu in zip(samples.rows, record["gpus"], strict=False):
                rows.append({"minute": (record["time_s"] - low) / 60} | (gpu or {}))
        elif record.get("event") == "note":
            samples.notes.append(str(record.get("what")))
    return samples


def energy_kwh(samples: Samples) -> float | None:
    """Return the energy of all sampled GPUs in kWh, integrated by the trapezoidal rule.

    None unless every GPU has at least two power samples.
    """
    energies = [_kwh(samples, gpu) for gpu in range(len(samples.gpus))]
    if not energies or None in energies:
        return None
    return sum(energies)  # type: ignore[arg-type]


def _kwh(samples: Samples, gpu: int) -> float | None:
    power = points(samples.rows[gpu], "minute", "power_w")
    watt_minutes = (
        0.5 * (before + after) * (end - start) for (start, before), (end, after) in pairwise(power)
    )
    return sum(watt_minutes) / 60 / 1000 if len(power) > 1 else None


def blocks(samples: Samples) -> list[Block]:
    """Return a table, notes and charts of the samples, or only the notes if there are none."""
    if not any(samples.rows):
        return [{"notes": samples.notes}]
    charts = []
    for key, label in CURVES.items():
        curves = [
            Curve(f"GPU {gpu}", points(rows, "minute", key), gpu)
            for gpu, rows in enumerate(samples.rows)
        ]
        charts.append(page.chart(label, "minutes", curves, sync="gpus"))
    how = (
        f"{page.SPAN}, from run_start to run_stop; once a second, by {samples.source};"
        " not a power measurement by MLPerf's rules"
    )
    return [_table(samples), {"notes": [how, *samples.notes]}, *charts]


def _table(samples: Samples) -> Block:
    rows = []
    gpus = range(len(samples.gpus))
    known = [key for key in CURVES if any(samples.values(gpu, key) for gpu in gpus)]
    for gpu, facts in enumerate(samples.gpus):
        reasons = samples.held_down(gpu)
        shares = [f"{reason} {share:.0%}" for reason, share in (reasons or {}).items()]
        held = ", ".join(shares) or "nothing"
        spans = [span(samples.values(gpu, key)) for key in known]
        energy = terminal.number(_kwh(samples, gpu), ".3f")
        rows.append(
            [
                f"{gpu}: {facts['name'] or 'no name'}",
                *spans,
                energy,
                "-" if reasons is None else held,
            ]
        )
    return page.table(
        ["GPU", *(CURVES[key] for key in known), "kWh", "held down by"], rows, (0, len(known) + 2)
    )


def comparisons(run: Run) -> list[dict]:
    """Return the rank comparisons (common/training/rank_comparison.py), oldest first."""
    return [
        record
        for record in run.records
        if record.get("event") == "ranks" and record.get("block_ms")
    ]


def ranks_compared(run: Run) -> list[Block]:
    """Return a chart of each rank's block forward time in ms, empty if ranks were not compared."""
    records = comparisons(run)
    ranks = range(len(records[0]["block_ms"]) if records else 0)
    curves = [
        Curve(
            f"rank {rank}",
            [(record["samples"], record["block_ms"][rank]) for record in records],
            rank,
        )
        for rank in ranks
    ]
    return [
        page.chart(
            "a block's forward, which waits for no other rank, ms: means of ten steps",
            "training sequences",
            curves,
        )
    ]
