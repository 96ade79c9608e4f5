"""Write the generated tables of the documents: `python3 -m tests.tools.docs_tables`.

A table stands between `<!-- made: NAME ARGUMENTS -->` and `<!-- end -->`. It is generated from the
configs, the GPU kinds, `plan` and the published results. tests/test_docs.py fails if a page differs
from this command's output. All other text is written by hand. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from common.benchmarks import closed, divisions, load_all, measured_in
from common.config import RunConfig
from common.gpu_kinds import GIB, KINDS, fp8_family
from common.paths import ROOT
from common.records.published import RESULTS
from common.terminal import data_size
from common.text_tables import markdown
from launch.plan import scaling
from launch.plan.plans import ALL, COSTS, all_plans, kinds_table, plans_table, target_line
from launch.plan.scaling_table import HEAD as SCALING_HEAD
from launch.plan.scaling_table import row as scaling_row
from launch.profilers import TOOLS
from tests.tools import settings_tables

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *(ROOT / "docs").rglob("*.md")})
MADE = re.compile(r"(<!-- made: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Pre-training first.
BENCHMARKS = sorted(closed(), key=lambda name: divisions(name)["closed"].lora_rank)
LORA = measured_in("lora")


def configs_of(gpu: str) -> list[tuple[str, str, RunConfig]]:
    """Return (benchmark, name, config) of every shipped config of this GPU kind."""
    configs = []
    for benchmark in BENCHMARKS:
        for name, config in load_all(ROOT, benchmark).items():
            if config.gpu == gpu:
                configs.append((benchmark, name, config))
    return configs


# ---- values of a config


def linears(config: RunConfig) -> str:
    if not config.linear_format.in_fp8:
        return config.precision
    gpu_format = "ocp" if config.gpu == "CPU" else fp8_family(KINDS[config.gpu].arch)
    formats = {"ocp": "e4m3, gradients e5m2", "fnuz": "e4m3fnuz, gradients e5m2fnuz"}[gpu_format]
    return f"FP8 ({formats}), delayed scaling"


def activations(benchmark: str, config: RunConfig) -> str:
    """Describe how activations are kept for backward."""
    recomputed = getattr(config, "recompute_layers", 0)
    offloaded = getattr(config, "offload_layers", 0)
    text = f"all in {config.precision}"
    if benchmark == LORA and config.linear_format.in_fp8:
        text = "SwiGLU's input in 8 bits"
    if recomputed:
        text += f", {recomputed} layers recomputed"
    if offloaded:
        text += f", of {offloaded} layers on the host"
    return text


def storage(benchmark: str, config: RunConfig) -> str:
    """Describe where weights, gradients and optimizer states are stored."""
    if benchmark == LORA:
        base = f"{'FP8' if config.linear_format.in_fp8 else config.precision} base"
        if config.frozen_base == "sharded" and config.gpus_per_node == 1:
            return f"{base} on one process"
        transposed = "transposed layer by layer"
        if config.transposed_layers:
            transposed = f"and the transposes of {config.transposed_layers} layers"
        return {
            "sharded": f"{base} sharded, layers gathered ahead",
            "replicated": f"{base} on each GPU, {transposed}",
            "replicated_both": f"{base} and its transpose on each GPU",
        }[config.frozen_base]
    moments = ""
    precision = config.moment_precision  # type: ignore[attr-defined]
    if precision != "fp32":
        moments = f", Adam's moments in {precision}"
    if config.world_size == 1:
        return f"one process{moments}"
    by = {
        "nccl": "RCCL" if KINDS[config.gpu].vendor == "amd" else "NCCL",
        "copy_engine": "copy engines",
    }[config.reduce_scatter]  # type: ignore[attr-defined]
    return f"ZeRO-2, gradients reduced by {by}{moments}"


def micro_batches(config: RunConfig) -> str:
    return f"{config.micro_batch_size} x {config.gradient_accumulation_steps}"


def learning_rate(config: RunConfig) -> str:
    mantissa, exponent = f"{config.opt_base_learning_rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def warmup(benchmark: str, config: RunConfig) -> str:
    if benchmark == LORA:
        training_steps = config.opt_learning_rate_training_steps  # type: ignore[attr-defined]
        return f"none; cosine over {training_steps:,} steps"
    steps = config.opt_learning_rate_warmup_steps  # type: ignore[attr-defined]
    return f"{steps} steps = {steps * config.global_batch_size} sequences"


# ---- the tables


def card_table(gpu: str) -> str:
    kind = KINDS[gpu]
    units = "compute units" if kind.vendor == "amd" else "multiprocessors"
    head = ["architecture", "memory, GiB", units, "dense peak, TFLOP/s", "FP8 format"]
    peaks = f"{kind.peak_bf16_tflops:,.1f} bf16, {kind.peak_fp8_tflops:,.1f} FP8"
    family = {"ocp": "OCP", "fnuz": "fnuz"}[fp8_family(kind.arch)]
    row = [
        kind.arch,
        f"{kind.memory_bytes / GIB:.0f}",
        str(kind.compute_units or "not confirmed"),
        peaks,
        family,
    ]
    return markdown(head, [row])


def configs_table(gpu: str) -> str:
    head = [
        "config",
        "global batch",
        "micro-batch x accumulation",
        "linear layers",
        "activations for backward",
        "weights and gradients",
    ]
    rows = [
        [
            f"[{benchmark}/{name}](../../configs/{benchmark}/{name}.toml)",
            str(config.global_batch_size),
            micro_batches(config),
            linears(config),
            activations(benchmark, config),
            storage(benchmark, config),
        ]
        for benchmark, name, config in configs_of(gpu)
    ]
    return markdown(head, rows)


def environment_table(gpu: str) -> str:
    """Return the [env] variables with their comments and the number of configs that set them."""
    reasons: dict[tuple[str, str, str], int] = {}
    for benchmark, name, config in configs_of(gpu):
        text = (ROOT / "configs" / benchmark / f"{name}.toml").read_text()
        for key, value in config.env.items():
            why = comment_of(key, text)
            if not why:
                raise SystemExit(
                    f"error: {name}: {key} has no comment\n"
                    "  why: the pages list each variable with its reason\n"
                    "  do:  add one"
                )
            reasons[key, value, why] = reasons.get((key, value, why), 0) + 1
    rows = [
        [f"`{key}={value}`", why, f"{count} of {len(configs_of(gpu))}"]
        for (key, value, why), count in reasons.items()
    ]
    return markdown(["variable", "why", "configs"], rows)


def comment_of(key: str, text: str) -> str:
    """Return the comment after the value of `key` in a TOML, or else in the lines above, or ""."""
    match = re.search(rf'((?:^#.*\n)*)^{key} = "[^"]*" *(?:# (.+))?$', text, re.MULTILINE)
    if not match:
        return ""
    above = " ".join(line.removeprefix("# ") for line in match[1].splitlines())
    return match[2] or above


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def published_table(gpu: str) -> str:
    head = [
        "round",
        "benchmark",
        "GPUs",
        "submitter",
        "global batch",
        "score, minutes",
        "samples/s",
        "evaluation, s",
    ]
    rows = []
    for r in RESULTS:
        if r.gpu != gpu or not (r.score or (r.runs == 1 and r.minutes)):
            continue
        score = f"{r.score:.3f}" if r.score else f"{r.minutes:.1f} (one run)"
        speed = number(r.samples_per_s, ".3f")
        evaluation = number(r.evaluation_s, ".2f")
        rows.append(
            [
                r.round,
                r.benchmark,
                str(r.gpus),
                r.submitter,
                str(r.batch),
                score,
                speed,
                evaluation,
            ]
        )
    if not rows:
        return "None that we compare with (`common/records/published.json`).\n"
    return markdown(head, rows)


def submitted_table(submitter: str) -> str:
    """Return all scores of one submitter, with the sequences to the target."""
    head = [
        "round",
        "benchmark",
        "GPU",
        "score, minutes",
        "without RCP factor",
        "sequences to the target",
        "samples/s",
        "step, ms",
        "evaluation, s",
    ]
    rows = [
        [
            r.round,
            r.benchmark,
            f"{r.gpus} x {r.gpu}",
            f"{r.score:.3f}",
            f"{r.minutes:.3f}",
            f"{r.samples:,.0f}",
            f"{r.samples_per_s:.3f}",
            f"{r.batch / (r.samples_per_s or math.nan) * 1e3:,.0f}",
            f"{r.evaluation_s:.2f}",
        ]
        for r in RESULTS
        if r.submitter == submitter and r.score
    ]
    return markdown(head, rows)


def one_log_table(round_: str) -> str:
    """Return the results of a round of which one log was read, with their tokens/s/GPU."""
    head = [
        "benchmark",
        "GPU",
        "submitter",
        "global batch",
        "minutes of one run",
        "sequences",
        "tok/s/GPU",
        "evaluation, s",
    ]
    rows = []
    for r in RESULTS:
        if r.round != round_ or r.runs != 1:
            continue
        rate = r.samples_per_s
        tokens_per_s = None if rate is None else rate * 8192 / (r.gpus or 1)
        rows.append(
            [
                r.benchmark,
                f"{r.gpus} x {r.gpu}",
                f"{r.submitter} {r.system}",
                str(r.batch),
                f"{r.minutes:.1f}",
                f"{r.samples:,.0f}",
                number(tokens_per_s, ",.0f"),
                number(r.evaluation_s, ".1f"),
            ]
        )
    return markdown(head, rows)


def plan_table(benchmark: str, *gpus: str) -> str:
    """Return the table of `plan --all` for the configs of these GPU kinds."""
    plans = [plan for plan in all_plans(benchmark) if plan.config.gpu in gpus]
    return f"{plans_table(ALL, plans)}\n"


def plan_page(benchmark: str) -> str:
    """Return `plan --all`, and the settings of one config on every kind of GPU."""
    plans = all_plans(benchmark)
    (eight,) = (plan for plan in plans if plan.source == "H200_1x8")
    parts = [
        f"\n## {benchmark}: all configs",
        plans_table(ALL, plans),
        f"## {benchmark}: the settings of `H200_1x8.toml` on 8 GPUs of every kind",
        kinds_table(eight),
        target_line(eight),
    ]
    return "\n\n".join(parts) + "\n\n"


def costs_table(benchmark: str) -> str:
    """Return the time and the GPU-hours of a result of each config."""
    plans = [plan for plan in all_plans(benchmark) if plan.kind]
    return f"{plans_table(COSTS, plans)}\n"


def downloads_table() -> str:
    """Return the files to fetch for each benchmark."""
    rows = []
    for benchmark in BENCHMARKS:
        for part in divisions(benchmark)["closed"].downloads:
            size = data_size(part.size_bytes)
            rows.append([benchmark, part.what, size, part.source, part.license])
    return markdown(["benchmark", "files", "size", "from", "license"], rows)


def comparison_table(old: str, benchmark: str, name: str) -> str:
    """Return `old` with the last column updated in the rows that follow from the config."""
    config = load_all(ROOT, benchmark)[name]
    values = {
        "global batch": str(config.global_batch_size),
        "learning rate": learning_rate(config),
        "warm-up of the learning rate": warmup(benchmark, config),
        "micro-batch x accumulation": micro_batches(config),
        "precision of the linear layers": linears(config),
        "activations for backward": activations(benchmark, config),
        "weights and gradients": storage(benchmark, config),
    }
    rows = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in old.splitlines()
        if line.startswith("|")
    ]
    if missing := values.keys() - {row[0] for row in rows}:
        raise SystemExit(
            f"error: the comparison of {benchmark} has no row for {missing}\n"
            "  why: it follows from the config\n"
            "  do:  add one"
        )
    return markdown(rows[0], [[row[0], row[1], values.get(row[0], row[2])] for row in rows[2:]])


# Measured by us on H200 (docs/results.md): benchmark, GPUs, tok/s/GPU, commit.
OWN_RATES = (
    ("llama31_8b", 1, 14_279, "179ed16"),
    ("llama31_8b", 2, 17_320, "c878d16"),
    ("llama31_8b", 4, 17_494, "b10d351"),
    ("llama2_70b_lora", 1, 3_354, "c878d16"),
    ("llama2_70b_lora", 2, 3_330, "c878d16"),
    ("llama2_70b_lora", 4, 3_266, "b10d351"),
)


def scaling_check_table() -> str:
    """Return the speeds that `plan --scaling` calculates, beside measured and published ones."""
    head = ["source", "benchmark", "GPUs", "batch", "tok/s/GPU", "calculated", "difference"]
    sources = [
        (f"ours, {commit}", benchmark, "H200", gpus, 16 if benchmark != LORA else 8, float(rate))
        for benchmark, gpus, rate, commit in OWN_RATES
    ]
    for result in RESULTS:
        kind = KINDS.get(result.gpu or "")
        if kind is None or not (result.gpus and result.batch and result.samples_per_s):
            continue
        several_nodes = result.gpus > scaling.gpus_per_node(kind, result.gpus)
        if several_nodes and result.batch % result.gpus == 0:
            rate = result.samples_per_s * 8192 / result.gpus
            source = f"v{result.round} {result.submitter}"
            sources.append((source, result.benchmark, kind.name, result.gpus, result.batch, rate))
    rows = []
    for source, benchmark, gpu, gpus, batch, rate in sources:
        point = scaling.benchmark_point(benchmark, KINDS[gpu], gpus, batch=batch)
        calculated = point.speed.tokens_per_s_per_gpu
        rows.append(
            [
                source,
                benchmark,
                f"{gpus} x {gpu}",
                str(batch),
                f"{rate:,.0f}",
                f"{calculated:,.0f}",
                f"{calculated / rate - 1:+.0%}",
            ]
        )
    return markdown(head, rows)


def scaling_table(benchmark: str, gpu: str) -> str:
    points = scaling.benchmark_points(benchmark, KINDS[gpu])
    rows = [scaling_row(gpus, point, SCALING_HEAD, benchmark) for gpus, point in points.items()]
    return markdown(SCALING_HEAD, rows)


def profilers_table() -> str:
    rows = []
    for name, tool in TOOLS.items():
        separator = " --" if tool.last else ""
        command = f"`{name} {tool.options}{separator} PROGRAM`"
        source = tool.source
        if tool.needs:
            source += f"; needs {tool.needs}"
        rows.append([f"`{name}`", command, tool.result, tool.opens, source])
    return markdown(["tool", "command of rank 0", "in DIR", "open with", "where to get it"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "profilers": profilers_table,
    "card": card_table,
    "configs": configs_table,
    "environment": environment_table,
    "published": published_table,
    "submitted": submitted_table,
    "one_log": one_log_table,
    "plan": plan_table,
    "plan_page": plan_page,
    "costs": costs_table,
    "downloads": downloads_table,
    "scaling": scaling_table,
    "scaling_check": scaling_check_table,
    "config_keys": settings_tables.keys_table,
    "environment_variables": settings_tables.variables_table,
}


def rewritten(text: str) -> str:
    """Return `text` with each generated table updated."""

    def table(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        content = (
            comparison_table(match[0], *arguments)
            if name == "comparison"
            else TABLES[name](*arguments)
        )
        return match[1] + content + match[3]

    return MADE.sub(table, text)


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        if (new := rewritten(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(ROOT)}")
