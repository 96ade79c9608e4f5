"""Plan: what a config, or a layout of a model, needs on some GPUs, and how `plan` describes it.

The formulas are in common/estimate/. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from common import engines, terminal, text_tables
from common.benchmarks import Rules, divisions, load_all, rules_of
from common.config import RunConfig
from common.errors import ConfigError
from common.estimate.memory import (
    Memory,
    fits,
    gib,
    host_bytes,
    largest_micro_batch,
    memory_peak,
    offloaded_layers,
    usable_bytes,
)
from common.estimate.step_time import Estimate, estimate, host_seconds
from common.estimate.verdict import verdict
from common.estimate.workload import Workload, benchmark_workload
from common.gpu_kinds import KINDS, GpuKind
from common.paths import ROOT
from common.records import published, rcp
from common.terminal import plural
from common.text_tables import number
from launch.selection.machine import NO_GPUS

SOURCES = """\
Calculated, not measured. Memory is counted tensor by tensor. Speed on H100 and H200 follows from
our own runs on H200s. Speed on AMD GPUs follows from AMD's published MLPerf results and thus
describes AMD's software. For the MI300X and MI325X these are results of LoRA alone; the one 8B
result on an MI325X (v6.0, MiTAC) is a fifth slower than planned here. Nothing of this package was
run on an AMD GPU, and no whole model on an H100."""

# Columns of tables: keys of `cells`.
SPEED = ["tok/s/GPU", "step ms", "evaluation s", "minutes to target"]
ALL = [
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
    "best published score",
]
LAYOUTS = ["layout", "trained by this package", "needed", "usable", "fits", "largest micro-batch"]
# A result of MLPerf Training is made of ten runs.
COSTS = ["config", "minutes to target", "ten runs, hours", "GPU-hours of ten runs"]
EVERY_KIND = ["GPU", "fits", "largest micro-batch", *SPEED, "best published score"]
EVERY_KIND_OF_A_MODEL = ["GPU", "fits", "largest micro-batch", "tok/s/GPU", "step ms", "days"]


@dataclass(frozen=True)
class Plan:
    """A config, or a layout of a model, on GPUs of one kind."""

    name: str  # of the benchmark or the model
    source: str  # the config's file, or the layout
    config: RunConfig
    work: Workload
    kind: GpuKind | None  # None: a CPU
    samples: float | None = None  # training sequences of the run; None: unknown
    rules: Rules | None = None  # None: a model without a benchmark
    is_trained: bool = True  # whether this package trains in this way
    other_state: Mapping[str, float] | None = None  # see `memory_peak`

    @property
    def memory(self) -> Memory:
        """Peak memory of one GPU."""
        return memory_peak(self.config, self.work, self.other_state)

    @property
    def fits(self) -> bool:
        """Whether the peak fits. The memory of a CPU is not calculated."""
        return self.kind is None or fits(self.memory, self.kind)

    @property
    def estimate(self) -> Estimate | None:
        """Planned speed, None for a CPU, for unknown peaks and for a layout that is not trained."""
        if self.kind is None or not self.kind.efficiency or not self.is_trained:
            return None
        return estimate(self.config, self.work, self.kind, self.samples)


def config_plan(benchmark: str, source: str, config: RunConfig, kind: GpuKind | None) -> Plan:
    """Return the plan of a config on GPUs of `kind`, None for a CPU.

    `source`: its file, or the file that it was derived from.
    """
    rules = rules_of(benchmark, config)
    samples = rcp.mean_samples(rules, config.global_batch_size)
    work = benchmark_workload(benchmark, config)
    return Plan(benchmark, source, config, work, kind, samples, rules)


def all_plans(benchmark: str, overrides: dict[str, str] | None = None) -> list[Plan]:
    """Return the plans of all files in configs/<benchmark>/. Raises ConfigError."""
    loaded = load_all(ROOT, benchmark, overrides)
    return [
        config_plan(benchmark, name, config, NO_GPUS.kind_of(config))
        for name, config in loaded.items()
    ]


def as_dict(plan: Plan) -> dict:
    """Return the config, its memory in bytes and the estimate, or only the config for a CPU.

    A model has no config: "trained" says whether this package trains the layout.
    """
    report: dict[str, Any] = {"benchmark": plan.name, "config": asdict(plan.config)}
    if plan.rules is None:
        report = {"model": plan.name, "trained": plan.is_trained}
    if plan.kind is None:
        return report
    memory = plan.memory
    sizes = {
        "allocated": memory.allocated,
        "needed": memory.needed,
        "usable": usable_bytes(plan.kind),
        "fits": plan.fits,
    }
    speed = plan.estimate
    return report | {"memory": sizes, "estimate": asdict(speed) if speed else None}


# --- tables ---------------------------------------------------------------------------------------


def cells(plan: Plan) -> dict[str, str]:
    """Return the cell of each column of the tables of plans."""
    config = plan.config
    row = dict.fromkeys([*ALL, *COSTS, *LAYOUTS, *EVERY_KIND, *EVERY_KIND_OF_A_MODEL], "-")
    row |= {
        "config": plan.source,
        "layout": plan.source,
        "GPU": config.gpu,
        "format": precision(config),
        "micro-batch": str(config.micro_batch_size),
        "trained by this package": "yes" if plan.is_trained else "no",
    }
    counts = {"recompute_layers": config.recompute_layers, "offload_layers": config.offload_layers}
    for (key, layers), column in zip(counts.items(), ("recomputed", "offloaded"), strict=True):
        if config.has_key(key):
            row[column] = str(layers)
    if plan.kind is None:
        return row
    memory = plan.memory
    largest = largest_micro_batch(config, plan.work, plan.kind, plan.other_state)
    row |= {
        "GiB allocated": f"{gib(memory.allocated):.1f}",
        "needed": f"{gib(memory.needed):.1f}",
        "usable": f"{gib(usable_bytes(plan.kind)):.1f}",
        "fits": "yes" if plan.fits else "NO",
        "largest micro-batch": str(largest),
    }
    row["best published score"] = best_score(plan.name, config.gpu, config.world_size)
    speed = plan.estimate
    if speed is None:
        return row
    row |= {
        "tok/s/GPU": f"{speed.tokens_per_s_per_gpu:,.0f}",
        "step ms": f"{speed.step_s * 1e3:,.0f}",
        "evaluation s": f"{speed.eval_s:.1f}",
    }
    if speed.minutes is not None:
        row["minutes to target"] = f"{speed.minutes:,.1f}"
        row["days"] = f"{speed.minutes / 1440:,.2f}"
        hours = speed.minutes / 60 * rcp.SUBMISSION_RUNS
        row["ten runs, hours"] = f"{hours:,.1f}"
        row["GPU-hours of ten runs"] = f"{hours * config.world_size:,.0f}"
    return row


def best_score(benchmark: str, gpu: str, gpus: int) -> str:
    """Return the best published score in minutes on these GPUs, with its batch, or "-"."""
    for result in published.published(benchmark, gpu, gpus):
        if result.score:
            return f"{result.score:.2f} (batch {result.batch})"
    return "-"


def plans_table(columns: Sequence[str], plans: Iterable[Plan]) -> str:
    """Return a table with a row for each plan."""
    rows = []
    for plan in plans:
        row = cells(plan)
        rows.append([row[column] for column in columns])
    return table(columns, rows)


def kinds_table(plan: Plan) -> str:
    """Return a table of the config on the same number of GPUs of every kind.

    Each row of a benchmark includes the best published score with that many GPUs.
    """
    plans = []
    for kind in KINDS.values():
        changes: dict[str, Any] = {"gpu": kind.name}
        if kind.vendor == "amd" and plan.config.reduce_scatter == "copy_engine":
            changes["reduce_scatter"] = "nccl"  # copy engines are refused on AMD GPUs
        plans.append(replace(plan, config=replace(plan.config, **changes), kind=kind))
    return plans_table(EVERY_KIND if plan.rules else EVERY_KIND_OF_A_MODEL, plans)


def memory_table(memory: Memory) -> str:
    """Return a table of a GPU's memory at its peak, in GiB, by kind of tensor."""
    rows = []
    for name, size in memory.parts.items():
        if gib(size) >= 0.05:
            rows.append([name, f"{gib(size):.1f}"])
    rows.append(["sum", f"{gib(memory.allocated):.1f}"])
    return table([f"per GPU, in {memory.moment}", "GiB"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the first column to the left, the others to the right.

    On a terminal rich fits it to the width. Elsewhere, and without rich, it is aligned Markdown.
    """
    alignment = "<" + ">" * (len(head) - 1)
    if sys.stdout.isatty() and terminal.has_rich():
        return "\n".join(terminal.table([head, *rows], alignment))
    aligned = text_tables.align([head, *rows], alignment)
    text = text_tables.markdown(aligned[0], aligned[1:], alignment)
    return text.rstrip("\n")


# --- description ----------------------------------------------------------------------------------


def describe(plan: Plan, ways: Iterable[str], layouts: Sequence[Plan] = ()) -> list[str]:
    """Return the lines that describe a plan.

    `ways`: changes that would make it fit. `layouts`: of a model, all its layouts.
    """
    config = plan.config
    work = plan.work
    kind = plan.kind
    lines = [title(plan), ""]
    if kind is None:
        return [*lines, "Memory and speed of a CPU are not calculated."]
    if layouts:
        lines += [f"In GiB per GPU:\n{plans_table(LAYOUTS, layouts)}", ""]
    lines += [memory_table(plan.memory), "", f"It {verdict(plan.memory, kind, ways)}."]
    if offloaded_layers(config, work):
        lines.append(
            f"Pinned host memory: {gib(host_bytes(config, work)):.1f} GiB for each of a "
            f"node's {config.gpus_per_node} GPUs."
        )
    most = largest_micro_batch(config, work, kind)
    share = config.global_batch_size // config.data_ranks
    limit = f" The global batch allows {share}." if plan.rules and most > share else ""
    count = "one GPU" if config.world_size == 1 else f"{config.world_size} GPUs"
    settings = f"The same settings on {count} of every kind"
    if plan.rules:
        settings += ", whose own configs may differ (plan --all)"
    return [
        *lines,
        f"Largest micro-batch that fits if nothing else changes: {most}.{limit}",
        "",
        *size_lines(plan, kind),
        *speed_lines(plan, kind),
        *([engines_line(config, kind)] if plan.rules else []),
        *cost_lines(plan),
        "",
        f"{settings}:",
        "",
        kinds_table(plan),
        "",
        *([target_line(plan)] if plan.rules else []),
        SOURCES,
    ]


def precision(config: RunConfig) -> str:
    """Return the precision of the linear layers, for display."""
    return "FP8" if config.linear_format.in_fp8 else config.precision


def title(plan: Plan) -> str:
    """Return the line with name, source, GPUs, batch and precision."""
    config = plan.config
    shared = ""
    if config.context_parallel > 1:
        shared = f", each sequence on {config.context_parallel} GPUs"
    return (
        f"{plan.name}, {plan.source}: {config.world_size} x {config.gpu}{shared}, "
        f"global batch {config.global_batch_size} = {config.data_ranks} x micro-batch "
        f"{config.micro_batch_size} x {config.gradient_accumulation_steps}, {precision(config)}"
    )


def size_lines(plan: Plan, kind: GpuKind) -> list[str]:
    """Return the model's size, the GPUs' memory, and the FLOPs per token that MFU counts."""
    work = plan.work
    shape = work.shape
    gpus = plan.config.world_size
    length = work.sequence_length
    what = "all weights trained"
    flops = shape.training_flops(length, work.lora_rank).total
    formula = "6 N + 6 L S H"
    if work.lora_rank:
        what = f"LoRA of rank {work.lora_rank}"
        formula = "4 N + 6 N_lora + 6 L S H"
    return [
        f"{shape.num_parameters / 1e9:.2f}e9 weights, {2 * shape.num_parameters / 1e9:,.0f} GB in "
        f"bf16; {what}; sequences of {length:,} tokens.",
        f"{gpus} x {kind.name} of {gib(kind.memory_bytes):.0f} GiB, "
        f"{gib(gpus * kind.memory_bytes):,.0f} GiB in all.",
        f"{flops / 1e9:.2f} GFLOP per token = {formula}, with N = "
        f"{shape.matmul_parameters / 1e9:.3f}e9 weights in matrix products.",
    ]


def speed_lines(plan: Plan, kind: GpuKind) -> list[str]:
    """Return the planned tokens/s, and the time and GPU-hours of the run."""
    speed = plan.estimate
    if speed is None:
        return [f"Speed: unknown, because the peak FLOP/s of {kind.name} is unknown."]
    gpus = plan.config.world_size
    rate = speed.tokens_per_s_per_gpu
    text = [f"Speed: {rate:,.0f} tokens/s per GPU, {rate * gpus:,.0f} on {plural(gpus, 'GPU')}."]
    if speed.step_s <= host_seconds(plan.config, plan.work) + speed.exposed_s:
        text.append(
            "The host's launches limit the speed: larger micro-batches or fewer GPUs a sequence "
            "raise it."
        )
    if plan.samples and speed.minutes:
        tokens = plan.samples * plan.work.sequence_length
        share = tokens / plan.work.shape.num_parameters
        hours = speed.minutes / 60
        time = f"{hours / 24:,.2f} days" if hours > 48 else f"{hours:,.1f} hours"
        text.append(
            f"Time: {tokens / 1e9:,.1f}e9 tokens ({number(share, ',.3g')} per weight) take "
            f"{time}, {hours * gpus:,.0f} GPU-hours."
        )
    return text


def engines_line(config: RunConfig, kind: GpuKind) -> str:
    """Return the engines that a run begins with if it has the packages installed here."""
    environment = {**os.environ, **config.env}
    operations = engines.operations(config.linear_format.in_fp8)
    try:
        choices = engines.choose_engines(kind.arch, environment, config.precision, operations)
    except ConfigError as error:  # the config pins an engine
        return f"Engines: {error.what} ({error.why})."
    return f"Engines with the packages installed here: {choices}."


def cost_lines(plan: Plan) -> list[str]:
    """Return the time of the ten runs of a result, and the files to fetch, in the closed division.

    The time is that from run_start to run_stop.
    """
    if plan.rules is None or plan.rules.division != "closed":
        return []
    row = cells(plan)
    hours, gpu_hours = row["ten runs, hours"], row["GPU-hours of ten runs"]
    lines = [] if hours == "-" else [f"A result is ten runs: {hours} hours, {gpu_hours} GPU-hours."]
    return lines + fetch_lines(plan.name)


def fetch_lines(benchmark: str) -> list[str]:
    """Return the files that a closed run needs, with size, source and license, and their sum."""
    rules = divisions(benchmark).get("closed")
    lines = []
    total = 0
    for part in rules.downloads if rules else ():
        size = terminal.data_size(part.size_bytes)
        lines.append(f"To fetch: {part.what}, {size}, from {part.source}; license: {part.license}.")
        total += part.size_bytes
    if lines:
        lines.append(
            f"Disk: {terminal.data_size(total)} for these files. ./run_and_time.sh {benchmark} "
            "prepare fetch says how to get them, and whether that needs a login."
        )
    return lines


def target_line(plan: Plan) -> str:
    """Say where a benchmark's number of sequences to the target comes from."""
    batch = plan.config.global_batch_size
    if plan.samples is None:
        return (
            f"The minutes to the target are unknown, since the MLPerf reference was not run at "
            f"global batch {batch}."
        )
    return (
        f"Minutes to the target: for {plan.samples:,.0f} sequences, the mean of the MLPerf "
        f"reference at global batch {batch}, and for the evaluations."
    )
