"""Some steps under torch's profiler: a trace for Perfetto, and where the time went as a table and as profile.json.

All ranks step; rank 0 alone is profiled and writes. The steps are as `measure` runs them: random tokens, optimizer included.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.errors import StorageError
from common.model.llama import Llama
from common.sharding.processes import Processes
from common.training.metrics import StepClock
from throughput import trace
from throughput.kernel_time import IDLE, Breakdown, Row, breakdown

TRACE, TABLE = "trace.json.gz", "profile.json"
OTHERS_SHOWN = 3
CLOCK_AGREES = 0.01  # the window of the trace against the clock of the same steps


@dataclass(frozen=True)
class Facts:
    """What was profiled; goes into profile.json as it is."""

    benchmark: str
    config: str
    precision: str
    layers: int
    world_size: int
    device: str
    torch: str
    steps: int
    tokens_per_step_per_rank: int


def record(step: Callable[[], object], steps: int, folder: Path, processes: Processes) -> float:
    """Run a lead-in and `steps` more, on rank 0 under the profiler, which leaves folder/trace.json.gz. To be called on all ranks.

    Returns the mean milliseconds of a step by this rank's clock: CUDA events on a GPU, the monotonic clock on a CPU.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if processes.device.type == "cuda" else [])]
    writes = processes.rank == 0
    profiler = profile(activities=activities, record_shapes=True) if writes else None
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
            raise StorageError(f"cannot write {folder / TRACE}", str(error), "free space, or choose another --out") from error
    processes.barrier()  # none may leave the group while rank 0 still collects
    return statistics.mean(times_ms)


def summarize(folder: Path, model: Llama, micro_batch_tokens: int, facts: Facts, clock_ms: float, bench_ms: float) -> str:
    """Read the trace in `folder`, write profile.json beside it and return the table for people.

    `clock_ms`: a step while profiled, from `record`; `bench_ms`: the same without the profiler, before it in the same process.
    """
    line = trace.timeline(trace.load(folder / TRACE), weights_of(model), micro_batch_tokens)
    table = document(breakdown(line.events, line.start_ns, line.end_ns), line.steps, facts, clock_ms, bench_ms)
    try:
        (folder / TABLE).write_text(json.dumps(table, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {folder / TABLE}", str(error), "free space, or choose another --out") from error
    return text(table)


def weights_of(model: Llama) -> list[trace.Weight]:
    """The matrices that take part in products, with their role: the parameter's name without what all layers share."""
    shared = ("blocks", "base", "weight")
    found = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and not name.startswith("embedding"):
            role = " ".join(word for word in name.split(".") if word not in shared and not word.isdigit())
            found.append(trace.Weight(role, parameter.shape[0], parameter.shape[1], parameter.requires_grad))
    return found


def document(found: Breakdown, steps: int, facts: Facts, clock_ms: float, bench_ms: float) -> dict:
    """profile.json: per step, in milliseconds unless the name says otherwise. The classes sum to window_ms."""
    window_ms = found.window_ns / 1e6 / steps

    def entry(row: Row) -> dict:
        busy_s = row.kernel_ns / 1e9
        return {
            "name": row.name,
            "ms": row.exposed_ns / 1e6 / steps,
            "share": row.exposed_ns / found.window_ns,
            "us_per_token": row.exposed_ns / 1e3 / steps / facts.tokens_per_step_per_rank,
            "kernel_ms": row.kernel_ns / 1e6 / steps if row.name != IDLE else 0.0,
            "hidden_ms": row.hidden_ns / 1e6 / steps,
            "launches": row.launches / steps,
            "tflops": row.flops / busy_s / 1e12 if row.flops else None,
        }

    return {
        **vars(facts),
        "window_ms": window_ms,
        "clock_ms": clock_ms,
        "bench_ms": bench_ms,
        "classes_sum_ms": sum(row.exposed_ns for row in found.classes) / 1e6 / steps,
        "window_over_clock": window_ms / clock_ms,
        "profiler_overhead": clock_ms / bench_ms - 1,
        "classes": [entry(row) for row in found.classes],
        "products": [entry(row) for row in found.products],
        "others": [entry(row) for row in found.others],
    }


def text(table: dict) -> str:
    """The document for a terminal."""
    what = "kernels" if table["device"] != "cpu" else "ops of the main thread, each without the ops it calls"
    lines = [
        f"PROFILE {table['benchmark']} {table['config']} {table['precision']}, {table['layers']} layers, rank 0 of {table['world_size']} on "
        f"{table['device']}, {table['steps']} steps of {table['tokens_per_step_per_rank']:,} tokens; {what}",
        f"step {table['window_ms']:.2f} ms in the trace, {table['clock_ms']:.2f} by the clock "
        f"({table['window_over_clock'] - 1:+.2%}), {table['bench_ms']:.2f} without profiler ({table['profiler_overhead']:+.1%} for it)",
    ]
    if abs(table["window_over_clock"] - 1) > CLOCK_AGREES:
        lines.append(f"NOTE: trace and clock differ by more than {CLOCK_AGREES:.0%}: the table is of the trace's step, not of the clock's")
    lines += ["", f"{'class':14}{'ms':>10}{'share':>8}{'us/token':>10}{'kernel ms':>11}{'hidden ms':>11}{'launches':>10}"]
    lines += [_line(row, 14) for row in table["classes"]]
    lines.append(f"{'sum':14}{table['classes_sum_ms']:10.3f}{sum(row['share'] for row in table['classes']):8.1%}")
    width = 2 + max((len(row["name"]) for row in table["products"]), default=0)
    lines += ["", "GEMM by role and shape M x N x K"]
    lines += [f"{_line(row, min(width, 60))}{_rate(row['tflops'])}" for row in table["products"]]
    lines += ["", f"largest of class other ({len(table['others'])} names in profile.json)"]
    lines += [f"{row['ms']:10.3f} ms  {row['name'][:110]}" for row in table["others"][:OTHERS_SHOWN]] or ["none"]
    return "\n".join(lines)


def _line(row: dict, width: int) -> str:
    return (
        f"{row['name'][: width - 1]:{width}}{row['ms']:10.3f}{row['share']:8.1%}{row['us_per_token']:10.3f}"
        f"{row['kernel_ms']:11.3f}{row['hidden_ms']:11.3f}{row['launches']:10,.0f}"
    )


def _rate(tflops: float | None) -> str:
    return f"{tflops:10.3g} TFLOP/s" if tflops else ""
