"""GPU samples and rank comparisons of a run, for its report.

launch/monitor/gpu_sampler.py writes the samples to gpu_samples.jsonl. The file may be missing,
because the sampler is optional. Ranks are compared at every tenth step. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from common.html import page
from common.html.page import Block, Curve, finite, points, span
from common.records import json_lines
from common.records.tracking import GPU_SAMPLES
from common.text_tables import number
from submission.run import Run

# Key of a sample -> its name and unit on the page.
CURVES = {
    "power_w": "power, W",
    "temperature_c": "temperature, °C",
    "clock_mhz": "clock, MHz",
    "utilization_percent": "utilization, %",
    "memory_gib": "memory, GiB",
}


@dataclass
class Samples:
    """The samples of one run, from run_start to run_stop."""

    source: str = ""  # the program or library that was read, such as nvidia-smi
    gpus: list[dict] = field(default_factory=list)  # identity of each GPU: "name" and others
    # For each GPU, its records. "minute" in a record counts from run_start.
    rows: list[list[dict]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self, gpu: int, key: str) -> list[float]:
        return [value for _, value in points(self.rows[gpu], "minute", key)]

    def throttled(self, gpu: int) -> dict[str, float] | None:
        """Return, for each throttle reason, the share of samples (0 to 1) in which it was active.

        None if the GPU does not report throttle reasons.
        """
        counts: Counter[str] = Counter()
        samples = 0
        for record in self.rows[gpu]:
            if isinstance(record.get("throttle"), list):
                counts.update({*record["throttle"]})
                samples += 1
        if not samples:
            return None
        return {reason: counts[reason] / samples for reason in sorted(counts)}


# The figures, the advice and the charts of a page read the same samples. The cache keeps only the
# last run's, because `report --watch` reads the run anew for each page.
@lru_cache(maxsize=1)
def read_samples(run: Run) -> Samples:
    """Return the samples from run_start to run_stop.

    Lines that are not complete JSON objects, or have another form, are skipped.
    """
    samples = Samples()
    low = 0.0
    high = float("inf")
    for record in json_lines.read(run.folder / GPU_SAMPLES)[0]:
        gpus = _list(record.get("gpus"))
        if record.get("event") == "start":
            time = record.get("time")
            if not finite(time) or not all(isinstance(gpu, dict) for gpu in gpus):
                continue
            samples.source = str(record.get("source"))
            samples.gpus = gpus
            samples.rows = [[] for _ in gpus]
            if run.nodes > 1:
                samples.notes.append("these are the GPUs of node 0")
            start = run.log.first("run_start")
            stop = run.log.first("run_stop")
            low = start.time_ms / 1e3 - time if start else 0.0
            # A killed run has no run_stop: its samples end at the failure.
            end = stop.time_ms / 1e3 if stop else run.failure.get("time")
            high = end - time if start and finite(end) else float("inf")
        elif record.get("event") == "sample":
            time_s = record.get("time_s")
            if not finite(time_s) or not low <= time_s <= high:
                continue
            for rows, values in zip(samples.rows, gpus, strict=False):
                known = values if isinstance(values, dict) else {}
                rows.append({"minute": (time_s - low) / 60} | known)
        elif record.get("event") == "note":
            samples.notes.append(str(record.get("what")))
    return samples


def _list(value: object) -> list:
    """Return `value` if it is a list, else []."""
    return value if isinstance(value, list) else []


def energy_kwh(samples: Samples) -> float | None:
    """Return the energy of all sampled GPUs in kWh, integrated by the trapezoidal rule.

    None unless every GPU has at least two power samples.
    """
    energies = []
    for gpu in range(len(samples.gpus)):
        energy = _kwh(samples, gpu)
        if energy is None:
            return None
        energies.append(energy)
    return sum(energies) if energies else None


def _kwh(samples: Samples, gpu: int) -> float | None:
    """Return the energy of one GPU in kWh, or None if it has fewer than two power samples."""
    power = points(samples.rows[gpu], "minute", "power_w")
    if len(power) < 2:
        return None
    watt_minutes = []
    for (start, before), (end, after) in pairwise(power):
        watt_minutes.append(0.5 * (before + after) * (end - start))
    return sum(watt_minutes) / 60 / 1000


def blocks(samples: Samples) -> list[Block]:
    """Return a table, notes and charts of the samples. Without samples, return the notes only."""
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
        f"{page.SPAN}, from run_start to run_stop; sampled once a second by {samples.source};"
        " not a power measurement by the MLPerf rules"
    )
    return [_table(samples), {"notes": [how, *samples.notes]}, *charts]


def _table(samples: Samples) -> Block:
    rows = []
    gpus = range(len(samples.gpus))
    known = [key for key in CURVES if any(samples.values(gpu, key) for gpu in gpus)]
    for gpu, identity in enumerate(samples.gpus):
        name = f"{gpu}: {identity.get('name') or 'no name'}"
        spans = [span(samples.values(gpu, key)) for key in known]
        energy = number(_kwh(samples, gpu), ".3f")
        rows.append([name, *spans, energy, _throttle_text(samples.throttled(gpu))])
    heads = ["GPU", *(CURVES[key] for key in known), "kWh", "throttled by"]
    return page.table(heads, rows, (0, len(known) + 2))


def _throttle_text(shares: dict[str, float] | None) -> str:
    if shares is None:
        return "-"
    return ", ".join(f"{reason} {share:.0%}" for reason, share in shares.items()) or "nothing"


def rank_comparisons(run: Run) -> list[dict]:
    """Return the rank comparisons (common/training/rank_comparison.py), oldest first.

    Records of another form are skipped.
    """
    compared: list[dict] = []
    for record in run.records:
        times_ms = _list(record.get("block_ms"))
        slow = record.get("slow")
        if record.get("event") != "ranks" or not times_ms or not finite(record.get("samples")):
            continue
        ranks = len(compared[0]["block_ms"]) if compared else len(times_ms)
        are_times = all(finite(time) and time > 0 for time in times_ms)
        are_ranks = isinstance(slow, list) and all(rank in range(ranks) for rank in slow)
        if len(times_ms) == ranks and are_times and are_ranks:
            compared.append(record)
    return compared


def rank_blocks(run: Run) -> list[Block]:
    """Return a chart of the time of a forward on each rank, in ms.

    The chart has no curves if the ranks were not compared.
    """
    records = rank_comparisons(run)
    curves = []
    for rank in range(len(records[0]["block_ms"]) if records else 0):
        values = [(record["samples"], record["block_ms"][rank]) for record in records]
        curves.append(Curve(f"rank {rank}", values, rank))
    label = (
        "time of a block's forward, or the head's, which waits for no other rank, ms, mean of ten "
        "steps"
    )
    return [page.chart(label, "training sequences", curves)]
