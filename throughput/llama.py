"""Measure training steps of Llama-like models, full or LoRA, using the benchmarks' own code.

Tokens are synthetic. The optimizer is included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.estimate.memory import gib, with_micro_batch
from common.gpu_kinds import KINDS, GpuKind
from common.machine.host import cpu_count
from common.measure.tables import Column, Plot, PublishedValues, Table, time_columns
from launch.job import Job, Node, directories
from launch.processes.ranks import cpus_of_ranks
from launch.selection.check import Choice
from launch.selection.machine import NO_GPUS, Machine
from launch.tune.command import fastest
from launch.tune.search import text_of
from launch.tune.target import Target
from throughput import machine
from throughput.llama_case import TINY, LlamaCase, case_of, case_to_tune
from throughput.memory import OUT_OF_MEMORY
from throughput.ranks import MEASURED, run_ranks
from throughput.result import Result, TimedRow
from throughput.timing import per_second

TABLES = (
    Table(
        "llama",
        "Training steps of Llama-like models",
        (
            Column("model", "Model"),
            Column("mode", "Mode"),
            Column("precision", "Precision"),
            Column("layers", "Layers", "", "d"),
            Column("seq", "Sequence", "", ",d"),
            Column("gpus", "GPUs", "", "d"),
            Column("batch", "Batch per GPU", "", "d"),
            Column("micro_batches", "Micro-batches", "", "d"),
            Column("settings", "Settings"),
            Column("tokens_per_s_per_gpu", "Tokens/s per GPU", "", ",.0f"),
            Column("tokens_per_s", "Tokens/s in all", "", ",.0f"),
            *time_columns(),
            Column("tflops", "TFLOP/s per GPU", "", ".4g"),
            Column("tflops_12lsh", "TFLOP/s per GPU, 12LSH", "", ".4g"),
            Column("mfu", "MFU", "%", ".1f"),
            Column("allocated_gib", "Peak memory", "GiB", ".1f"),
            Column("reserved_gib", "Reserved", "GiB", ".1f"),
            Column("planned_gib", "Planned", "GiB", ".1f"),
            Column("note", "Note"),
        ),
        keys=("model", "mode", "precision", "layers", "seq", "gpus", "batch", "micro_batches"),
        value="tokens_per_s_per_gpu",
        formulas=(
            "Step: forward, backward, reduction of the gradients, clipping, AdamW in fp32 on fp32 "
            "master weights. full: every weight trains; optimizer and gradients are sharded over "
            "the GPUs (ZeRO-2). lora: the base is frozen; adapters of rank 16 on attention train.",
            "Precision: in fp8 the products of the blocks, in bf16 all products. On a CPU fp32 "
            "replaces bf16. The median step counts. p10 and p90 are percentiles.",
            "Batch: sequences per micro-batch and GPU. With --batch a step is one micro-batch. "
            "Without it, a benchmark's model at its sequence length has the micro-batch and the "
            "accumulation of its config, and other models have the largest batch that fits.",
            "TFLOP/s = tokens/s x (6N + 6LSH) / 1e12. N: weights in products, L: layers, S: tokens "
            "per sequence, H: width of attention. Causal attention counts half of the square; "
            "12LSH counts the whole. lora: 4N + 6 x adapters replaces 6N. Recomputation is not "
            "counted.",
            "MFU: time of the products at the dense peaks of this GPU kind / step. In fp8, the "
            "blocks' linear layers count at the FP8 peak, and attention, adapters and head at the "
            "bf16 peak.",
            "Peak memory: of torch's allocator. Planned: the calculated peak memory "
            "(common/estimate/memory.py). With --batch max, the first batch is the largest that "
            "fits "
            "by this calculation.",
        ),
        plots=(
            Plot(
                "bars",
                "Tokens per second and GPU",
                "model, mode, seq",
                "tokens_per_s_per_gpu",
                "precision",
            ),
        ),
        published=(
            PublishedValues(
                "llama_fsdp", ("model", "mode", "precision", "layers", "seq"), "tflops"
            ),
            PublishedValues(
                "qwen3_8b", ("model", "mode", "precision", "layers", "seq"), "tokens_per_s_per_gpu"
            ),
        ),
    ),
)


def measure(options: argparse.Namespace, result: Result) -> None:
    """Measure each number of GPUs.

    Before any measurement, raises ConfigError for wrong options, and OutOfMemory if no batch fits
    by calculation.
    """
    kind = gpu_kind() if options.device == "cuda" else None
    if options.resume and not options.search:
        raise ConfigError(
            "--resume without --search", "only a search can be resumed", "add --search MINUTES"
        )
    starting_case = case_to_tune if options.search else case_of
    for case in [starting_case(options, kind, gpus) for gpus in options.gpus]:
        if options.search:
            case = tuned(case, options, result)
        while not result.attempt(case.row(), partial(run, case, options, result)):
            is_full = case.largest and result.rows[-1]["error"] == OUT_OF_MEMORY
            smaller = case.config.micro_batch_size - 1
            if not is_full or not smaller:
                break
            case = replace(case, config=with_micro_batch(case.config, smaller))


def tuned(case: LlamaCase, options: argparse.Namespace, result: Result) -> LlamaCase:
    """Return the case with the settings that a search finds fastest for the same step.

    Raises the errors of `launch.tune.command.fastest`.
    """
    config = case.config
    here = Machine.of(os.environ) if case.kind else NO_GPUS
    model = case.family.name.strip("/").replace("/", "-")
    path = Path(f"{model}_{case.mode}_{config.gpu}_1x{config.gpus_per_node}.toml")
    choice = Choice(
        config, path, path.name, "throughput llama", options.device, here.describe(case.kind)
    )
    job = Job(
        case.benchmark,
        choice,
        here,
        *directories(case.benchmark, config, os.environ),
        os.environ,
        Node(),
        save=False,
        cpus=cpus_of_ranks(here.probe, config.gpus_per_node) if case.kind else (),
    )
    target = Target(job, case.work, tuple(model_arguments(case)))
    found = fastest(target, options.search, options.resume, result.data["command"])
    note = "; ".join(filter(None, [case.source, f"tuned: {text_of(found.best)}"]))
    return replace(case, config=found.config, source=note)


def gpu_kind() -> GpuKind:
    """Return the kind of this machine's GPU.

    A kind that is not in common/gpu_kinds.py is named "unknown". It has the sizes that the driver
    reports, and no peaks.
    """
    import torch

    here = Machine.of(os.environ)
    first = here.probe.devices[0]
    memory = torch.cuda.get_device_properties(0).total_memory
    return KINDS.get(machine.kind_of(here)) or GpuKind(
        "unknown", here.probe.vendor, first.arch, first.compute_units, memory, 0.0, 0.0
    )


def model_arguments(case: LlamaCase) -> list[str]:
    """Return the options of common.measure.bench for the model and its sequence length."""
    arguments = ["--seq", str(case.work.sequence_length)]
    arguments += ["--layers", str(case.work.shape.num_layers)]
    if case.family.name != TINY:
        arguments += ["--model", case.family.name]
    return arguments


def run(case: LlamaCase, options: argparse.Namespace, result: Result) -> TimedRow:
    """Run the case with one process per GPU. Raises the RunError of the rank that failed."""
    config = case.config
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        folder = Path(name)
        file = folder / "config.toml"
        file.write_text(config.as_toml())
        arguments = ["common.measure.bench", "--benchmark", case.benchmark, "--config", str(file)]
        arguments += ["--device", options.device]
        arguments += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
        arguments += [*model_arguments(case), "--result", str(folder / MEASURED)]
        threads = 1 if case.kind else max(1, cpu_count() // config.gpus_per_node)
        measured, error = run_ranks(
            folder, config.gpus_per_node, arguments, config.env, threads=threads
        )
    if error:
        raise error
    return TimedRow(values_of(case, options, measured, result), measured["times_ms"])


def values_of(
    case: LlamaCase, options: argparse.Namespace, measured: dict[str, Any], result: Result
) -> dict[str, Any]:
    """Return the columns that follow from the measurements."""
    shape = case.work.shape
    length = case.work.sequence_length
    config = case.config
    rate = per_second(measured["times_ms"], config.global_batch_size * length)
    rate_per_gpu = rate / config.world_size
    flops = shape.training_flops(length, case.work.lora_rank)
    tflops = rate_per_gpu * flops.total / 1e12
    # 6LSH counts half of the attention's square. The same once more gives 12LSH.
    whole_square = flops.total + shape.attention_flops_per_token(length)
    return {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate_per_gpu,
        "tflops": tflops,
        "tflops_12lsh": rate_per_gpu * whole_square / 1e12,
        "mfu": result.percent(tflops, options.precision, flops),
        "allocated_gib": gib(measured["allocated"]) or None,
        "reserved_gib": gib(measured["reserved"]) or None,
    }
