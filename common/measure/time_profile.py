"""Time profile of some steps, by torch's profiler: trace, profile.json, table and page.

Perfetto opens the trace. All ranks run the steps, and rank 0 is profiled and writes the files. The
steps are the same as in `bench`: random tokens, optimizer included.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from common.html import page
from common.kernels.step_clock import StepClock
from common.measure import report, trace
from common.measure.files import write_json
from common.measure.kernel_time import COMMUNICATION, GEMM, IDLE, ProfileRow, breakdown
from common.measure.profile_comparison import PROFILE
from common.measure.tables import Section
from common.model.llama import Llama
from common.sharding.processes import Processes
from common.text_tables import number

TRACE = "trace.json.gz"
# Key of a row -> head of its column, and format.
COLUMNS = {
    "ms": ("ms", ",.3f"),
    "share": ("share", ".1%"),
    "us_per_token": ("µs per token", ".3f"),
    "kernel_ms": ("kernel ms", ",.3f"),
    "hidden_ms": ("hidden ms", ",.3f"),
    "launches": ("launches", ",.0f"),
    "tflops": ("TFLOP/s", ".4g"),
}
HEADS = tuple(head for head, _ in COLUMNS.values())
PARTS = {
    "classes": "kernel class",
    "products": "matrix product, M x N x K",
    "others": "name in class other",
}
CLOCK_TOLERANCE = 0.01  # relative difference between trace and clock above which a note is shown
OTHERS_PRINTED = 3  # number of kernels of class other on the terminal


def record(step: Callable[[], object], steps: int, folder: Path, processes: Processes) -> float:
    """Run a lead-in step and `steps` more steps, on rank 0 under the profiler.

    All ranks must call this function. Rank 0 writes folder/trace.json.gz. Returns the mean
    milliseconds of a step by this rank's clock, which is CUDA events on a GPU and the monotonic
    clock on a CPU. Raises OSError.
    """
    activities = [ProfilerActivity.CPU]
    if processes.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = (
        torch_profile(activities=activities, record_shapes=True) if processes.rank == 0 else None
    )
    clock = StepClock(processes.device)
    processes.barrier()
    with profiler or contextlib.nullcontext():
        for number in range(steps + 1):
            with record_function(f"{trace.STEP}{number}"):
                step()
            clock.mark()
        times_ms = clock.drain_ms()
        if processes.device.type == "cuda":
            torch.cuda.synchronize()
    if profiler:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE))
    processes.barrier()  # no rank may leave the group before rank 0 has written
    return statistics.mean(times_ms)


def summarize(
    folder: Path,
    model: Llama,
    micro_batch_tokens: int,
    facts: dict,
    clock_ms: float,
    bench_ms: float,
) -> str:
    """Read the trace in `folder`, write profile.json, table.md and page.html, and return the table.

    `facts`: benchmark, config, precision, layers, world_size, device, torch, steps,
    tokens_per_step_per_rank, started (Unix time), command and commit. They become part of
    profile.json. `clock_ms`: time of a step under the profiler, from `record`. `bench_ms`: time of
    a step without the profiler, measured earlier in the same process. Raises StorageError.
    """
    roles = trace.Roles(
        model.shape,
        micro_batch_tokens,
        all(parameter.requires_grad for parameter in model.parameters()),
    )
    with gzip.open(folder / TRACE, "rt", encoding="utf-8") as file:
        events, start_ns, end_ns, steps = trace.timeline(json.load(file), roles)
    profile = document(breakdown(events, start_ns, end_ns), end_ns - start_ns, steps, facts)
    profile |= {"clock_ms": clock_ms, "bench_ms": bench_ms}
    write_json(folder / PROFILE, profile)
    report.write(folder, title(profile), sections(profile))
    return text(profile)


def document(rows: dict[str, list[ProfileRow]], window_ns: int, steps: int, facts: dict) -> dict:
    """Return the content of profile.json.

    Times are milliseconds per step, unless the key names another unit. The classes sum to
    window_ms.
    """

    def entry(row: ProfileRow) -> dict:
        return {
            "name": row.name,
            "class": row.kind or row.name,
            "ms": row.exposed_ns / 1e6 / steps,
            "share": row.exposed_ns / window_ns,
            "us_per_token": row.exposed_ns / 1e3 / steps / facts["tokens_per_step_per_rank"],
            "kernel_ms": row.kernel_ns / 1e6 / steps,
            "hidden_ms": row.hidden_ns / 1e6 / steps,
            "launches": row.launches / steps,
            "tflops": row.flops / row.product_ns / 1e3 if row.flops and row.product_ns else None,
        }

    entries = {name: [entry(row) for row in part] for name, part in rows.items()}
    return {**facts, "window_ms": window_ns / 1e6 / steps, **entries}


def _heading(profile: dict) -> list[str]:
    """Return lines that describe the profile, with a NOTE if trace and clock disagree."""
    over_clock = profile["window_ms"] / profile["clock_ms"] - 1
    cost = profile["clock_ms"] / profile["bench_ms"] - 1
    compared = f"which costs {cost:+.1%}"
    if cost < 0:
        compared = f"timed steps that were disturbed: {-cost:.1%} slower than under the profiler"
    what = (
        "ops of the main thread, each without the ops it calls"
        if profile["device"] == "cpu"
        else "kernels"
    )
    lines = [
        f"PROFILE {report.profiled(profile)} of "
        f"{profile['tokens_per_step_per_rank']:,} tokens; {what}",
        f"step {profile['window_ms']:.2f} ms in the trace, {profile['clock_ms']:.2f} by the clock "
        f"({over_clock:+.2%}), {profile['bench_ms']:.2f} without profiler ({compared})",
    ]
    if abs(over_clock) > CLOCK_TOLERANCE:
        lines.append(
            f"NOTE: trace and clock differ by more than {CLOCK_TOLERANCE:.0%}; "
            "the table shows the step in the trace"
        )
    return lines


def _cells(rows: list[dict]) -> list[tuple[str, ...]]:
    cells = []
    for row in rows:
        values = [(row[key], form) for key, (_, form) in COLUMNS.items()]
        texts = ["" if value is None else number(value, form) for value, form in values]
        cells.append((row["name"], *texts))
    return cells


def text(profile: dict) -> str:
    """Return the profile as text for a terminal."""
    lines = _heading(profile)
    for part, name in PARTS.items():
        rows = profile[part]
        if part == "others":
            rows = rows[:OTHERS_PRINTED]
        lines.append("")
        if not rows:
            continue
        width = min(60, max(len(name), *(len(row["name"]) for row in rows)))
        for first, *rest in [(name, *HEADS), *_cells(rows)]:
            lines.append(f"{first[:width]:{width}}" + "".join(f"{cell:>13}" for cell in rest))
    return "\n".join(lines)


def title(profile: dict) -> str:
    """Return the title of the page: benchmark, config, machine and date."""
    what = f"{profile['benchmark']} {profile['config']}"
    return f"profile · {what} · {profile['device']} · {report.date(profile)}"


def sections(profile: dict) -> list[Section]:
    """Return the sections of the page: headline, facts of the run, and the tables of PARTS.

    Tables without rows are left out. The table of the classes has bars.
    """
    kinds = {"ms": "nothing else runs", "hidden_ms": "behind other kernels"}
    bars = []
    for row in profile["classes"]:
        if row["kernel_ms"] or row["ms"]:
            bars += [(row["name"], row[key], kind) for key, kind in kinds.items()]
    chart = page.bars("Where a step's time went · ms per step", bars)
    numbers = (False, *(True for _ in COLUMNS))
    made = [_headline(profile), report.profile_facts(profile)]
    for part, name in PARTS.items():
        rows = tuple(_cells(profile[part]))
        if not rows:
            continue
        section = Section(f"By {name}", "", (name, *HEADS), numbers, rows)
        if part == "classes":
            section = replace(section, notes=tuple(_heading(profile)[1:]), charts=(chart,))
        made.append(section)
    return made


def _headline(profile: dict) -> Section:
    classes = {row["name"]: row for row in profile["classes"]}
    tiles = (
        ("Step", f"{profile['window_ms']:,.1f} ms"),
        ("Step without profiler", f"{profile['bench_ms']:,.1f} ms"),
        ("Matrix products", f"{classes[GEMM]['share']:.1%}"),
        ("Exposed communication", f"{classes[COMMUNICATION]['share']:.1%}"),
        ("Idle", f"{classes[IDLE]['share']:.1%}"),
    )
    return Section("Headline", "", ("", ""), (False, False), tiles, tiles=True)
