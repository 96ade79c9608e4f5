"""Training steps of Llama-like models, full or LoRA, by the code that trains the benchmarks.

Tokens are synthetic. The optimizer is included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import config as configs
from common.benchmarks import config_class, divisions, measured_in
from common.command_line import complete, count, minutes
from common.config import RunConfig
from common.errors import ConfigError, OutOfMemory, RunError
from common.gpu_kinds import KINDS, GpuKind
from common.hardware import Probe, config_path, probe
from common.model.families import FAMILIES, Family, family_of
from common.paths import ROOT
from launch.job import Job, Node, directories
from launch.plan.derive_config import fitting, moved, nearest_file
from launch.plan.memory import (
    Memory,
    fits,
    gib,
    largest_micro_batch,
    memory_peak,
    usable_bytes,
    with_micro_batch,
)
from launch.plan.workload import Workload, model_workload
from launch.processes.ranks import cpus_of_ranks
from launch.select_config import Selection, describe
from launch.tune.command import fastest
from launch.tune.search import text_of
from launch.tune.target import Target
from throughput import machine, shared_options
from throughput.memory import require_host_memory
from throughput.ranks import MEASURED, run_ranks
from throughput.result import Result, TimedRow
from throughput.tables import Column, Plot, PublishedValues, Table, time_columns
from throughput.timing import spread

TINY = "miniature"  # shape of the benchmarks' miniatures, for a CPU
SEQUENCES = {"cuda": 8192, "cpu": 128}
SAVES_MEMORY = {"full": "recompute_layers", "lora": "offload_layers"}

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
            Column("mfu", "MFU, % of BF16 peak", "", ".1f"),
            Column("percent", "% of the precision's peak", "", ".1f"),
            Column("allocated_gib", "Peak memory", "GiB", ".1f"),
            Column("reserved_gib", "Reserved", "GiB", ".1f"),
            Column("planned_gib", "Planned", "GiB", ".1f"),
            Column("note", "Note"),
        ),
        keys=("model", "mode", "precision", "layers", "seq", "gpus", "batch"),
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
            "Peak memory: of torch's allocator. Planned: the calculated peak memory "
            "(launch/plan/memory.py). With --batch max, the first batch is the largest that fits "
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
            PublishedValues("llama_fsdp", ("model", "precision", "seq"), "tflops"),
            PublishedValues(
                "qwen3_8b", ("model", "mode", "precision", "seq"), "tokens_per_s_per_gpu"
            ),
        ),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"one of {', '.join(FAMILIES)}, {TINY}, or a Hugging Face config.json of type llama, "
        f"mistral or qwen3 (default: llama3.1-8b, on a CPU {TINY})",
    )
    complete(model, [*FAMILIES, TINY])
    parser.add_argument(
        "--lora", action="store_true", help="freeze the base and train adapters of rank 16"
    )
    parser.add_argument("--layers", type=count, metavar="N", help="use only the first N layers")
    shared_options.add(
        parser,
        "precision",
        seq={"help": "tokens per sequence (default: 8192, on a CPU 128)"},
        batch={
            "help": "sequences per GPU and step, or max for the largest that fits "
            "(default: that of the benchmark, or max)"
        },
    )
    shared_options.add(parser, "gpus", warmup={"default": 3}, steps={"default": 10})
    parser.add_argument(
        "--tune",
        type=minutes,
        metavar="MINUTES",
        help="first search for the fastest settings of the same step, for at most MINUTES",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --tune: continue the newest search in LOGDIR for the same model, commit, "
        "packages and GPUs",
    )


@dataclass(frozen=True)
class Case:
    """One model on one number of GPUs, with its settings."""

    family: Family
    mode: str  # "full" or "lora"
    config: RunConfig
    work: Workload
    kind: GpuKind | None  # None: a CPU
    source: str  # origin of the settings, "" if they are those of a file in configs/

    @property
    def benchmark(self) -> str:
        return measured_in(self.mode)

    @property
    def planned(self) -> Memory | None:
        """The calculated memory on a GPU, or None for a CPU."""
        if self.kind is None:
            return None
        # There is no evaluation: its micro-batch is set to the smallest.
        return memory_peak(replace(self.config, eval_micro_batch_size=1), self.work)

    def row(self) -> dict[str, Any]:
        """Return the columns that are known before the measurement."""
        config = self.config
        settings = []
        if config.recompute_layers:
            settings.append(f"{config.recompute_layers} layers recomputed")
        if config.offload_layers:
            settings.append(f"{config.offload_layers} layers offloaded")
        if config.frozen_base:
            settings.append(f"base {config.frozen_base}")
        if config.moment_precision == "bf16":
            settings.append("moments bf16")
        notes = []
        window = self.family.sliding_window
        if window is not None and self.work.sequence_length > window:
            notes.append(f"without the sliding window of {window}: attention sees all tokens")
        if self.source:
            notes.append(self.source)
        return {
            "model": self.family.name,
            "mode": self.mode,
            "precision": "fp8" if config.linear_format.in_fp8 else config.precision,
            "layers": self.work.shape.num_layers,
            "seq": self.work.sequence_length,
            "gpus": config.world_size,
            "batch": config.micro_batch_size,
            "micro_batches": config.gradient_accumulation_steps,
            "settings": ", ".join(settings),
            "note": "; ".join(notes),
            "planned_gib": gib(self.planned.allocated) if self.planned else None,
        }


def measure(options: argparse.Namespace, result: Result) -> None:
    """Measure each number of GPUs.

    Before any measurement, raises ConfigError for wrong options, and OutOfMemory if no batch fits
    by calculation.
    """
    kind = gpu_kind() if options.device == "cuda" else None
    if options.resume and not options.tune:
        raise ConfigError(
            "--resume without --tune", "only a search can be resumed", "add --tune MINUTES"
        )
    starting_case = case_to_tune if options.tune else case_of
    for case in [starting_case(options, kind, gpus) for gpus in options.gpus]:
        if options.tune:
            case = tuned(case, options, result)
        while not attempt(case, options, result):
            smaller = case.config.micro_batch_size - 1
            if options.batch != shared_options.MAX or not smaller:
                break
            case = replace(case, config=with_micro_batch(case.config, smaller))


def case_to_tune(options: argparse.Namespace, kind: GpuKind | None, gpus: int) -> Case:
    """Return the case that a search starts from. Raises the errors of `case_of`.

    The value of --batch need not fit as one micro-batch, because the search may divide it.
    """
    if options.batch in (None, shared_options.MAX):
        return case_of(options, kind, gpus)
    smallest = argparse.Namespace(**vars(options) | {"batch": 1})
    case = case_of(smallest, kind, gpus)
    return replace(case, config=changed(case.config, "global_batch_size", options.batch * gpus))


def tuned(case: Case, options: argparse.Namespace, result: Result) -> Case:
    """Return the case with the settings that a search finds fastest for the same step.

    Raises the errors of `launch.tune.command.fastest`.
    """
    config = case.config
    gpus = probe(os.environ) if case.kind else Probe("none")
    model = case.family.name.strip("/").replace("/", "-")
    path = Path(f"{model}_{case.mode}_{config.gpu}_1x{config.gpus_per_node}.toml")
    selection = Selection(
        config, path, path.name, "throughput llama", options.device, describe(gpus, case.kind)
    )
    job = Job(
        case.benchmark,
        selection,
        gpus,
        *directories(case.benchmark, config, os.environ),
        os.environ,
        Node(),
        save=False,
        cpus=cpus_of_ranks(gpus, config.gpus_per_node) if case.kind else (),
    )
    target = Target(job, case.work, tuple(model_arguments(case)))
    found = fastest(target, options.tune, options.resume, result.data["command"])
    note = "; ".join(filter(None, [case.source, f"tuned: {text_of(found.best)}"]))
    return replace(case, config=found.config, source=note)


def gpu_kind() -> GpuKind:
    """Return the kind of this machine's GPU.

    A kind that is not in common/gpu_kinds.py is named "unknown". It has the sizes that the driver
    reports, and no peaks.
    """
    import torch

    detected = probe(os.environ)
    first = detected.devices[0]
    memory = torch.cuda.get_device_properties(0).total_memory
    return KINDS.get(machine.kind_of(detected)) or GpuKind(
        "unknown", detected.vendor, first.arch, first.compute_units, memory, 0.0, 0.0
    )


def model_of(options: argparse.Namespace) -> Family:
    """Return the model of --model with the layers of --layers. Raises ConfigError."""
    name = options.model or (TINY if options.device == "cpu" else "llama3.1-8b")
    if name == TINY and options.device != "cpu":
        raise ConfigError(
            f"--model {TINY}",
            "it is only for a CPU: on a GPU its steps would measure the time of kernel launches",
            "name another model, with --layers 1 if it must be small",
        )
    if name == TINY:
        family = Family(TINY, divisions(measured_in("full"))["miniature"].shape)
    else:
        family = family_of(name)
    layers = options.layers or family.shape.num_layers
    if layers > family.shape.num_layers:
        raise ConfigError(
            f"--layers {layers} is too large",
            f"{family.name} has {family.shape.num_layers} layers",
            f"use --layers {family.shape.num_layers} or less",
        )
    return replace(family, shape=replace(family.shape, num_layers=layers))


def case_of(options: argparse.Namespace, kind: GpuKind | None, gpus: int) -> Case:
    """Return the case for `gpus` GPUs, with its batch and the settings that fit.

    `kind`: None for a CPU. Raises ConfigError, and OutOfMemory if no batch fits by calculation.
    """
    family = model_of(options)
    mode = "lora" if options.lora else "full"
    rules = divisions(measured_in(mode))["closed"]
    length = options.seq or SEQUENCES[options.device]
    work = model_workload(family.shape, length, rules.lora_rank)
    config, source = config_of(measured_in(mode), kind, gpus, options.precision)
    case = Case(family, mode, config, work, kind, source)
    if kind is None:
        return _case_on_cpu(case, options.batch or 1)
    # The benchmark's model with fewer layers counts as well, as for `bench --layers`.
    as_benchmark = (
        replace(family.shape, num_layers=rules.shape.num_layers) == rules.shape
        and length == rules.sequence_length
    )
    if as_benchmark and not options.batch and fits(memory_peak(config, work), kind):
        return case
    largest = options.batch in (None, shared_options.MAX)
    config = with_micro_batch(config, 1 if largest else options.batch)
    config = replace(config, eval_micro_batch_size=1)
    config = settings_that_fit(replace(case, config=config), as_benchmark)
    if largest:
        config = with_micro_batch(config, largest_micro_batch(config, work, kind))
    return replace(case, config=config)


def _case_on_cpu(case: Case, batch: int | str) -> Case:
    """Return the case with this batch.

    Raises ConfigError for "max", and OutOfMemory if the host has too little memory.
    """
    if batch == shared_options.MAX:
        raise ConfigError(
            "--batch max needs a GPU",
            "the largest batch is calculated from the memory of a GPU",
            "give a number, such as --batch 1",
        )
    case = replace(case, config=with_micro_batch(case.config, int(batch)))
    require_host_memory(case_name(case), host_bytes(case.config, case.work))
    return case


def config_of(
    benchmark: str, kind: GpuKind | None, gpus: int, linear: str
) -> tuple[RunConfig, str]:
    """Return a config for `gpus` GPUs of this kind in precision `linear`, and its origin.

    The origin is "" if configs/ has a file for them, otherwise text that names the nearest file.
    """
    name = kind.name if kind else "CPU"
    path = config_path(ROOT, benchmark, "CPU_1x1")
    if kind:
        path = nearest_file(ROOT, benchmark, kind, gpus)
    file = configs.load(path, config_class(benchmark))
    changes: dict[str, Any] = {**moved(file, kind, gpus, linear)}
    if file.gpus_per_node != gpus:
        changes["global_batch_size"] = file.micro_batch_size * gpus
    if file.gpu != name:
        changes["env"] = {}
    origin = "" if path.stem == f"{name}_1x{gpus}" else f"settings from {path.name}"
    return replace(file, **changes), origin


def settings_that_fit(case: Case, as_benchmark: bool) -> RunConfig:
    """Return a config that fits by calculation, with as few changes as possible.

    It recomputes or offloads only as many layers as necessary. LoRA shards the base only if
    necessary. A benchmark's config that fits (`as_benchmark`) is returned unchanged. Raises
    OutOfMemory if no settings fit.
    """
    config = case.config
    work = case.work
    kind = case.kind
    key = SAVES_MEMORY[case.mode]
    assert kind is not None
    if as_benchmark and fits(memory_peak(config, work), kind):
        return config
    starts = [changed(config, key, 0)]
    if case.mode == "full":
        starts.append(changed(starts[0], "moment_precision", "bf16"))
    kept = {"micro_batch_size": str(config.micro_batch_size)}
    for start in starts:
        if fitted := fitting(start, start, work, kind, kept):
            return fitted
    smallest = starts[-1]
    most_layers = work.shape.num_layers
    if case.mode == "lora":
        smallest = changed(smallest, "frozen_base", "sharded")
        if not config.linear_format.in_fp8:
            most_layers = 0  # LoRA in bf16 offloads no layers
    raise does_not_fit(replace(case, config=changed(smallest, key, most_layers)))


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    """Return `config` with another value of `key`, which only some benchmarks' configs have."""
    return replace(config, **{key: value})


def case_name(case: Case) -> str:
    """Return model, mode, batch and number of GPUs (on a CPU: of processes), for an error."""
    config = case.config
    kind = case.kind.name if case.kind else "CPU"
    batch = f"batch {config.micro_batch_size} of {case.work.sequence_length} tokens"
    return f"{case.family.name}, {case.mode}, {batch} on {config.world_size} x {kind}"


def host_bytes(config: RunConfig, work: Workload) -> float:
    """Return the bytes that all processes on a CPU need together, by calculation."""
    config = replace(config, eval_micro_batch_size=1)
    return config.world_size * memory_peak(config, work).allocated


def does_not_fit(case: Case) -> OutOfMemory:
    """Return the error for a case that does not fit, with its four largest parts of memory."""
    memory = case.planned
    kind = case.kind
    assert memory is not None and kind is not None
    usable = usable_bytes(kind)
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {gib(size):.0f}" for name, size in largest)
    needed = f"{gib(memory.needed):.0f} of {gib(usable):.0f} GiB"
    why = f"by calculation the smallest settings need {needed} on each GPU: {parts} GiB"
    do = "use --lora, fewer --layers, a smaller --batch or --seq, or more --gpus"
    if case.mode == "full" and memory.parts.get("gathered weights", 0) > usable / 2:
        do = (
            "use --lora or fewer --layers; more GPUs do not help, "
            "because ZeRO-2 keeps all weights in bf16 on each GPU"
        )
    return OutOfMemory(f"{case_name(case)} does not fit", why, do)


def attempt(case: Case, options: argparse.Namespace, result: Result) -> bool:
    """Run the case and add its row. Return False if memory ran out.

    Raises RunError for any other failure.
    """
    row = case.row()
    try:
        timed = run(case, options, result)
    except RunError as error:
        if error.exit_code != OutOfMemory.exit_code:
            raise
        result.add(row | {"error": "out of memory"})
        return False
    result.add(row | timed.values, timed.samples_ms)
    return True


def model_arguments(case: Case) -> list[str]:
    """Return the options of throughput.bench that describe the model and its sequence length."""
    arguments = ["--seq", str(case.work.sequence_length)]
    arguments += ["--layers", str(case.work.shape.num_layers)]
    if case.family.name != TINY:
        arguments += ["--model", case.family.name]
    return arguments


def run(case: Case, options: argparse.Namespace, result: Result) -> TimedRow:
    """Run the case with one process per GPU. Raises the RunError of the rank that failed."""
    config = case.config
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        folder = Path(name)
        file = folder / "config.toml"
        file.write_text(config.as_toml())
        arguments = ["throughput.bench", "--benchmark", case.benchmark, "--config", str(file)]
        arguments += ["--device", options.device]
        arguments += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
        arguments += [*model_arguments(case), "--result", str(folder / MEASURED)]
        threads = 1 if case.kind else max(1, (os.cpu_count() or 1) // config.gpus_per_node)
        measured, error = run_ranks(
            folder, config.gpus_per_node, arguments, config.env, threads=threads
        )
    if error:
        raise error
    return TimedRow(values_of(case, options, measured, result), measured["times_ms"])


def values_of(
    case: Case, options: argparse.Namespace, measured: dict[str, Any], result: Result
) -> dict[str, Any]:
    """Return the columns that follow from the measurements."""
    shape = case.work.shape
    length = case.work.sequence_length
    config = case.config
    seconds = spread(measured["times_ms"])["ms"] / 1e3
    rate = config.global_batch_size * length / seconds
    rate_per_gpu = rate / config.world_size
    flops = shape.training_flops_per_token(length)
    if case.work.lora_rank:
        flops = shape.lora_flops_per_token(length, case.work.lora_rank)
    tflops = rate_per_gpu * flops / 1e12
    # 6LSH counts half of the attention's square. The same once more gives 12LSH.
    whole_square = flops + shape.attention_flops_per_token(length)
    return {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate_per_gpu,
        "tflops": tflops,
        "tflops_12lsh": rate_per_gpu * whole_square / 1e12,
        "mfu": result.percent(tflops, "bf16"),
        "percent": result.percent(tflops, options.precision),
        "allocated_gib": gib(measured["allocated"]) or None,
        "reserved_gib": gib(measured["reserved"]) or None,
    }
