"""Time profile of some steps, from torch's profiler: trace, profile.json, table and page.

The trace opens in Perfetto. All ranks run the steps; only rank 0 is profiled and writes. The steps
are those of `bench`: random tokens, optimizer included.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.errors import StorageError
from common.model.llama import Llama
from common.sharding.processes import Processes
from common.training.metrics import StepClock
from throughput import report, trace
from throughput.kernel_time import Row, breakdown
from throughput.tables import Drawing, Plot, Section

TRACE, TABLE = "trace.json.gz", "profile.json"
# Key of a row -> format.
COLUMNS = {
    "ms": ",.3f",
    "share": ".1%",
    "us_per_token": ".3f",
    "kernel_ms": ",.3f",
    "hidden_ms": ",.3f",
}
COLUMNS |= {"launches": ",.0f", "tflops": ".4g"}
PARTS = {
    "classes": "kernel class",
    "products": "matrix product, M x N x K",
    "others": "name in class other",
}
CLOCK_AGREES = 0.01  # allowed difference between the step of the trace and that of the clock
OTHERS_PRINTED = 3


def record(step: Callable[[], object], steps: int, folder: Path, processes: Processes) -> float:
    """Run a lead-in step and `steps` more, on rank 0 under the profiler. All ranks must call it.

    Rank 0 writes folder/trace.json.gz. Returns the mean milliseconds of a step by this rank's
    clock: CUDA events on a GPU, the monotonic clock on a CPU. Raises StorageError.
    """
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if processes.device.type == "cuda" else []),
    ]
    profiler = profile(activities=activities, record_shapes=True) if processes.rank == 0 else None
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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / TRACE))
        except OSError as error:
            raise _cannot_write(folder / TRACE, error) from error
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

    `facts`: benchmark, config, precision, layers, world_size, device, torch, steps and
    tokens_per_step_per_rank. They become part of profile.json. `clock_ms`: a step under the
    profiler, from `record`. `bench_ms`: a step without the profiler, measured earlier in the same
    process.
    """
    roles = trace.Roles(
        model.shape,
        micro_batch_tokens,
        all(parameter.requires_grad for parameter in model.parameters()),
    )
    with gzip.open(folder / TRACE, "rt", encoding="utf-8") as file:
        events, start_ns, end_ns, steps = trace.timeline(json.load(file), roles)
    table = document(breakdown(events, start_ns, end_ns), end_ns - start_ns, steps, facts)
    table |= {"clock_ms": clock_ms, "bench_ms": bench_ms}
    try:
        (folder / TABLE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(folder / TABLE, error) from error
    report.write(folder, f"profile: {facts['benchmark']} {facts['config']}", sections(table))
    return text(table)


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}", str(error), "free space, or choose another --out")


def document(rows: dict[str, list[Row]], window_ns: int, steps: int, facts: dict) -> dict:
    """Return the content of profile.json: per step, in milliseconds unless the key says otherwise.

    The classes sum to window_ms.
    """

    def entry(row: Row) -> dict:
        return {
            "name": row.name,
            "ms": row.exposed_ns / 1e6 / steps,
            "share": row.exposed_ns / window_ns,
            "us_per_token": row.exposed_ns / 1e3 / steps / facts["tokens_per_step_per_rank"],
            "kernel_ms": row.kernel_ns / 1e6 / steps,
            "hidden_ms": row.hidden_ns / 1e6 / steps,
            "launches": row.launches / steps,
            "tflops": row.flops / row.kernel_ns / 1e3 if row.flops and row.kernel_ns else None,
        }

    return (
        facts
        | {"window_ms": window_ns / 1e6 / steps}
        | {name: list(map(entry, part)) for name, part in rows.items()}
    )


def _heading(profile: dict) -> list[str]:
    """Return lines that describe the profile, with a NOTE if trace and clock disagree."""
    over_clock, cost = (
        profile["window_ms"] / profile["clock_ms"] - 1,
        profile["clock_ms"] / profile["bench_ms"] - 1,
    )
    what = (
        "ops of the main thread, each without the ops it calls"
        if profile["device"] == "cpu"
        else "kernels"
    )
    lines = [
        f"PROFILE {profile['benchmark']} {profile['config']} {profile['precision']}, {profile['layers']} layers, rank 0 of "
        f"{profile['world_size']} on {profile['device']}, torch {profile['torch']}, {profile['steps']} steps of "
        f"{profile['tokens_per_step_per_rank']:,} tokens; {what}",
        f"step {profile['window_ms']:.2f} ms in the trace, {profile['clock_ms']:.2f} by the clock ({over_clock:+.2%}), "
        f"{profile['bench_ms']:.2f} without profiler (which costs {cost:+.1%})",
    ]
    note = f"NOTE: trace and clock differ by more than {CLOCK_AGREES:.0%}; the table is of the trace's step"
    return [*lines, note] if abs(over_clock) > CLOCK_AGREES else lines


def _cells(rows: list[dict]) -> list[tuple[str, ...]]:
    return [
        (
            row["name"],
            *("" if row[key] is None else format(row[key], form) for key, form in COLUMNS.items()),
        )
        for row in rows
    ]


def text(profile: dict) -> str:
    """Return the profile as text for a terminal."""
    lines = _heading(profile)
    for part, title in PARTS.items():
        rows = profile[part][:OTHERS_PRINTED] if part == "others" else profile[part]
        width = min(60, max([len(title), *(len(row["name"]) for row in rows)]))
        table = [(title, *COLUMNS), *_cells(rows)] if rows else []
        lines += [
            "",
            *(
                f"{name[:width]:{width}}" + "".join(f"{cell:>13}" for cell in rest)
                for name, *rest in table
            ),
        ]
    return "\n".join(lines)


def sections(profile: dict) -> list[Section]:
    """Return the sections of the page: tables of PARTS that have rows, and bars of the classes."""
    kinds = {"ms": "nothing else runs", "hidden_ms": "behind other kernels"}
    bars = tuple(
        (row["name"], row[key], kind)
        for row in profile["classes"]
        for key, kind in kinds.items()
        if row["kernel_ms"] or row["ms"]
    )
    drawing = Drawing(
        Plot("bars", "Where a step's time went", "name", "ms", "kind"),
        ("", "ms per step"),
        bars,
        {},
    )
    made, numbers = [], (False, *[True] * len(COLUMNS))
    for part, title in PARTS.items():
        more: tuple = (tuple(_heading(profile)), (drawing,)) if part == "classes" else ()
        made.append(
            Section(
                f"By {title}",
                "measured here",
                (title, *COLUMNS),
                numbers,
                tuple(_cells(profile[part])),
                *more,
            )
        )
    return [section for section in made if section.rows]
