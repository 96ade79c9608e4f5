"""Calculate memory and time of a config, or of any model on any GPUs, without a GPU and torch.

    <benchmark> plan                      the config for this machine; without a GPU, all configs
    <benchmark> plan --gpu B200 --gpus 4  the config for these GPUs, derived if there is no file;
                                          DGXSYSTEM=B200_1x4 is the same
    <benchmark> plan --config FILE        one config; if it has gpu = "any", on this machine
    <benchmark> plan --all                a table of all configs of the benchmark
    <benchmark> plan --scaling GPU        minutes to the target on 1 to 512 of these GPUs
    <benchmark> plan ... --set K=V        with one value changed
    <benchmark> plan ... --write FILE     also write the config, for example a derived one

    plan --model NAME|FILE [--gpu GPU] [--gpus N] [--lora] ...
                                          all layouts of a model, and the first that fits
    plan --model NAME|FILE --scaling GPU  days for the training tokens on 1 to 512 of these GPUs
    plan --mfu --model NAME|FILE --seconds S ...
                                          MFU of a measured step

A model's batch is per GPU. Exit code 0 if everything fits, 12 if something does not as
this package trains it, 2 for a wrong command line or config. The formulas are in common/estimate/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from common.benchmarks import closed, config_keys, example_config, split
from common.command_line import (
    PROGRAM,
    Parser,
    add_set_option,
    complete,
    exit_code_of,
    pairs_of,
    refuse_without,
)
from common.config import ANY_GPU, RunConfig
from common.errors import ConfigError, OutOfMemory, write_text
from common.estimate.mfu import by_parameters, remark, utilization, with_attention
from common.estimate.verdict import saving_keys
from common.estimate.workload import model_workload
from common.gpu_kinds import KINDS, GpuKind
from common.machine.hardware import MAX_GPUS, config_names, node_size, require_known
from common.model.families import FAMILIES, shape_of
from common.paths import ROOT
from common.terminal import inform, plural
from common.text_tables import number
from common.values import amount, count, gpu_kind, length
from launch.plan import scaling
from launch.plan.model import LORA_RANK, chosen, fitting_options, layouts, model_plan
from launch.plan.plans import (
    ALL,
    SOURCES,
    Plan,
    all_plans,
    as_dict,
    config_plan,
    describe,
    fetch_lines,
    plans_table,
    table,
)
from launch.plan.scaling_table import HEAD, MODEL_HEAD, ScalingTable
from launch.selection.check import FITTED, Choice
from launch.selection.choose import choose, require_config
from launch.selection.machine import NO_GPUS, Machine
from launch.selection.request import OF_CONFIG, Request, add_config_option

# Training tokens per weight that make the best use of compute (arXiv:2203.15556).
TOKENS_PER_WEIGHT = 20
FITTED_NOTE = f"""
The config has gpu = "{ANY_GPU}" and was fitted to this machine.
For another machine, name its GPUs: --set gpu=H200 --set gpus_per_node=8"""


def main(benchmark: str, arguments: list[str]) -> int:
    """Print what the options ask for. Return 0, or 12 if a config or model does not fit.

    `benchmark`: "" for any model.
    """
    options = parser(benchmark).parse_args(arguments)
    if options.scaling is None:
        refuse_without("--scaling", {"--network": options.network, "--page": options.page})
    if not benchmark:
        _require_consistent(options)
        if options.mfu:
            return _show_mfu(options)
    if options.scaling is not None:
        return _show_scaling(benchmark, options)
    plans, lines = _of_configs(benchmark, options) if benchmark else _of_model(options)
    if options.json:
        lines = [json.dumps({name: as_dict(plan) for name, plan in plans.items()}, indent=1)]
    print("\n".join(lines))
    fit = [plan.fits for plan in plans.values() if plan.is_trained]
    return 0 if (all(fit) if benchmark else any(fit)) else OutOfMemory.exit_code


# --- options --------------------------------------------------------------------------------------


def parser(benchmark: str = "") -> Parser:
    """Return the parser of a benchmark's configs, or of any model without a benchmark."""
    parser = Parser(f"{benchmark} plan".strip(), __doc__, _examples(benchmark))
    what = parser.add_mutually_exclusive_group()
    if benchmark:
        shipped = config_names(ROOT, benchmark)
        default = "default: selected for the GPUs found" if shipped else "required"
        add_config_option(what, benchmark, default)
        what.add_argument("--all", action="store_true", help="plan every config of the benchmark")
        add_set_option(parser, config_keys(benchmark))
        _add_gpu_options(parser, "all of a node")
        parser.variables = OF_CONFIG
        parser.add_argument(
            "--write",
            type=Path,
            metavar="FILE",
            help="also write the config as a new TOML file: committed under configs/, its runs can "
            "be submitted",
        )
    else:
        _add_model_options(parser)
        _add_mfu_options(parser, what)
    has_reference = not benchmark or benchmark in closed()
    (what if has_reference else parser).add_argument(
        "--scaling",
        nargs="?",
        const=False,
        type=gpu_kind,
        choices=KINDS,
        metavar="GPU",
        help="time on 1 to 512 GPUs of this kind (default: this machine's): minutes to the target, "
        "each at its best global batch, or of the run that --config describes, or a model's days",
    )
    parser.add_argument(
        "--network",
        type=amount,
        metavar="GB/S",
        help="with --scaling: network bandwidth of one GPU between nodes "
        f"(default: {scaling.NETWORK_GB_S})",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="with --scaling: also write an HTML page of it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _examples(benchmark: str) -> list[str]:
    if not benchmark:
        return [
            "plan --model llama3.1-70b --gpu MI300X --gpus 8 --lora",
            "plan --mfu --params 405e9 --tokens 1024 --seconds 30 --peak 1.3e15 --gpus 8",
        ]
    example = example_config(benchmark, "H200_1x8", "pretrain_1b")
    if not config_names(ROOT, benchmark):
        return [f"{benchmark} plan --config {example} --set gpu=H200"]
    examples = [f"{benchmark} plan --all", f"{benchmark} plan --config {example}"]
    if benchmark in closed():
        examples.append(f"{benchmark} plan --scaling MI355X --network 50")
    return examples


def _add_model_options(parser: Parser) -> None:
    model = parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(FAMILIES)}, or a Hugging Face config.json",
    )
    complete(model, FAMILIES)
    _add_gpu_options(parser, "1")
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
        help="sequences per GPU and step (default: %(default)s)",
    )
    parser.add_argument(
        "--seq",
        type=length,
        default=8192,
        metavar="N",
        help="tokens per sequence; 8k is 8192 (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp8"),
        default="bf16",
        help="precision of the blocks' matrix products (default: %(default)s)",
    )
    parser.add_argument(
        "--train-tokens",
        type=amount,
        metavar="X",
        help=f"training tokens, to calculate the days (default: {TOKENS_PER_WEIGHT} per weight; "
        "none with --lora)",
    )


def _add_gpu_options(parser: Parser, with_gpu: str) -> None:
    """Add --gpu and --gpus. `with_gpu`: the default number if --gpu is given."""
    parser.add_argument(
        "--gpu",
        type=gpu_kind,
        choices=KINDS,
        metavar="GPU",
        help=f"{', '.join(KINDS)} (default: this machine's)",
    )
    parser.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help=f"number of GPUs (default: all of this machine; with --gpu, {with_gpu})",
    )


def _add_mfu_options(parser: Parser, what: argparse._MutuallyExclusiveGroup) -> None:
    what.add_argument("--mfu", action="store_true", help="calculate the MFU of a measured step")
    group = parser.add_argument_group("with --mfu")
    for name, text in {
        "params": "number of weights, if --model is not given",
        "tokens": "tokens per step on all GPUs (default: gpus x batch x seq)",
        "seconds": "seconds per step",
        "peak": "dense FLOP/s of one GPU (default: of --gpu at --precision)",
    }.items():
        group.add_argument(f"--{name}", type=amount, metavar="X", help=text)


def _require_consistent(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not apply to a model or to a measured step."""
    if options.mfu and options.train_tokens:
        raise ConfigError(
            "--mfu with --train-tokens",
            "--train-tokens does not apply to a measured step",
            "leave out --train-tokens; --tokens gives the tokens of the step",
        )
    if options.mfu:
        return
    names = ("params", "tokens", "seconds", "peak")
    refuse_without("--mfu", {f"--{name}": getattr(options, name) for name in names})
    if not options.model:
        raise ConfigError(
            "--model is required",
            "plan without a benchmark needs the shape of a model",
            f"add --model, such as {next(iter(FAMILIES))}, or name a benchmark: {PROGRAM} "
            f"{closed()[-1]} plan",
        )
    if options.scaling and options.gpu not in (None, options.scaling):
        raise ConfigError(
            f"--gpu {options.gpu} with --scaling {options.scaling}",
            "both name the GPU kind",
            "leave out one of them",
        )


# --- configs of a benchmark -----------------------------------------------------------------------


def _of_configs(benchmark: str, options: argparse.Namespace) -> tuple[dict[str, Plan], list[str]]:
    """Return name -> plan of the configs that the options name, and the lines about them."""
    # `plan` describes configs of any machine: no variable of a real run requires a GPU here.
    request = replace(Request.of(benchmark, options, os.environ), environment={})
    if options.gpus:
        request = replace(request, gpus=options.gpus)
    if options.gpu:
        request = replace(request, system="")
    if options.all and (options.gpu or options.gpus):
        raise ConfigError(
            "--all with --gpu or --gpus",
            "--all plans every config, each for its own GPUs",
            "leave out --all to plan one config, for these GPUs",
        )
    choice, machine = (None, NO_GPUS) if options.all else _choice(request, options.gpu)
    if choice is None:
        require_config(request)
        if options.write:
            raise ConfigError(
                f"--write {options.write} without a config",
                "all configs are planned"
                if options.all
                else "no GPU is visible, so none is chosen",
                "name one by --config, or its GPUs by --gpu, such as --gpu MI355X",
            )
        plans = all_plans(benchmark, {**request.overrides})
        lines = [plans_table(ALL, plans), "", *fetch_lines(benchmark), SOURCES]
        return {plan.source: plan for plan in plans}, lines
    config = choice.config
    _require_asked_for(options, config)
    kind = machine.kind_of(config)
    plan = config_plan(benchmark, choice.derived or str(choice.path), config, kind)
    lines = describe(plan, saving_keys(config, plan.work, kind) if kind else ())
    if choice.source == FITTED:
        lines.insert(1, FITTED_NOTE)
    if options.gpu and not options.config:
        lines.append(f"DGXSYSTEM={choice.stem} names this config. A run on these GPUs chooses it.")
    if options.write:
        _write_config(options.write, benchmark, choice, request.overrides)
        inform(f"wrote      {options.write}")
    return {choice.path.stem: plan}, lines


def _require_asked_for(options: argparse.Namespace, config: RunConfig) -> None:
    """Raise ConfigError if `config` is for other GPUs than --gpu and --gpus name."""
    gpus = (config.gpus_per_node, config.world_size)
    for option, own in {"gpu": (config.gpu,), "gpus": gpus}.items():
        asked = getattr(options, option)
        if asked is not None and asked not in own:
            raise ConfigError(
                f"--{option} {asked} for a config of {config.gpus_per_node} x {config.gpu}",
                f"--config, DGXSYSTEM or --set names its GPUs; only gpu = {ANY_GPU!r} is fitted",
                f"leave out --{option}, or what names the config",
            )


def _write_config(path: Path, benchmark: str, choice: Choice, overrides: Mapping[str, str]) -> None:
    """Write the choice's config as a new TOML file. Raise ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(
            f"--write {path}: it exists", "no file is replaced", "name a new file, or remove it"
        )
    about = f"{benchmark}, {choice.derived or choice.path.name}. Calculated by `plan`, never run."
    if overrides:
        given = ", ".join(f"{key}={text}" for key, text in overrides.items())
        about += f" Set by hand: {given}."
    comment = textwrap.fill(about, 100, initial_indent="# ", subsequent_indent="# ")
    write_text(path, f"{comment}\n{choice.config.as_toml(with_defaults=False)}")


def _choice(request: Request, gpu: str | None) -> tuple[Choice | None, Machine]:
    """Return the choice to describe, None for all configs, and the machine that it depends on.

    `gpu`: the GPU kind to plan for. Without a GPU here, GPU_KIND names it too. Objections are
    ignored. The driver is asked only if the config depends on this machine.
    """
    is_named = request.file is not None or request.system != ""
    if is_named and not gpu:
        choice = choose(request, NO_GPUS)
        if choice.source != FITTED:
            return choice, NO_GPUS
    machine = NO_GPUS if gpu else Machine.of(os.environ)
    if not machine.gpus and (name := gpu or machine.gpu_kind):
        require_known(name)
        kind = KINDS[name]
        size = node_size(ROOT, kind)
        if request.gpus > MAX_GPUS:
            system = f"{name}_{-(-request.gpus // size)}x{size}"
            raise ConfigError(
                f"{request.gpus} GPUs are several nodes",
                f"a node has at most {MAX_GPUS}; DGXSYSTEM names the number of nodes",
                f"DGXSYSTEM={system} {PROGRAM} {request.benchmark} plan",
            )
        machine = Machine.imagined(kind, request.gpus or size)
    if machine.kind or is_named:
        return choose(request, machine), machine
    if request.gpus:
        raise ConfigError(
            f"{request.gpus} GPUs of an unknown kind",
            "no GPU is visible here, and none is named",
            f"name the kind with --gpu: {', '.join(KINDS)}",
        )
    return None, machine


# --- any model ------------------------------------------------------------------------------------


def _of_model(options: argparse.Namespace) -> tuple[dict[str, Plan], list[str]]:
    """Return layout -> plan of a model, and the lines about it."""
    plan = _model(options)
    plans = layouts(plan)
    lines = describe(chosen(plan), fitting_options(plan), plans)
    return {each.source: each for each in plans}, lines


def _model(options: argparse.Namespace) -> Plan:
    """Return the plan of a model in no layout. Raise ConfigError if the options describe none."""
    gpus = options.gpus or 1
    if gpus > MAX_GPUS and gpus % MAX_GPUS:
        raise ConfigError(
            f"--gpus {gpus} is not supported",
            f"more than {MAX_GPUS} GPUs are planned as nodes of {MAX_GPUS}",
            f"use a multiple of {MAX_GPUS}",
        )
    shape = shape_of(options.model)
    tokens = options.train_tokens
    if tokens is None and not options.lora:
        tokens = TOKENS_PER_WEIGHT * shape.num_parameters
    named = options.scaling or options.gpu or ""
    kind = _kind(named, "--gpu", has_links=options.scaling is not None)
    gpus = options.gpus or (1 if named else Machine.of(os.environ).gpus)
    work = model_workload(shape, options.seq, options.lora)
    return model_plan(options.model, work, kind, gpus, options.batch, options.precision, tokens)


def _kind(named: str, option: str, has_links: bool) -> GpuKind:
    """Return the GPU kind `named` by `option`, or this machine's if it is "".

    Raises ConfigError on a machine without a GPU. If `has_links`, raise it also for a kind whose
    speed or links are unknown.
    """
    kind = KINDS[named] if named else Machine.of(os.environ).kind
    do = f"use {option} with {', '.join(KINDS)}"
    if kind is None:
        raise ConfigError(f"{option} GPU is required", "this machine has no GPU", do)
    if has_links and not (kind.efficiency and kind.description):
        raise ConfigError(
            f"--scaling: the speed of {kind.name} or of its links is unknown",
            "common/gpu_kinds.py has no entry for it",
            do,
        )
    return kind


# --- scaling --------------------------------------------------------------------------------------


def _show_scaling(benchmark: str, options: argparse.Namespace) -> int:
    """Print the table of `plan --scaling`, and write its page.

    Return 0, or 12 if no number of GPUs fits.
    """
    network = options.network or scaling.NETWORK_GB_S
    result = (
        _benchmark_scaling(benchmark, options, network)
        if benchmark
        else _model_scaling(_model(options), network)
    )
    print(result.json() if options.json else result.text())
    if options.page:
        write_text(options.page, result.page())
    return 0 if any(result.points.values()) else OutOfMemory.exit_code


def _benchmark_scaling(benchmark: str, options: argparse.Namespace, network: float) -> ScalingTable:
    """Return the minutes to the target, or of the run that --config describes.

    Raises ConfigError for a config that is not needed, and for one that is missing.
    """
    kind = _kind(options.scaling, "--scaling", has_links=True)
    name = benchmark
    notes = []
    given = {"--set": benchmark in closed() and options.set, "--write": options.write}
    for option in filter(given.get, given):
        raise ConfigError(
            f"--scaling with {option}",
            f"each number of GPUs gets its own config of {benchmark}",
            f"leave out {option}, or name one number by --gpu and --gpus, without --scaling",
        )
    if benchmark in closed():
        points = scaling.benchmark_points(benchmark, kind, network)
        most = scaling.gpus_per_node(kind, scaling.LARGEST)
        notes = [f"Start a row with DGXSYSTEM={kind.name}_<nodes>x{most}."]
        if options.network:
            notes += ["On several nodes, add --set global_batch_size=<global batch>."]
    elif options.config is None:
        raise ConfigError(
            f"{benchmark} plan --scaling needs a config",
            f"{benchmark} has no reference runs; a config says how many sequences are trained",
            "add --config FILE",
        )
    else:
        path = Path(options.config)
        points = scaling.config_points(
            benchmark, path, kind, pairs_of("--set", options.set), network
        )
        name = f"{benchmark}, {path.name},"
    last = scaling.last_paying(points)
    if last is not None:
        saving = f"{scaling.PAYING_SAVING:.0%}"
        notes += [f"Up to {last} GPUs, twice the GPUs save at least {saving} of the time."]
    return ScalingTable(name, kind, network, HEAD, points, notes)


def _model_scaling(plan: Plan, network: float) -> ScalingTable:
    """Return the days for the tokens of a model. Raises ConfigError without a number of tokens."""
    if plan.samples is None:
        raise ConfigError(
            "--scaling needs --train-tokens",
            "the tokens of a LoRA training have no default",
            "for example --train-tokens 1e9",
        )
    assert plan.kind, "a model is planned on GPUs"
    length = plan.work.sequence_length
    notes = [
        f"{plan.samples * length / 1e9:,.1f}e9 tokens are trained. Each GPU has "
        f"{plan.config.micro_batch_size} x {length} tokens a step, so the global batch grows with "
        "the GPUs.",
        "Whether a batch of that size needs more tokens is not calculated.",
    ]
    points = scaling.model_points(plan, network)
    return ScalingTable(plan.name, plan.kind, network, MODEL_HEAD, points, notes)


# --- MFU ------------------------------------------------------------------------------------------


def _show_mfu(options: argparse.Namespace) -> int:
    """Print the MFU of a measured step. Return 0.

    Raises ConfigError for options that are missing.
    """
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
    if options.peak:
        linears = others = options.peak / 1e12
        peaks = f"{linears:,.1f} TFLOP/s each"
    else:
        kind = KINDS[options.gpu]
        linears = kind.peak_tflops(options.precision == "fp8")
        others = kind.peak_bf16_tflops
        peaks = f"{others:,.1f} TFLOP/s each"
        if linears != others:
            peaks = f"{linears:,.1f} TFLOP/s in FP8 and {others:,.1f} in bf16 each"
    tokens = options.tokens or gpus * options.batch * options.seq
    parameters = shape.num_parameters if shape else options.params
    formulas = by_parameters(parameters)
    if shape:
        formulas |= with_attention(shape, options.seq, options.lora or LORA_RANK)
    rate = tokens / options.seconds / gpus
    results = utilization(formulas, rate, linears, others)
    if options.json:
        print(json.dumps([asdict(each) for each in results], indent=1))
        return 0
    rows = [[each.formula, f"{each.tflops:,.2f}", f"{each.mfu * 100:.3f}"] for each in results]
    print(
        f"P = {parameters / 1e9:,.2f}e9 weights; {tokens:,.0f} tokens in "
        f"{number(options.seconds, 'g')} s: "
        f"{tokens / options.seconds:,.1f} tokens/s on {plural(gpus, 'GPU')}"
        f" of {peaks}",
        "",
        table(["FLOPs per token", "TFLOP/s per GPU", "MFU %"], rows),
        *filter(None, [remark(results)]),
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    given, rest = split(sys.argv[1:])
    sys.exit(exit_code_of(lambda: main(given, rest)))
