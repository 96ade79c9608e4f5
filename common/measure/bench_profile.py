"""Profiled steps after a bench: by torch's profiler, its memory history, or another program.

common/measure/bench.py runs them after its timed steps if --profile is given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from common.config import RunConfig
from common.estimate.memory import memory_peak
from common.estimate.workload import benchmark_workload
from common.measure import memory_profile, time_profile
from common.model.llama import Llama
from common.paths import ROOT
from common.repository import commit_of
from common.sharding.processes import Processes
from common.training.assembly import Assembly
from common.training.metrics import Meter


def profiled(
    config: RunConfig,
    args: argparse.Namespace,
    assembly: Assembly,
    processes: Processes,
    meter: Meter,
    step: Callable[[], object],
) -> Callable[[], str] | None:
    """Run `args.steps` more steps under the profiler that `args.of` selects.

    Return a function that writes the files and returns the table. Only rank 0 calls it, after the
    process group has ended. Return None if `args.of` is "outside".
    """
    model = assembly.model
    if args.of == "outside":
        run_marked_steps(step, args.steps, processes)
        return None
    facts = facts_of(config, args, model, processes, meter)
    if args.of == "memory":
        return memory_profiled(config, args, assembly, processes, facts, step)
    clock_ms = time_profile.record(step, args.steps, args.profile, processes)
    bench_ms = statistics.mean(meter.step_times_ms)
    tokens = config.micro_batch_size * model.max_sequence_length // config.context_parallel
    return partial(time_profile.summarize, args.profile, model, tokens, facts, clock_ms, bench_ms)


def memory_profiled(
    config: RunConfig,
    args: argparse.Namespace,
    assembly: Assembly,
    processes: Processes,
    facts: dict,
    step: Callable[[], object],
) -> Callable[[], str] | None:
    """Record the allocations of `args.steps` steps, and compare their peak with `plan`.

    `facts`: from `facts_of`. On rank 0, return the function that `profiled` describes. On other
    ranks, return None.
    """
    recorded = memory_profile.record(step, args.steps, args.profile, assembly, processes)
    if recorded is None:  # not rank 0
        return None
    history, counted = recorded
    model = assembly.model
    work = replace(
        benchmark_workload(args.benchmark, config),
        shape=model.shape,
        sequence_length=model.max_sequence_length,
    )
    # The profiled steps include no evaluation.
    planned = memory_peak(replace(config, eval_micro_batch_size=1), work)
    facts = facts | {"plan": planned.allocated, "moment": planned.moment}

    def write() -> str:
        document = memory_profile.document(history, counted, facts)
        return memory_profile.write(args.profile, history, document)

    return write


def run_marked_steps(step: Callable[[], object], steps: int, processes: Processes) -> None:
    """Run `steps` steps for a profiler that runs this process.

    nsys and ncu wait for cudaProfilerStart. Each step is an NVTX range, on ROCm a ROCTx range.
    """
    on_gpu = processes.device.type == "cuda"
    # HIP does not support hipProfilerStart; rocprofv3 records from the beginning.
    starts_profiler = on_gpu and not torch.version.hip
    processes.barrier()
    if starts_profiler:
        torch.cuda.profiler.start()
    for number in range(steps):
        with torch.cuda.nvtx.range(f"step {number}") if on_gpu else nullcontext():
            step()
    processes.barrier()
    if starts_profiler:
        torch.cuda.profiler.stop()


def facts_of(
    config: RunConfig, args: argparse.Namespace, model: Llama, processes: Processes, meter: Meter
) -> dict:
    """Return the facts of this run for profile.json and memory.json."""
    device = "cpu"
    if processes.device.type == "cuda":
        device = torch.cuda.get_device_name(processes.device)
    return {
        "started": time.time(),
        "command": args.command,
        "commit": (commit_of(ROOT) or "unknown")[:12],
        "benchmark": args.benchmark,
        "config": Path(args.config).stem,
        "precision": precision_of(config),
        "layers": model.shape.num_layers,
        "world_size": processes.world_size,
        "device": device,
        "torch": torch.__version__,
        "steps": args.steps,
        "tokens_per_step_per_rank": meter.tokens_per_step // processes.world_size,
    }


def precision_of(config: RunConfig) -> str:
    """Return the precision of the config in words."""
    if config.linear == "bf16":
        return config.precision
    return f"{config.precision}, linear layers in {config.linear}"
