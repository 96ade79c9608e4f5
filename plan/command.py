"""`./run_and_time.sh <benchmark> plan`: will it fit, and how long will it take? Without a GPU and without torch.

    plan                   the config that fits this machine; without a GPU, all of them
    plan --config FILE     one config
    plan --all             a table of all configs of the benchmark
    plan ... --set K=V     with a value changed

Exit code 0 if everything fits, 12 if something does not, 2 for a wrong command line or config. How the numbers come about, and how
near they are to what was measured: plan/estimate.py and docs/plan.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common import config as configs
from common.config import RunConfig
from common.errors import ConfigError, OutOfMemory, RunError
from common.hardware import KINDS, GpuKind, config_names, config_path, probe
from launch.choose import choose, key_value, rules_of
from launch.screen import tell
from plan import estimate as plan
from plan.estimate import Estimate, Memory, Workload, gib
from records import published, rcp

ROOT = Path(__file__).resolve().parents[1]
WHOSE = """\
Measured by us: memory and throughput on H200s, in bf16 on 1, 2 and 4 (8B) and on 4 (LoRA), in FP8 on 2 and 4 (8B) and on 1 and 2 (LoRA;
docs/results.md). Published by others: every result on 8 or more GPUs, AMD's and H200's (MLPerf Training v5.1). Everything else here is
calculated: speeds of this package on H200 and H100 from our runs on H200s, on AMD's GPUs from the published runs, so that they do not
compare kinds. Nothing of this package was run on an AMD GPU or an H100."""
REFERENCES = ("AMD ", "Dell 1xXE9680x8H200", "HPE ")  # whose results of v5.1 the efficiencies are fitted to


def main(root: Path, benchmark: str, arguments: list[str]) -> int:
    options = _parse(arguments)
    overrides = dict(key_value(text) for text in options.set)
    path = None if options.all else _chosen(root, benchmark, options)
    if path is None:
        loaded = load_all(root, benchmark, overrides)
        print(all_table(benchmark, loaded), "", WHOSE, sep="\n")
    else:
        loaded = {path.stem: configs.load(path, config_class(benchmark), overrides)}
        print("\n".join(describe(benchmark, str(path), loaded[path.stem])))
    return 0 if all(_fits(benchmark, config) for config in loaded.values()) else OutOfMemory.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run_and_time.sh <benchmark> plan",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", metavar="FILE", help="this TOML")
    which.add_argument("--all", action="store_true", help="all configs of the benchmark")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value")
    return parser.parse_args(arguments)


def _chosen(root: Path, benchmark: str, options: argparse.Namespace) -> Path | None:
    """The one config that is meant, None for all."""
    if options.config:
        return Path(options.config)
    if name := os.environ.get("DGXSYSTEM"):
        return config_path(root, benchmark, name.removesuffix(".toml"))
    found = probe()
    wish = argparse.Namespace(config=None, set=[], device=None)
    return choose(root, benchmark, wish, os.environ, found).path if found.devices else None


def load_all(root: Path, benchmark: str, overrides: dict[str, str] | None = None) -> dict[str, RunConfig]:
    """Name -> config, in the order of GPU and number of GPUs."""
    kind = config_class(benchmark)
    found = {name: configs.load(config_path(root, benchmark, name), kind, overrides) for name in config_names(root, benchmark)}
    return dict(sorted(found.items(), key=lambda item: ([*KINDS, "CPU"].index(item[1].gpu), item[1].world_size)))


def config_class(benchmark: str) -> type[RunConfig]:
    return importlib.import_module(f"{benchmark}.rules").Config


def workload(benchmark: str, config: RunConfig) -> Workload:
    """What the benchmark's rules say at the config's global batch."""
    rules, batch = rules_of(benchmark, config), config.global_batch_size
    return Workload(
        rules.shape,
        rules.sequence_length,
        rules.eval_samples,
        rules.eval_interval(batch),
        rules.first_evaluation(batch),
        getattr(rules, "lora_rank", 0),
    )


def _kind(config: RunConfig) -> GpuKind | None:
    """None for a CPU, of which nothing is known."""
    if config.gpu == "CPU":
        return None
    if config.gpu not in KINDS:
        raise ConfigError(f"gpu = {config.gpu!r} cannot be planned for", f"known are {', '.join(KINDS)}", "choose one of them")
    return KINDS[config.gpu]


def _fits(benchmark: str, config: RunConfig) -> bool:
    kind = _kind(config)
    return kind is None or plan.fits(plan.memory_peak(config, workload(benchmark, config)), kind)


def estimate(benchmark: str, config: RunConfig, kind: GpuKind, published_stack: bool = False) -> Estimate:
    """Of this package as the config computes, or of the published stacks in FP8 on as many GPUs with the same batch."""
    return plan.estimate(
        workload(benchmark, config),
        kind,
        gpus=config.world_size,
        global_batch_size=config.global_batch_size,
        eval_micro_batch_size=config.eval_micro_batch_size,
        recompute_layers=config.recompute_layers,
        fp8=published_stack or bool(config.fp8),
        fp8_head=config.fp8_head and not published_stack,
        published_stack=published_stack,
        samples=rcp.mean_samples(benchmark, config.global_batch_size),
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can be read as it is: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, (head, rule, *rows)))


def memory_table(memory: Memory) -> str:
    rows = [[name, f"{gib(size):.1f}"] for name, size in memory.parts.items() if gib(size) >= 0.05]
    return table(
        [f"GiB per GPU, in {memory.moment}", "GiB"], [*rows, ["all, as torch counts what is allocated", f"{gib(memory.allocated):.1f}"]]
    )


def verdict(memory: Memory, config: RunConfig, work: Workload, kind: GpuKind) -> str:
    """Does it fit, with how much left, and what is that made of?"""
    usable, needed = plan.usable_bytes(kind), memory.needed
    whose = "" if kind.name == "H200" else ", as on an H200,"
    of = (
        f"{gib(needed):.1f} GiB with {plan.LEAST_RESERVE - 1:.0%} in pieces and {gib(plan.CONTEXT_BYTES):.1f} of context and libraries{whose} "
        f"of {gib(usable):.1f} usable on {kind.name}"
    )
    if not plan.fits(memory, kind):
        return f"does NOT fit, short by {gib(needed - usable):.1f} GiB: {plan.advice(config, work, kind)} ({of})"
    gives_back = f"; torch reserves {plan.USUAL_RESERVE - 1:.0%} where it can, and may have to give memory back here"
    return f"fits, {gib(usable - needed):.1f} GiB left: {of}{gives_back if memory.comfortable > usable else ''}"


def describe(benchmark: str, path: str, config: RunConfig) -> list[str]:
    """All about one config."""
    work, kind = workload(benchmark, config), _kind(config)
    memory = plan.memory_peak(config, work)
    lines = [
        f"{benchmark}, {path}: {config.world_size} x {config.gpu}, global batch {config.global_batch_size} = {config.world_size} x "
        f"micro-batch {config.micro_batch_size} x {config.gradient_accumulation_steps}, {computes_in(config)}",
        "",
        memory_table(memory),
        "",
    ]
    if config.fp8 == "te":
        lines += ["Transformer Engine keeps what it likes: what is counted here are compiled blocks in bf16.", ""]
    elif not (config.fused_blocks or config.compile):
        lines += ["Without fused blocks or compile, more is kept for backward than counted here: norms, RoPE and SwiGLU in fp32.", ""]
    if kind is None:
        return [*lines, "A CPU: its memory is not checked, and no time is estimated."]
    largest, layers = plan.largest_micro_batch(config, work, kind), plan.recompute_needed(config, work, kind)
    needed = "no number of recomputed layers makes it fit" if layers is None else f"recompute_layers {layers} is needed"
    return [
        *lines,
        verdict(memory, config, work, kind),
        f"largest micro-batch that fits, the rest unchanged: {largest}; {needed} at micro-batch {config.micro_batch_size}, "
        f"{config.recompute_layers} is set",
        *_host_lines(config, work),
        "",
        *flops_lines(work),
        "",
        kinds_table(benchmark, config),
        "",
        *_notes(benchmark, config),
    ]


def _host_lines(config: RunConfig, work: Workload) -> list[str]:
    """What waits in the host's memory, where anything does."""
    if (layers := plan.offloaded_layers(config, work)) == 0:
        return []
    size = gib(plan.host_bytes(config, work))
    return [
        f"{layers} layers' SwiGLU input waits in the host's memory: {size:.1f} GiB, pinned, for each of a node's {config.gpus_per_node} GPUs"
    ]


def flops_lines(work: Workload) -> list[str]:
    """FLOPs per token with their formula, with and without attention."""
    shape, frozen = work.shape, bool(work.lora_rank)
    attention = shape.attention_flops_per_token(work.sequence_length)
    without = plan.useful_flops_per_token(shape.matmul_parameters, frozen=frozen)
    adapters, formula = 0, "6 N + 6 L S H"
    if frozen:
        adapters, formula = 6 * shape.lora_parameters(work.lora_rank), "4 N + 6 N_lora + 6 L S H, the base frozen"
    return [
        f"GFLOP per token = {formula}: {(without + adapters + attention) / 1e9:.2f}; {(without + adapters) / 1e9:.2f} without attention",
        f"  N = {shape.matmul_parameters / 1e9:.3f}e9 weights in products, L = {shape.num_layers}, S = {work.sequence_length}, H = "
        f"{shape.hidden_size}; causal attention at half of the square; recomputation not counted",
    ]


def computes_in(config: RunConfig) -> str:
    """The format of the blocks' linears, in one word."""
    return "FP8" if config.fp8 else config.precision


def kinds_table(benchmark: str, config: RunConfig) -> str:
    """This config's settings on as many GPUs of every kind."""
    head = [
        "GPU",
        "fits",
        "largest micro-batch",
        f"tok/s/GPU, {computes_in(config)}",
        "step ms",
        "evaluation s",
        "minutes",
        "published stacks",
        "published",
    ]
    rows = []
    for kind in KINDS.values():
        here = replace(config, gpu=kind.name)
        work, ours, theirs = (
            workload(benchmark, here),
            estimate(benchmark, here, kind),
            estimate(benchmark, here, kind, published_stack=True),
        )
        rows.append(
            [
                kind.name,
                "yes" if plan.fits(plan.memory_peak(here, work), kind) else "NO",
                str(plan.largest_micro_batch(here, work, kind)),
                f"{ours.tokens_per_s_per_gpu:,.0f}",
                f"{ours.step_s * 1e3:,.0f}",
                f"{ours.eval_s:.1f}",
                _minutes(ours),
                _minutes(theirs),
                _published(benchmark, kind, config.world_size),
            ]
        )
    return table(head, rows)


def _minutes(found: Estimate) -> str:
    return "-" if found.minutes is None else f"{found.minutes:,.1f}"


def _published(benchmark: str, kind: GpuKind, gpus: int) -> str:
    found = [r for r in references() if (r.benchmark, r.gpu, r.gpus) == (benchmark, kind.name, gpus)]
    return f"{found[0].score:.2f} (batch {found[0].batch})" if found else "-"


def references() -> list[published.Published]:
    found = [
        result for result in published.RESULTS if result.round == "5.1" and f"{result.submitter} {result.system}".startswith(REFERENCES)
    ]
    return [result for result in found if result.score]


def _notes(benchmark: str, config: RunConfig) -> list[str]:
    samples = rcp.mean_samples(benchmark, config.global_batch_size)
    target = (
        f"Minutes to the target: {samples:,.0f} sequences (mean of the MLPerf reference at global batch {config.global_batch_size}), "
        f"evaluations included."
        if samples
        else f"The MLPerf reference was never run at global batch {config.global_batch_size}: no minutes to the target."
    )
    return [
        target,
        '"published stacks" are minutes too: what those would need in FP8, traffic not hidden, on as many GPUs with these batches.',
        WHOSE,
    ]


def all_table(benchmark: str, loaded: dict[str, RunConfig]) -> str:
    """One row per config."""
    head = ["config", "computes in", "micro-batch", "recomputed", "offloaded", "GiB allocated", "needed", "usable", "fits"]
    head += ["largest micro-batch", "recompute needed", "tok/s/GPU", "step ms", "evaluation s", "minutes to target"]
    return table(head, [_row(benchmark, name, config) for name, config in loaded.items()])


def _row(benchmark: str, name: str, config: RunConfig) -> list[str]:
    work, kind = workload(benchmark, config), _kind(config)
    memory = plan.memory_peak(config, work)
    row = [name, computes_in(config), str(config.micro_batch_size), str(config.recompute_layers), str(config.offload_layers)]
    row.append(f"{gib(memory.allocated):.1f}")
    if kind is None:
        return [*row, *"-" * 9]
    usable, layers = plan.usable_bytes(kind), plan.recompute_needed(config, work, kind)
    speed = estimate(benchmark, config, kind)
    return [
        *row,
        f"{gib(memory.needed):.1f}",
        f"{gib(usable):.1f}",
        f"yes, {gib(usable - memory.needed):.1f} left" if plan.fits(memory, kind) else f"NO, short by {gib(memory.needed - usable):.1f}",
        str(plan.largest_micro_batch(config, work, kind)),
        "never fits" if layers is None else str(layers),
        f"{speed.tokens_per_s_per_gpu:,.0f}",
        f"{speed.step_s * 1e3:,.0f}",
        f"{speed.eval_s:.1f}",
        _minutes(speed),
    ]


if __name__ == "__main__":
    try:
        sys.exit(main(ROOT, sys.argv[1], sys.argv[2:]))
    except RunError as error:
        tell(error.lines())
        sys.exit(error.exit_code)
