"""What the GPUs did during a run, for its report: gpu_samples.jsonl (launch/sampler.py) and the ranks compared at evaluations.

A file that is missing is no finding: the sampler is optional. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from submission import plots
from submission.plots import Axes, finite, median, number, table
from submission.runs import Run, read_lines

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

    def values(self, gpu: int, key: str) -> list[tuple[float, float]]:
        return [(minute, gpus[gpu][key]) for minute, gpus in self.rows if gpu < len(gpus) and finite(gpus[gpu].get(key))]

    def throttled(self, gpu: int) -> list[tuple[float, list[str]]]:
        """(minute, reasons), where the GPU says."""
        return [(m, gpus[gpu]["throttle"]) for m, gpus in self.rows if gpu < len(gpus) and isinstance(gpus[gpu].get("throttle"), list)]


def read_samples(run: Run) -> Samples | None:
    """None if there is no file. Lines that are cut off or no objects are left out; only what lies within the timed run is kept."""
    if not (run.folder / NAME).is_file():
        return None
    samples, started = Samples(), None
    low, high = 0.0, float("inf")
    for record in read_lines(run.folder / NAME, []):
        if record.get("event") == "start" and finite(record.get("time")) and isinstance(record.get("gpus"), list):
            samples.source, samples.gpus, started = str(record.get("source")), record["gpus"], record["time"]
            low, high = _timed(run, started)
        elif record.get("event") == "sample" and started is not None and finite(record.get("time_s")):
            gpus = [gpu if isinstance(gpu, dict) else {} for gpu in record.get("gpus") or []]
            if low <= record["time_s"] <= high:
                samples.rows.append(((record["time_s"] - low) / 60, gpus))
        elif record.get("event") == "note":
            samples.notes.append(str(record.get("what")))
    return samples


def _timed(run: Run, started: float) -> tuple[float, float]:
    """From run_start to run_stop, in seconds of the sampler; all of it if the log has no run_start."""
    start, stop = run.log.first("run_start"), run.log.first("run_stop")
    low = start.time_ms / 1e3 - started if start else 0.0
    return low, stop.time_ms / 1e3 - started if start and stop else float("inf")


def section(samples: Samples | None) -> str:
    """HTML: findings, a table and curves; "" if there is no file."""
    if samples is None:
        return ""
    notes = "".join(f"<p class=dim>{escape(note)}</p>" for note in samples.notes)
    if not samples.rows:
        return notes
    found = "".join(f"<p><b>{escape(finding)}</b></p>" for finding in findings(samples))
    source = f"<p class=dim>one sample a second, by {escape(samples.source)}; not a power measurement by MLPerf's rules</p>"
    curves = "".join(_curve(samples, key, label) for key, label in CURVES)
    return found + _table(samples) + curves + _throttle(samples) + notes + source


def findings(samples: Samples) -> list[str]:
    """GPUs whose median clock is low beside the others', and those held down by something else than their power limit."""
    lines = []
    clocks = {gpu: median([mhz for _, mhz in values]) for gpu in range(len(samples.gpus)) if (values := samples.values(gpu, "clock_mhz"))}
    if len(clocks) > 1:
        typical = median(sorted(clocks.values(), reverse=True))  # of two the faster one
        for gpu, mhz in clocks.items():
            if mhz < LOW_CLOCK * typical:
                lines.append(
                    f"GPU {gpu}: median clock {mhz:,.0f} MHz, {1 - mhz / typical:.0%} below the median GPU's: all ranks wait for it"
                )
    for gpu in range(len(samples.gpus)):
        for reason, share in _shares(samples, gpu).items():
            if reason not in NORMAL:
                lines.append(f"GPU {gpu}: held down by {reason} in {share:.1%} of the samples")
    return lines


def _shares(samples: Samples, gpu: int) -> dict[str, float]:
    said = [reasons for _, reasons in samples.throttled(gpu)]
    names = sorted({str(reason) for reasons in said for reason in reasons})
    return {name: sum(name in reasons for reasons in said) / len(said) for name in names}


def _table(samples: Samples) -> str:
    heads = ["GPU", "power, W", "temperature, °C", "clock, MHz", "memory, GiB, most", "held down by"]
    rows = []
    for gpu, facts in enumerate(samples.gpus):
        name = f"{gpu}: {facts.get('name') or 'no name'}" if isinstance(facts, dict) else str(gpu)
        spans = [_span([value for _, value in samples.values(gpu, key)]) for key, _ in CURVES]
        memory = [value for _, value in samples.values(gpu, "memory_gib")]
        shares = ", ".join(f"{escape(reason)} {share:.0%}" for reason, share in _shares(samples, gpu).items())
        unknown = "" if samples.throttled(gpu) else "-"
        rows.append([escape(name), *spans, number(max(memory)) if memory else "-", shares or unknown or "nothing"])
    return "<p class=dim>least / median / most, from run_start to run_stop</p>" + table(heads, rows, texts=(5,), kind="many")


def _span(values: list[float]) -> str:
    return " / ".join(f"{value:,.0f}" for value in (min(values), median(values), max(values))) if values else "-"


def _curve(samples: Samples, key: str, label: str) -> str:
    """One line per GPU."""
    lines = [samples.values(gpu, key) for gpu in range(len(samples.gpus))]
    values = [value for line in lines for _, value in line]
    if not values:
        return ""
    axes = Axes(0, _last_minute(samples), *plots.padded(min(values), max(values)))
    body = "".join(axes.line(plots.thinned(line), "gpu", f"GPU {gpu}") for gpu, line in enumerate(lines) if line)
    return axes.svg(body, "minutes", label)


def _throttle(samples: Samples) -> str:
    """A row per GPU, marked where something held its clock down; "" if nothing did."""
    count = len(samples.gpus)
    marks = [strip for gpu in range(count) for strip in _strips(samples.throttled(gpu), gpu)]
    if not marks:
        return ""
    axes = Axes(0, _last_minute(samples), -0.5, count - 0.5)
    body = "".join(
        f'<rect class="{kind}" x="{axes.x(low):.1f}" y="{axes.y(gpu) - 4:.1f}" width="{max(axes.x(high) - axes.x(low), 0.8):.1f}" height="8"/>'
        for gpu, low, high, kind in marks
    )
    legend = [("key-dim", "&#9608; at its power limit"), ("key-eval", "&#9608; held down by heat, hardware or settings")]
    return axes.svg(body, "minutes", "GPU") + plots.keys(legend)


def _strips(said: list[tuple[float, list[str]]], gpu: int) -> list[tuple[int, float, float, str]]:
    """(GPU, from, to, class of the colour): neighbouring samples of one kind are one strip, so that hours stay a small page."""
    strips: list[tuple[int, float, float, str]] = []
    for index, (minute, reasons) in enumerate(said):
        kind = "h-bad" if set(reasons) - set(NORMAL) else "h-power" if reasons else ""
        end = said[index + 1][0] if index + 1 < len(said) else minute
        if strips and strips[-1][3] == kind and strips[-1][2] == minute:
            strips[-1] = (gpu, strips[-1][1], end, kind)
        elif kind:
            strips.append((gpu, minute, end, kind))
    return strips


def _last_minute(samples: Samples) -> float:
    return max(samples.rows[-1][0], 1 / 60)


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
        rows.append([f"rank {rank}", _milliseconds(mine), f"{times} of {len(records)}" if times else "never"])
    return "<p class=dim>one GEMM, the same for all, timed at each evaluation</p>" + table(
        ["", "least / median / most, ms", "slower than the median rank by 5 %"], rows
    )


def _milliseconds(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in (min(values), median(values), max(values)))
