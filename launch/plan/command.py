"""Check whether a config fits into the GPU's memory, and estimate how long the run takes.

`./run_and_time.sh <benchmark> plan` needs no GPU and no torch.

    plan                      the config that fits this machine; without a GPU, all configs
    DGXSYSTEM=B200_1x4 plan   the config for these GPUs, derived if configs/ has no file
    plan --config FILE        one config; if it has gpu = "any", on this machine
    plan --all                a table of all configs of the benchmark
    plan --scaling GPU        minutes to the target on 1 to 512 of these GPUs
    plan ... --set K=V        with one value changed

Exit code 0 if everything fits, 12 if something does not, 2 for a wrong command line or config. The
formulas are in memory.py and step_time.py of launch/plan/. `./run_and_time.sh plan` without a
benchmark plans any model (launch/plan/any_model.py).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.benchmarks import closed, config_keys, example_config, load_all, rules_of
from common.command_line import (
    Parser,
    add_set_option,
    exit_code_of,
    refuse_without,
    split_benchmark,
)
from common.config import ANY_GPU, RunConfig
from common.errors import OutOfMemory
from common.estimate.memory import (
    fits,
    gib,
    host_bytes,
    largest_micro_batch,
    memory_peak,
    offloaded_layers,
    usable_bytes,
)
from common.estimate.step_time import Estimate, estimate
from common.estimate.verdict import verdict
from common.estimate.workload import Workload, benchmark_workload
from common.gpu_kinds import KINDS, GpuKind
from common.machine.hardware import config_names
from common.paths import ROOT
from common.records import published, rcp
from launch.plan import any_model, scaling_table
from launch.plan.tables import memory_table, table
from launch.selection.check import FITTED, Choice
from launch.selection.choose import choose, require_config
from launch.selection.machine import NO_GPUS, Machine
from launch.selection.request import Request

SOURCES = """\
Calculated, not measured. Memory is counted tensor by tensor. Speed on H100 and H200 follows from
our own runs on H200s. Speed on AMD GPUs follows from AMD's published MLPerf results and thus
describes AMD's software. For the MI300X and MI325X these are results of LoRA alone; the one 8B
result on an MI325X (v6.0, MiTAC) is a fifth slower than planned here. Nothing of this package was
run on an AMD GPU, and no whole model on an H100."""


def main(root: Path, benchmark: str, arguments: list[str]) -> int:
    """Print the plan of one config or of all. Return 0, or 12 if a config does not fit."""
    options = parser(benchmark).parse_args(arguments)
    if options.scaling is not None:
        return scaling_table.main(root, benchmark, options)
    refuse_without("--scaling", {"--network": options.network, "--page": options.page})
    # `plan` describes configs of any machine: no variable of a real run requires a GPU here.
    request = replace(Request.of(benchmark, options, os.environ), environment={})
    choice, machine = (None, NO_GPUS) if options.all else _choice(request)
    if choice is None:
        require_config(request)
        loaded = load_all(root, benchmark, {**request.overrides})
        lines = [all_table(benchmark, loaded), "", SOURCES]
    else:
        loaded = {choice.path.stem: choice.config}
        source = choice.derived or str(choice.path)
        title, *details = describe(benchmark, source, choice.config, machine.kind_of(choice.config))
        note = _fitted_note(choice.config) if choice.source == FITTED else []
        lines = [title, *note, *details]
    if options.json:
        plans = {
            name: as_dict(benchmark, config, machine.kind_of(config))
            for name, config in loaded.items()
        }
        lines = [json.dumps(plans, indent=1)]
    print("\n".join(lines))
    if all(_fits(benchmark, config, machine) for config in loaded.values()):
        return 0
    return OutOfMemory.exit_code


def parser(benchmark: str = "") -> Parser:
    """Return the parser of a benchmark's configs, or of any model without a benchmark."""
    if not benchmark:
        return any_model.parser()
    example = example_config(benchmark, "H200_1x8", "pretrain_1b")
    examples = [f"{benchmark} plan --all", f"{benchmark} plan --config {example}"]
    if benchmark in closed():
        examples.append(f"{benchmark} plan --scaling MI355X --network 50")
    default = "default: selected for the GPUs found"
    if not config_names(ROOT, benchmark):
        examples = [f"{benchmark} plan --config {example} --set gpu=H200"]
        default = "required"
    parser = Parser(f"{benchmark} plan", __doc__, examples)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", metavar="FILE", help=f"config file ({default})")
    which.add_argument("--all", action="store_true", help="plan every config of the benchmark")
    parser.add_argument(
        "--scaling",
        choices=KINDS,
        metavar="GPU",
        help="minutes to the target on 1 to 512 GPUs of this kind, each at its best global batch; "
        "for a benchmark without reference runs: minutes of the run that --config describes",
    )
    scaling_table.add_options(parser)
    add_set_option(parser, config_keys(benchmark))
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object with the numbers by config name"
    )
    return parser


def as_dict(benchmark: str, config: RunConfig, kind: GpuKind | None) -> dict:
    """Return the config, its memory in bytes and the estimate, or only the config for a CPU."""
    report = {"benchmark": benchmark, "config": asdict(config)}
    if kind is None:
        return report
    memory = memory_peak(config, benchmark_workload(benchmark, config))
    sizes = {
        "allocated": memory.allocated,
        "needed": memory.needed,
        "usable": usable_bytes(kind),
        "fits": fits(memory, kind),
    }
    speed = asdict(benchmark_estimate(benchmark, config, kind)) if kind.efficiency else None
    return report | {"memory": sizes, "estimate": speed}


def _choice(request: Request) -> tuple[Choice | None, Machine]:
    """Return the choice to describe, None for all configs, and the machine that it depends on.

    Objections are ignored. The driver is asked only if the config depends on this machine.
    """
    is_named = request.file is not None or request.system != ""
    if is_named:
        choice = choose(request, NO_GPUS)
        if choice.source != FITTED:
            return choice, NO_GPUS
    machine = Machine.of(os.environ)
    if machine.kind or is_named:
        return choose(request, machine), machine
    return None, machine


def _fitted_note(config: RunConfig) -> list[str]:
    """Say which machine a config of gpu = "any" was fitted to, and how to plan another one."""
    name = f"{config.gpus_per_node} x {config.gpu}"
    if config.gpu == "CPU":
        name = "a CPU, since no GPU is visible"
    return [
        "",
        f'The config has gpu = "{ANY_GPU}" and was fitted to this machine: {name}.',
        "For another machine, name its GPUs: --set gpu=H200 --set gpus_per_node=8",
    ]


def _fits(benchmark: str, config: RunConfig, machine: Machine) -> bool:
    kind = machine.kind_of(config)
    if kind is None:
        return True
    memory = memory_peak(config, benchmark_workload(benchmark, config))
    return fits(memory, kind)


def benchmark_estimate(benchmark: str, config: RunConfig, kind: GpuKind) -> Estimate:
    """Return the planned step time, tokens/s and minutes to the target of `config` on `kind`."""
    return estimate(
        config,
        benchmark_workload(benchmark, config),
        kind,
        rcp.mean_samples(rules_of(benchmark, config), config.global_batch_size),
    )


def describe(benchmark: str, source: str, config: RunConfig, kind: GpuKind | None) -> list[str]:
    """Return the lines that describe one config on GPUs of `kind`, which is None for a CPU.

    `source`: its file, or the file that it was derived from.
    """
    work = benchmark_workload(benchmark, config)
    machine = f"{config.world_size} x {config.gpu}"
    batch = (
        f"global batch {config.global_batch_size} = {config.world_size} x micro-batch "
        f"{config.micro_batch_size} x {config.gradient_accumulation_steps}"
    )
    precision = "FP8" if config.linear_format.in_fp8 else config.precision
    title = f"{benchmark}, {source}: {machine}, {batch}, {precision}"
    if kind is None:
        return [title, "", "Memory and speed of a CPU are not calculated."]
    memory = memory_peak(config, work)
    lines = [title, "", memory_table(memory), "", f"It {verdict(memory, config, work, kind)}."]
    if offloaded_layers(config, work):
        lines.append(
            f"Pinned host memory: {gib(host_bytes(config, work)):.1f} GiB for each of a "
            f"node's {config.gpus_per_node} GPUs."
        )
    largest = largest_micro_batch(config, work, kind)
    share = config.global_batch_size // config.world_size
    limit = f" The global batch allows {share}." if largest > share else ""
    lines.append(f"Largest micro-batch that fits if nothing else changes: {largest}.{limit}")
    lines += ["", flops_line(work), "", kinds_caption(config), "", kinds_table(benchmark, config)]
    lines += ["", target_line(benchmark, config), SOURCES]
    return lines


def flops_line(work: Workload) -> str:
    """Return the line with the FLOPs per token that MFU counts, and their formula."""
    shape = work.shape
    length = work.sequence_length
    flops = shape.training_flops_per_token(length)
    formula = "6 N + 6 L S H"
    if work.lora_rank:
        flops = shape.lora_flops_per_token(length, work.lora_rank)
        formula = "4 N + 6 N_lora + 6 L S H"
    return (
        f"{flops / 1e9:.2f} GFLOP per token = {formula}, with N = "
        f"{shape.matmul_parameters / 1e9:.3f}e9 weights in matrix products."
    )


def target_line(benchmark: str, config: RunConfig) -> str:
    """Say where the number of sequences to the target comes from."""
    samples = rcp.mean_samples(rules_of(benchmark, config), config.global_batch_size)
    batch = config.global_batch_size
    if samples is None:
        return (
            f"The minutes to the target are unknown, since the MLPerf reference was not run at "
            f"global batch {batch}."
        )
    return (
        f"Minutes to the target: for {samples:,.0f} sequences, the mean of the MLPerf reference "
        f"at global batch {batch}, and for the evaluations."
    )


SPEED = ["tok/s/GPU", "step ms", "evaluation s", "minutes to target"]


def _speed(planned: Estimate) -> list[str]:
    """Return the cells of the columns SPEED."""
    minutes = "-" if planned.minutes is None else f"{planned.minutes:,.1f}"
    return [
        f"{planned.tokens_per_s_per_gpu:,.0f}",
        f"{planned.step_s * 1e3:,.0f}",
        f"{planned.eval_s:.1f}",
        minutes,
    ]


def kinds_caption(config: RunConfig) -> str:
    """Return the sentence above `kinds_table`."""
    count = config.world_size
    gpus = "one GPU" if count == 1 else f"{count} GPUs"
    return f"The same settings on {gpus} of every kind, whose own configs may differ (plan --all):"


def kinds_table(benchmark: str, config: RunConfig) -> str:
    """Return a table of the config on the same number of GPUs of every kind.

    Each row includes the best published score with that many GPUs.
    """
    rows = []
    for kind in KINDS.values():
        changes: dict[str, Any] = {"gpu": kind.name}
        if kind.vendor == "amd" and config.reduce_scatter == "copy_engine":
            changes["reduce_scatter"] = "nccl"  # copy engines are refused on AMD GPUs
        here = replace(config, **changes)
        work = benchmark_workload(benchmark, here)
        fit = "yes" if fits(memory_peak(here, work), kind) else "NO"
        best_score = "-"
        for result in published.published(benchmark, kind.name, config.world_size):
            if result.score:
                best_score = f"{result.score:.2f} (batch {result.batch})"
                break
        largest = str(largest_micro_batch(here, work, kind))
        speed = _speed(benchmark_estimate(benchmark, here, kind))
        rows.append([kind.name, fit, largest, *speed, best_score])
    return table(["GPU", "fits", "largest micro-batch", *SPEED, "best published score"], rows)


def all_table(benchmark: str, loaded: dict[str, RunConfig]) -> str:
    """Return a table with one row per config."""
    head = [
        "config",
        "format",
        "micro-batch",
        "recomputed",
        "offloaded",
        "GiB allocated",
        "needed",
        "usable",
        "fits",
        *SPEED,
    ]
    return table(head, [_row(benchmark, name, config) for name, config in loaded.items()])


def _row(benchmark: str, name: str, config: RunConfig) -> list[str]:
    """Return the row of a config in `all_table`."""
    work = benchmark_workload(benchmark, config)
    kind = NO_GPUS.kind_of(config)
    counts = {"recompute_layers": config.recompute_layers, "offload_layers": config.offload_layers}
    layers = [str(count) if config.has_key(key) else "-" for key, count in counts.items()]
    row = [
        name,
        "FP8" if config.linear_format.in_fp8 else config.precision,
        str(config.micro_batch_size),
        *layers,
    ]
    if kind is None:
        return [*row, *"-" * 8]
    memory = memory_peak(config, work)
    usable = usable_bytes(kind)
    sizes = [f"{gib(size):.1f}" for size in (memory.allocated, memory.needed, usable)]
    return [
        *row,
        *sizes,
        "yes" if fits(memory, kind) else "NO",
        *_speed(benchmark_estimate(benchmark, config, kind)),
    ]


if __name__ == "__main__":
    given, rest = split_benchmark(sys.argv[1:])
    sys.exit(exit_code_of(lambda: main(ROOT, given, rest) if given else any_model.main(rest)))
