"""Check whether a model fits into the memory of some GPUs, or calculate the MFU of a measured step.

`./run_and_time.sh plan` needs no benchmark, no GPU and no torch.

    plan --model NAME|config.json --gpus 8 --gpu MI300X [--lora] [--batch N] [--seq N]
         [--precision bf16|fp8] [--train-tokens X]
    plan --model NAME|config.json --gpu MI300X --scaling [--train-tokens X] [--batch N] ...
    plan --mfu --params 405e9 --tokens 1024 --seconds 30 --peak 1.3e15 --gpus 8
    plan --mfu --model NAME --batch 1 --seq 8192 --seconds 4.2 --gpu MI300X --gpus 8

The batch is that of one GPU. Exit code 0 if the model fits as this package trains it, 12 if not,
2 for a wrong command line. The formulas are in memory.py, step_time.py and mfu.py of launch/plan/.
`./run_and_time.sh <benchmark> plan` plans a config.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.command_line import Parser, complete, count, float_or_nan, refuse_without
from common.errors import ConfigError, OutOfMemory
from common.estimate.memory import fits, gib, largest, usable_bytes
from common.estimate.mfu import remark, utilization, with_attention
from common.estimate.workload import model_workload
from common.gpu_kinds import KINDS, GpuKind
from common.machine.hardware import MAX_GPUS
from common.model.families import FAMILIES, shape_of
from common.model.shapes import ModelShape
from common.terminal import plural
from launch.plan import scaling, scaling_table
from launch.plan.arrangements import Arrangement, arrangements
from launch.plan.tables import memory_table, table
from launch.selection.machine import Machine

LORA_RANK = 16  # the rank of the benchmark llama2_70b_lora
# Training tokens per weight that make the best use of compute (arXiv:2203.15556).
TOKENS_PER_WEIGHT = 20


@dataclass(frozen=True)
class ModelRequest:
    """A model to train and the GPUs to train it on.

    `batch`: sequences on one GPU that pass through the model at once.
    """

    name: str
    shape: ModelShape
    kind: GpuKind
    gpus: int
    batch: int
    sequence_length: int
    precision: str  # of the blocks' products: "bf16" or "fp8"
    lora_rank: int  # 0: all weights train
    train_tokens: float | None = None  # tokens of the training run; None: not requested

    def arrangements(self) -> list[Arrangement]:
        """Return all arrangements of the model on these GPUs, the fastest first."""
        return arrangements(
            self.shape,
            self.kind,
            self.gpus,
            self.batch,
            self.sequence_length,
            self.precision == "fp8",
            self.lora_rank,
        )

    def fitting(self) -> Arrangement | None:
        """Return the first arrangement of this package that fits, None if there is none."""
        for each in self.arrangements():
            if each.is_supported and fits(each.memory, self.kind):
                return each
        return None


def main(arguments: list[str]) -> int:
    """Plan a model, or calculate an MFU. Return 0, or 12 if the model does not fit."""
    options = parser().parse_args(arguments)
    _require_consistent(options)
    if options.mfu:
        print("\n".join(_mfu(options)))
        return 0
    request = _request(options)
    if options.scaling:
        return show_scaling(request, options)
    print("\n".join(describe(request)))
    return 0 if request.fitting() else OutOfMemory.exit_code


def _require_consistent(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not apply to the requested calculation."""
    if not options.scaling:
        refuse_without(
            "--scaling",
            {"--json": options.json, "--network": options.network, "--page": options.page},
        )
    if not options.mfu:
        names = ("params", "tokens", "seconds", "peak")
        refuse_without("--mfu", {f"--{name}": getattr(options, name) for name in names})
        return
    for option, value in {
        "--scaling": options.scaling,
        "--train-tokens": options.train_tokens,
    }.items():
        if value:
            raise ConfigError(
                f"--mfu with {option}",
                f"{option} does not apply to a measured step",
                f"leave out {option}; --tokens gives the tokens of the step",
            )


def parser() -> Parser:
    """Return the argument parser of `plan` without a benchmark."""
    parser = Parser("plan", __doc__)
    model = parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(FAMILIES)}, or a Hugging Face config.json",
    )
    complete(model, FAMILIES)
    gpu = parser.add_argument(
        "--gpu", metavar="KIND", help=f"{', '.join(KINDS)} (default: this machine's)"
    )
    complete(gpu, KINDS)
    _add_training_options(parser)
    group = parser.add_argument_group("days on 1 to 512 GPUs")
    group.add_argument(
        "--scaling",
        action="store_true",
        help="calculate the days for the training tokens on 1 to 512 GPUs, each with --batch "
        "sequences a step",
    )
    scaling_table.add_options(group)
    group.add_argument("--json", action="store_true", help="with --scaling: print JSON")
    group = parser.add_argument_group("MFU of a measured step")
    group.add_argument("--mfu", action="store_true", help="calculate the MFU of a measured step")
    for name, text in {
        "params": "number of weights, if --model is not given",
        "tokens": "tokens per step on all GPUs (default: gpus x batch x seq)",
        "seconds": "seconds per step",
        "peak": "dense FLOP/s of one GPU (default: of --gpu at --precision)",
    }.items():
        group.add_argument(f"--{name}", type=amount, metavar="X", help=text)
    return parser


def _add_training_options(parser: Parser) -> None:
    parser.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help="number of GPUs (default: those of this machine; 1 with --gpu)",
    )
    parser.add_argument(
        "--lora",
        nargs="?",
        type=count,
        const=LORA_RANK,
        default=0,
        metavar="RANK",
        help=f"train adapters of this rank on a frozen base (default rank: {LORA_RANK})",
    )
    parser.add_argument(
        "--batch",
        type=count,
        default=1,
        metavar="N",
        help="sequences per GPU and step (default: 1)",
    )
    parser.add_argument(
        "--seq", type=count, default=8192, metavar="N", help="tokens per sequence (default: 8192)"
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp8"),
        default="bf16",
        help="precision of the blocks' matrix products (default: bf16)",
    )
    parser.add_argument(
        "--train-tokens",
        type=amount,
        metavar="X",
        help=f"training tokens, to calculate the days (default: {TOKENS_PER_WEIGHT} per weight; "
        "none with --lora)",
    )


def amount(text: str) -> float:
    """Parse an argument that is a positive, finite number, such as 405e9."""
    number = float_or_nan(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number, such as 405e9")
    return number


def _request(options: argparse.Namespace) -> ModelRequest:
    """Return the request of the options. Raises ConfigError if they do not describe one."""
    if not options.model:
        raise ConfigError(
            "--model is required",
            "plan without a benchmark needs the shape of a model",
            f"use --model with {', '.join(FAMILIES)}, or a config.json",
        )
    gpus = options.gpus or 1
    if gpus > MAX_GPUS and gpus % MAX_GPUS:
        raise ConfigError(
            f"--gpus {gpus} is not supported",
            f"more than {MAX_GPUS} GPUs are planned as nodes of {MAX_GPUS}",
            f"use a multiple of {MAX_GPUS}",
        )
    shape = shape_of(options.model)
    if options.gpu:
        kind = _kind(options.gpu)
    else:
        machine = Machine.of(os.environ)
        kind = _kind_of(machine)
        gpus = options.gpus or machine.gpus
    tokens = options.train_tokens
    if tokens is None and not options.lora:
        tokens = TOKENS_PER_WEIGHT * shape.num_parameters
    return ModelRequest(
        options.model,
        shape,
        kind,
        gpus,
        options.batch,
        options.seq,
        options.precision,
        options.lora,
        tokens,
    )


def _kind(name: str) -> GpuKind:
    """Return the kind that --gpu names. Raises ConfigError for an unknown one."""
    if name not in KINDS:
        raise ConfigError(
            f"unknown GPU kind {name!r}",
            f"--gpu accepts {', '.join(KINDS)}",
            "use one of them, or omit --gpu to plan for this machine",
        )
    return KINDS[name]


def _kind_of(machine: Machine) -> GpuKind:
    """Return the kind of the machine's GPUs. Raises ConfigError without one."""
    if machine.kind is None:
        raise ConfigError(
            "--gpu is required",
            "this machine has no GPU",
            f"use --gpu with {', '.join(KINDS)}",
        )
    return machine.kind


# --- several nodes --------------------------------------------------------------------------------


def show_scaling(request: ModelRequest, options: argparse.Namespace) -> int:
    """Print the table of `plan --model --scaling`, and write its page.

    Return 0, or 12 if no number of GPUs fits. Raises ConfigError without a number of tokens, a
    bandwidth, or the GPU's peaks and links.
    """
    network = scaling_table.bandwidth(options)
    if not request.kind.efficiency or not request.kind.description:
        raise ConfigError(
            f"--scaling: the speed of {request.kind.name} or of its links is unknown",
            "common/gpu_kinds.py has no entry for it",
            f"use --gpu with {', '.join(KINDS)}",
        )
    if not request.train_tokens:
        raise ConfigError(
            "--scaling needs --train-tokens",
            "the tokens of a LoRA training have no default",
            "for example --train-tokens 1e9",
        )
    tokens = f"{request.train_tokens / 1e9:,.1f}e9 tokens"
    more = [
        f"{tokens} are trained. Each GPU has {request.batch} x {request.sequence_length} tokens a "
        "step, so the global batch grows with the GPUs.",
        "Whether a batch of that size needs more tokens is not calculated.",
    ]
    points = scaling_points(request, network)
    scaling_table.show(request.name, request.kind, scaling_table.MODEL_HEAD, points, options, more)
    return 0 if any(points.values()) else OutOfMemory.exit_code


def scaling_points(
    request: ModelRequest, network_gb_s: float
) -> dict[int, scaling.ScalingPoint | None]:
    """Return number of GPUs -> the time for the request's tokens, None if nothing fits."""
    work = model_workload(request.shape, request.sequence_length, request.lora_rank)
    samples = (request.train_tokens or 0) / request.sequence_length
    points: dict[int, scaling.ScalingPoint | None] = {}
    for gpus in scaling.counts():
        chosen = replace(request, gpus=gpus).fitting()
        points[gpus] = None
        if chosen and chosen.config:
            points[gpus] = scaling.scaling_point(
                chosen.config, work, request.kind, samples, network_gb_s
            )
    return points


# --- memory ---------------------------------------------------------------------------------------


def describe(request: ModelRequest) -> list[str]:
    """Return the lines about a model: a table of arrangements, memory, verdict and speed."""
    chosen = request.fitting()
    if chosen is None:
        supported = [each for each in request.arrangements() if each.is_supported]
        chosen = min(supported, key=lambda each: each.memory.allocated)
    return [
        title(request),
        "",
        arrangements_table(request),
        "",
        f"{chosen.name}:",
        memory_table(chosen.memory),
        "",
        verdict(request, chosen),
        *speed_lines(request, chosen),
        "Calculated, not measured; docs/plan.md describes the method.",
    ]


def title(request: ModelRequest) -> str:
    """Return the line with the model, its weights, its batch and the GPUs."""
    shape = request.shape
    kind = request.kind
    gpus = request.gpus
    what = f"LoRA of rank {request.lora_rank}" if request.lora_rank else "all weights trained"
    weights = (
        f"{shape.num_parameters / 1e9:.2f}e9 weights, {2 * shape.num_parameters / 1e9:,.0f} GB in "
        "bf16"
    )
    memory = (
        f"{gpus} x {kind.name} of {gib(kind.memory_bytes):.0f} GiB, "
        f"{gib(gpus * kind.memory_bytes):,.0f} GiB in all"
    )
    return (
        f"{request.name}: {weights}; {what}, {request.precision}, batch {request.batch} x "
        f"{request.sequence_length} tokens per GPU; {memory}"
    )


def speed_lines(request: ModelRequest, chosen: Arrangement) -> list[str]:
    """Return the planned tokens/s, and the days and GPU-hours of the training.

    Communication is assumed to be hidden behind computation, as in `estimate`.
    """
    if chosen.tokens_per_s_per_gpu is None:
        return [f"Speed: unknown, because the peak FLOP/s of {request.kind.name} is unknown."]
    speed = chosen.tokens_per_s_per_gpu
    total = speed * request.gpus
    counted = plural(request.gpus, "GPU")
    text = [f"Speed: {speed:,.0f} tokens/s per GPU, {total:,.0f} on {counted}."]
    if request.train_tokens:
        seconds = request.train_tokens / total
        share = request.train_tokens / request.shape.num_parameters
        text.append(
            f"Time: {request.train_tokens / 1e9:,.1f}e9 tokens ({share:,.3g} per weight) take "
            f"{seconds / 86_400:,.2f} days, {seconds * request.gpus / 3_600:,.0f} GPU-hours."
        )
    return text


def arrangements_table(request: ModelRequest) -> str:
    """Return a table of all arrangements.

    It includes arrangements that this package does not support, with the memory they need.
    """
    rows = []
    for each in request.arrangements():
        fit = "yes" if fits(each.memory, request.kind) else "NO"
        rows.append(
            [
                each.name,
                "yes" if each.is_supported else "no",
                f"{gib(each.memory.needed):.1f}",
                fit,
                str(each.largest_batch(request.kind)),
            ]
        )
    needed = f"GiB needed of {gib(usable_bytes(request.kind)):.1f}"
    return table(["per GPU", "in this package", needed, "fits", "largest batch"], rows)


def verdict(request: ModelRequest, chosen: Arrangement) -> str:
    """Return whether `chosen` fits and, if not, its largest tensors and the changes that help."""
    needed = gib(chosen.memory.needed)
    usable = gib(usable_bytes(request.kind))
    sizes = (
        f"{needed:.1f} GiB with context and fragmentation, of {usable:.1f} usable on each "
        f"{request.kind.name}"
    )
    if fits(chosen.memory, request.kind):
        return f"It fits: {sizes}; {usable - needed:.1f} left."
    most = sorted(chosen.memory.parts.items(), key=lambda part: -part[1])[:2]
    why = " and ".join(f"{name} ({gib(size):.1f} GiB)" for name, size in most)
    ways = [way for way, changed in _changed(request) if changed.fitting()]
    do = "No single change makes it fit."
    if ways:
        do = f"It would fit with {', or with '.join(ways)}."
    others = []
    for each in request.arrangements():
        if not each.is_supported and fits(each.memory, request.kind):
            others.append(each.name)
    also = ""
    if others:
        also = f" It would also fit as: {'; '.join(others)}; this package does not support these."
    return f"It does NOT fit: {sizes}. Most of it is {why}. {do}{also}"


def _changed(request: ModelRequest) -> Iterator[tuple[str, ModelRequest]]:
    """Yield changes that may make the model fit: the option to give, and the changed request."""
    if request.batch > 1:
        yield "--batch 1", replace(request, batch=1)
    length = _longest(request)
    if length:
        yield f"--seq {length}", replace(request, sequence_length=length)
    if request.precision == "bf16":
        yield "--precision fp8", replace(request, precision="fp8")
    else:
        yield "--precision bf16", replace(request, precision="bf16")
    for gpus in range(request.gpus + 1, MAX_GPUS + 1):
        on_more_gpus = replace(request, gpus=gpus)
        if on_more_gpus.fitting():
            yield f"--gpus {gpus}", on_more_gpus
            break
    larger = [kind for kind in KINDS.values() if kind.memory_bytes > request.kind.memory_bytes]
    for kind in sorted(larger, key=lambda kind: kind.memory_bytes):
        on_larger_gpus = replace(request, kind=kind)
        if on_larger_gpus.fitting():
            yield f"--gpu {kind.name}", on_larger_gpus
            break
    if not request.lora_rank:
        lora = replace(request, lora_rank=LORA_RANK)
        length = 0 if lora.fitting() else _longest(lora)
        if length:
            yield f"--lora --seq {length}", replace(lora, sequence_length=length)
        else:
            yield "--lora", lora


def _longest(request: ModelRequest) -> int:
    """Return the longest shorter sequence that fits, in steps of 64 tokens, or 0 if none does."""
    length = 64 * largest(
        lambda steps: replace(request, sequence_length=64 * steps).fitting() is not None
    )
    return length if length < request.sequence_length else 0


# --- MFU ------------------------------------------------------------------------------------------


def _mfu(options: argparse.Namespace) -> list[str]:
    """Return the lines of `plan --mfu`. Raises ConfigError for options that are missing."""
    gpus = options.gpus or 1
    shape = shape_of(options.model) if options.model else None
    if bool(shape) == bool(options.params):
        raise ConfigError(
            "--mfu needs the number of weights",
            "give --params or --model, and not both",
            "for example --params 405e9",
        )
    if not options.seconds or not (options.peak or options.gpu):
        raise ConfigError(
            "--mfu needs --seconds, and --peak or --gpu",
            "MFU is FLOP/s over a peak",
            "see plan --help",
        )
    peak = options.peak
    if not peak:
        kind = _kind(options.gpu)
        fp8 = options.precision == "fp8"
        peak_tflops = kind.peak_fp8_tflops if fp8 else kind.peak_bf16_tflops
        peak = peak_tflops * 1e12
    tokens = options.tokens or gpus * options.batch * options.seq
    parameters = shape.num_parameters if shape else options.params
    more = with_attention(shape, options.seq, options.lora or LORA_RANK) if shape else {}
    results = utilization(parameters, tokens, options.seconds, gpus, peak, more)
    rows = [[each.formula, f"{each.tflops:,.2f}", f"{each.mfu * 100:.3f}"] for each in results]
    return [
        f"P = {parameters / 1e9:,.2f}e9 weights; {tokens:,.0f} tokens in {options.seconds:g} s: "
        f"{tokens / options.seconds:,.1f} tokens/s on {plural(gpus, 'GPU')}"
        f" of {peak / 1e12:,.1f} TFLOP/s each",
        "",
        table(["FLOPs per token", "TFLOP/s per GPU", "MFU %"], rows),
        *filter(None, [remark(results)]),
    ]
