"""Throughput of a config's training step on synthetic tokens, optimizer included.

The steps run the code of the trainers. They read no data files and write no MLPerf log.

    python -m common.measure.bench --benchmark NAME --config FILE --device cuda|cpu
        [--steps N] [--layers N] [--profile DIR] ...

torchrun starts one process per GPU. Rank 0 prints a BENCH line to stdout, with the rate of the
median step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import config as configs
from common import engines
from common.benchmarks import config_class, require_layers, rules_of
from common.config import RunConfig
from common.gpu_kinds import GIB
from common.kernels.attention import attention_backends, attention_engine
from common.kernels.fp8 import product_engine
from common.kernels.swiglu import swiglu_engine
from common.measure.bench_profile import precision_of, profiled
from common.measure.defaults import STEPS, WARMUP
from common.model.families import shape_of
from common.model.llama import Llama
from common.model.precision import DTYPES
from common.self_test.kernel_cases import Sizes
from common.self_test.run import check_engines, require_sound
from common.sharding.processes import (
    Processes,
    high_priority_compute,
    max_over_ranks,
    require_world_size,
    start_processes,
)
from common.training import finetuning, pretraining
from common.training.assembly import Assembly, Batching
from common.training.guard import run_guarded
from common.training.loop import evaluate, rank_micro_batches, train_step
from common.training.metrics import (
    Events,
    Meter,
    StepRate,
    make_meter,
    memory_gib,
    peak_bytes,
)
from common.training.warmup import synthetic_batches
from common.values import count

LEARNING_RATE = 1e-6
PROFILE_HELP = (
    "what to profile: time (by torch's profiler), memory (torch's history of allocations), or "
    "outside (only mark the steps, for a profiler that runs this process) (default: time)"
)


def bench(config: RunConfig, args: argparse.Namespace) -> None:
    """Measure the training steps of `config` on one rank. `args`: the result of `parse`.

    Raises ConfigError for an unknown --model, or for more --layers than the model has.
    """
    rules = rules_of(args.benchmark, config)
    if args.model:
        rules = replace(rules, shape=shape_of(args.model))
    if args.seq:
        rules = replace(rules, sequence_length=args.seq)
    if args.layers:
        require_layers(args.layers, rules.shape.num_layers)
        rules = replace(rules, shape=replace(rules.shape, num_layers=args.layers))
    training = finetuning if rules.lora_rank else pretraining
    processes = start_processes(
        args.device,
        config.hang_timeout_s,
        high_priority_compute(config, rules),
        config.context_parallel,
    )
    require_world_size(processes, config.world_size)
    with attention_backends(processes.device.type, DTYPES[config.precision]):
        if processes.device.type == "cuda":  # reject engines that compute wrongly, as a run does
            sizes = Sizes.of(config, rules.shape, rules.sequence_length, rules.lora_rank)
            checked = check_engines(sizes, processes.device)
            require_sound(checked, processes.device)
            if processes.rank == 0:
                print(*checked.engine_lines(), sep="\n", file=sys.stderr, flush=True)
        assembly = training.assemble_random(config, rules, processes, args.seed)
        meter = make_meter(config, rules, processes, Events(None))
        measure(config, args, assembly, processes, meter)


def measure(
    config: RunConfig,
    args: argparse.Namespace,
    assembly: Assembly,
    processes: Processes,
    meter: Meter,
) -> None:
    """Run `args.warmup` untimed and `args.steps` timed steps, and print the result on rank 0.

    With `args.result`, write the result to that file instead, and return. Otherwise the evaluation
    of `args.eval_sequences` and the profile of `args.profile`, if they are given, follow.
    """
    model = assembly.model
    batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
    source = synthetic_batches(
        model.shape.vocab_size, model.max_sequence_length, processes, config.micro_batch_size
    )
    step = partial(train_step, assembly, source, batching, LEARNING_RATE, processes)
    for number in range(args.warmup + args.steps):
        if number == args.warmup:
            processes.barrier()
            meter.start()
        loss, norm = step()
        if number >= args.warmup:
            meter.record(number - args.warmup + 1, LEARNING_RATE, loss, norm)
    meter.flush()
    if args.result:
        write_result(args.result, processes, meter)
        return
    if processes.rank == 0:
        print(bench_line(config, args, model, processes, meter), flush=True)
        print(engines_line(args.benchmark, config, processes.device), flush=True)
    if processes.device.type == "cuda":
        print_saved_bytes(args.benchmark, model, processes, next(source))
    if args.eval_sequences:
        measure_evaluation(config, args, model, processes)
    summarize = None
    if args.profile:
        summarize = profiled(config, args, assembly, processes, meter, step)
    torch.distributed.destroy_process_group()
    if summarize and processes.rank == 0:
        print(summarize(), flush=True)


def write_result(path: Path, processes: Processes, meter: Meter) -> None:
    """Write step times and peak memory to `path` as JSON, for throughput/llama.py and `tune`.

    `times_ms`: milliseconds of each timed step. `allocated`, `reserved`: peak memory of the fullest
    rank in bytes, 0 on a CPU.
    """
    device = processes.device
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    peaks = max_over_ranks([peak_bytes(device), reserved], processes)
    if processes.rank == 0:
        measured = {
            "times_ms": meter.step_times_ms,
            "allocated": peaks[0],
            "reserved": peaks[1],
        }
        path.write_text(json.dumps(measured))
    torch.distributed.destroy_process_group()


def print_saved_bytes(benchmark: str, model: Llama, processes: Processes, batch: Tensor) -> None:
    """Print the bytes per token and layer that a forward keeps for its backward.

    The logits are not counted. `plan` calculates the same quantity.
    """
    with torch.no_grad():
        model(*batch.unbind(1))  # so that gathered and cast weights are already in memory
    before = torch.cuda.memory_allocated()
    losses = model(*batch.unbind(1))
    tokens = batch.shape[0] * batch.shape[2] // processes.context.size
    logits = 2 * tokens * model.shape.vocab_size  # bytes, in bf16
    saved = torch.cuda.memory_allocated() - before - logits
    del losses
    per_token = saved / (tokens * model.shape.num_layers)
    if processes.rank == 0:
        print(
            f"SAVED {benchmark}: {per_token:,.0f} bytes per token and layer for the backward, "
            f"{saved / GIB:.1f} GiB in total",
            flush=True,
        )


def measure_evaluation(
    config: RunConfig, args: argparse.Namespace, model: Llama, processes: Processes
) -> None:
    """Print the time of an evaluation of `args.eval_sequences` synthetic sequences.

    Padding gives every rank the same number of sequences. An untimed evaluation runs first.
    """
    count = args.eval_sequences
    length = model.max_sequence_length
    tokens = np.random.default_rng(0).integers(
        0, model.shape.vocab_size, (count, 2, length), np.int32
    )
    batches = rank_micro_batches(tokens, processes, config.eval_micro_batch_size)
    for _ in range(2):  # the first time does not count
        processes.barrier()
        began = time.monotonic()
        evaluate(model, batches, processes)  # ends with a sum over the ranks, which the host reads
        seconds = time.monotonic() - began
    rate = count * length / seconds / processes.world_size
    if processes.rank == 0:
        unit = "GPU" if processes.device.type == "cuda" else "process"
        print(
            f"EVALUATION {args.benchmark}: {count} sequences in {seconds:.2f} s, "
            f"{rate:,.0f} tok/s/{unit}, micro-batch {config.eval_micro_batch_size}",
            flush=True,
        )


def bench_line(
    config: RunConfig, args: argparse.Namespace, model: Llama, processes: Processes, meter: Meter
) -> str:
    """Return the BENCH line: what was measured, rate, step time, and peak memory of this rank."""
    median_ms = statistics.median(meter.step_times_ms)
    rate = StepRate.of(
        median_ms,
        meter.tokens_per_step,
        processes.world_size,
        meter.flops_per_token,
        meter.peak_tflops,
    )
    spread = f"{min(meter.step_times_ms):.1f}..{max(meter.step_times_ms):.1f}"
    reserved, allocated = memory_gib(processes.device).values()
    used = ""
    if reserved:
        # The memory in use includes NCCL's buffers, contexts and symmetric memory.
        free, total = torch.cuda.mem_get_info(processes.device)
        used = (
            f", peak {allocated:.1f} GiB allocated, {reserved:.1f} GiB reserved, "
            f"{(total - free) / GIB:.1f} GiB of the GPU in use"
        )
    layers = model.shape.num_layers
    batch = f"{config.micro_batch_size} x {config.gradient_accumulation_steps}"
    if config.context_parallel > 1:
        batch += f" / {config.context_parallel}"
    device = "GPU" if processes.device.type == "cuda" else "process"
    return (
        f"BENCH {args.benchmark} {Path(args.config).stem} {precision_of(config)}, {layers} layers, "
        f"{processes.world_size} x {batch} sequences of {model.max_sequence_length}: "
        f"{rate.text(device)}, step {median_ms:.1f} ms (median of {args.steps}; {spread}){used}"
    )


def engines_line(benchmark: str, config: RunConfig, device: torch.device) -> str:
    """Return the ENGINES line: the engines in use, and why faster ones are not used."""
    dtype = DTYPES[config.precision]
    choose = {
        engines.ATTENTION: partial(attention_engine, device, dtype),
        engines.PRODUCTS: partial(product_engine, device, dtype),
        engines.SWIGLU: partial(swiglu_engine, device),
    }
    used = []
    reasons = []
    for operation in engines.operations(config.linear_format.in_fp8):
        choice = choose[operation]()
        used.append(f"{operation} {choice.engine}")
        reasons += [str(engine) for engine in choice.faster]
    return "; ".join([f"ENGINES {benchmark}: {', '.join(used)}", *reasons])


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line that the launcher, `tune` or `throughput llama` wrote."""
    parser = argparse.ArgumentParser(
        prog="python -m common.measure.bench",
        description="Measure the throughput of a training step on synthetic tokens.",
    )
    parser.add_argument("--benchmark", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=count, default=STEPS)
    parser.add_argument("--warmup", type=count, default=WARMUP)
    parser.add_argument("--layers", type=count, help="use only the first N layers")
    parser.add_argument(
        "--model",
        default="",
        help="use the shape of this model (default: the benchmark's)",
    )
    parser.add_argument(
        "--seq",
        type=count,
        help="tokens per sequence (default: as in the benchmark)",
    )
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="write the times to FILE as JSON, and print nothing",
    )
    parser.add_argument(
        "--eval-sequences",
        type=count,
        help="also time an evaluation of this many sequences",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="then profile the same number of steps, and write the profile to DIR",
    )
    parser.add_argument(
        "--command", default="-", metavar="TEXT", help="the user's command, for the profile's page"
    )
    parser.add_argument(
        "--of", choices=("time", "memory", "outside"), default="time", help=PROFILE_HELP
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    rank = int(os.environ.get("RANK", "0"))
    config = configs.load(args.config, config_class(args.benchmark))
    profiled_outside = args.of == "outside" and args.device == "cuda"
    folder = args.result.parent if args.result else None
    run_guarded(
        folder,
        rank,
        partial(bench, config, args),
        lambda: None,
        lambda: 0,
        returns=profiled_outside,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
