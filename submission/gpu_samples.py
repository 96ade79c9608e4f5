"""What the GPUs did during a run, for its report: gpu_samples.jsonl (launch/sampler.py) and the ranks compared at evaluations.

A file that is missing is no finding: the sampler is optional. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from records import json_lines
from submission import plots
from submission.plots import Curve, finite, median, number, span, table
from submission.runs import Run

NAME = "gpu_samples.jsonl"
LOW_CLOCK = 0.95  # of the median GPU's: the same 5 % that names a slow rank (common/training/rank_comparison.py)
NORMAL = ("power cap",)  # a busy GPU meets its power limit; what else holds a clock down is a fault of cooling, power or settings
CURVES = (("power_w", "power, W"), ("temperature_c", "temperature, °C"), ("clock_mhz", "clock, MHz"))


@dataclass
class Samples:
    """What the sampler wrote. `rows`: (minutes since run_start, or since the sampler's start; one record per GPU)."""

    source: str = ""
    gpus: list[dict] = field(default_factory=list)
    rows: list[tuple[float, list[dict]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def curve(self, gpu: int, key: str) -> list[tuple[float, float]]:
        return [(minute, gpus[gpu][key]) for minute, gpus in self.rows if gpu < len(gpus) and finite(gpus[gpu].get(key))]

    def values(self, gpu: int, key: str) -> list[float]:
        return [value for _, value in self.curve(gpu, key)]

    def held_down(self, gpu: int) -> dict[str, float] | None:
        """Share of the samples in which a reason held the clock down, by reason; None where the GPU does not say."""
        said = [gpus[gpu]["throttle"] for _, gpus in self.rows if gpu < len(gpus) and isinstance(gpus[gpu].get("throttle"), list)]
        names = sorted({str(reason) for reasons in said for reason in reasons})
        return {name: sum(name in reasons for reasons in said) / len(said) for name in names} if said else None


def read_samples(run: Run) -> Samples | None:
    """None if there is no file. Lines that are cut off or no objects are left out; only what lies within the timed run is kept."""
    if not (run.folder / NAME).is_file():
        return None
    samples, started = Samples(), None
    low, high = 0.0, float("inf")
    for record in json_lines.read(run.folder / NAME)[0]:
        if record.get("event") == "start" and finite(record.get("time")) and isinstance(record.get("gpus"), list):
            samples.source, samples.gpus, started = str(record.get("source")), record["gpus"], record["time"]
            start, stop = run.log.first("run_start"), run.log.first("run_stop")
            low = start.time_ms / 1e3 - started if start else 0.0
            high = stop.time_ms / 1e3 - started if start and stop else float("inf")
        elif record.get("event") == "sample" and started is not None and finite(record.get("time_s")):
            gpus = [gpu if isinstance(gpu, dict) else {} for gpu in record.get("gpus") or []]
            if low <= record["time_s"] <= high:
                samples.rows.append(((record["time_s"] - low) / 60, gpus))
        elif record.get("event") == "note":
            samples.notes.append(str(record.get("what")))
    return samples


def section(samples: Samples | None) -> str:
    """HTML: findings, a table and curves; "" if there is no file."""
    if samples is None:
        return ""
    notes = plots.notes(samples.notes)
    if not samples.rows:
        return notes
    found = "".join(f"<p><b>{escape(finding)}</b></p>" for finding in findings(samples))
    source = f"<p class=dim>one sample a second, by {escape(samples.source)}; not a power measurement by MLPerf's rules</p>"
    lines = [[Curve(samples.curve(gpu, key), "gpu", f"GPU {gpu}") for gpu in range(len(samples.gpus))] for key, _ in CURVES]
    charts = [plots.chart(curves, ("minutes", label)) for curves, (_, label) in zip(lines, CURVES, strict=True)]
    return found + _table(samples) + "".join(charts) + notes + source


def findings(samples: Samples) -> list[str]:
    """GPUs whose median clock is low beside the others', and those held down by something else than their power limit."""
    lines = []
    clocks = {gpu: median(values) for gpu in range(len(samples.gpus)) if (values := samples.values(gpu, "clock_mhz"))}
    typical = median(clocks.values()) if clocks else 0.0  # of two the faster one
    for gpu, mhz in clocks.items():
        if mhz < LOW_CLOCK * typical:
            low = f"{1 - mhz / typical:.0%} below the median GPU's"
            lines.append(f"GPU {gpu}: median clock {mhz:,.0f} MHz, {low}: all ranks wait for it")
    for gpu in range(len(samples.gpus)):
        for reason, share in (samples.held_down(gpu) or {}).items():
            if reason not in NORMAL:
                lines.append(f"GPU {gpu}: held down by {reason} in {share:.1%} of the samples")
    return lines


def _table(samples: Samples) -> str:
    rows = []
    for gpu, facts in enumerate(samples.gpus):
        name = f"{gpu}: {facts.get('name') or 'no name'}" if isinstance(facts, dict) else str(gpu)
        memory, reasons = samples.values(gpu, "memory_gib"), samples.held_down(gpu)
        shares = ", ".join(f"{escape(reason)} {share:.0%}" for reason, share in (reasons or {}).items())
        spans = [span(samples.values(gpu, key)) for key, _ in CURVES]
        rows.append([escape(name), *spans, number(max(memory)) if memory else "-", "-" if reasons is None else shares or "nothing"])
    heads = ["GPU", *(label for _, label in CURVES), "memory, GiB, most", "held down by"]
    return f"<p class=dim>{plots.SPAN}, from run_start to run_stop</p>" + table(heads, rows, texts=(5,), kind="many")


def ranks_compared(run: Run) -> str:
    """How often each rank was slower than the median rank by more than 5 % at the same GEMM; "" where ranks were not compared."""
    records = [
        record
        for record in run.records
        if record.get("event") == "ranks" and isinstance(record.get("probe_ms"), list) and isinstance(record.get("slow"), list)
    ]
    records = [record for record in records if record["probe_ms"] and all(finite(ms) for ms in record["probe_ms"])]
    if not records:
        return ""
    rows = []
    for rank in range(len(records[0]["probe_ms"])):
        mine = [record["probe_ms"][rank] for record in records if rank < len(record["probe_ms"])]
        times = sum(rank in record["slow"] for record in records)
        rows.append([f"rank {rank}", span(mine, ".3f"), f"{times} of {len(records)}" if times else "never"])
    heads = ["", f"{plots.SPAN}, ms", "slower than the median rank by 5 %"]
    return "<p class=dim>one GEMM, the same for all, timed at each evaluation</p>" + table(heads, rows)
