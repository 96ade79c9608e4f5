"""The table and the page of `plan --scaling`, for a benchmark or a model. Standard library only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.benchmarks import closed, divisions
from common.command_line import Parser, overrides_of
from common.errors import ConfigError, OutOfMemory, write_text
from common.gpu_kinds import KINDS, GpuKind
from common.html import page as html
from common.html.page import Curve
from launch.plan import scaling
from launch.plan.tables import table

DAY = 24 * 60  # minutes

# Columns of a benchmark.
HEAD = [
    "GPUs",
    "global batch",
    "learning rate",
    "sequences to target",
    "tok/s/GPU",
    "step ms",
    "links ms",
    "minutes",
    "GPU-hours",
    "kWh",
]
# Columns of a model without a config, which is trained on a number of tokens.
MODEL_HEAD = [
    "GPUs",
    "global batch",
    "tok/s/GPU",
    "step ms",
    "links ms",
    "days",
    "GPU-hours",
    "kWh",
]


def main(root: Path, benchmark: str, options: argparse.Namespace) -> int:
    """Print the table of `BENCHMARK plan --scaling`, and write its page.

    Return 0, or 12 if no number of GPUs fits.

    Raises ConfigError if the network's bandwidth is not positive, and for a benchmark without
    reference runs if no config is given.
    """
    network = bandwidth(options)
    kind = KINDS[options.scaling]
    name = benchmark
    if options.all:
        raise ConfigError(
            "--scaling with --all", "they are different tables", "leave out one of them"
        )
    if benchmark in closed():
        if options.config is not None or options.set:
            raise ConfigError(
                "--scaling with --config or --set",
                f"each number of GPUs gets its own config of {benchmark}",
                "leave out --config and --set",
            )
        rules = divisions(benchmark)["closed"]
        best = scaling.best_points(benchmark, kind, rules, network)
    elif options.config is None:
        raise ConfigError(
            f"{benchmark} plan --scaling needs a config",
            f"{benchmark} has no reference runs; a config says how many sequences are trained",
            "add --config FILE",
        )
    else:
        path = Path(options.config)
        overrides = overrides_of(options.set)
        best = scaling.config_points(benchmark, path, kind, overrides, network)
        name = f"{benchmark}, {path.name},"
    last = scaling.last_paying(best)
    more = []
    if last is not None:
        saving = f"{scaling.PAYING_SAVING:.0%}"
        more = [f"Up to {last} GPUs, twice the GPUs save at least {saving} of the time."]
    show(name, kind, HEAD, best, options, more)
    return 0 if any(best.values()) else OutOfMemory.exit_code


def add_options(parser: Parser | argparse._ArgumentGroup) -> None:
    """Add the options of --scaling."""
    parser.add_argument(
        "--network",
        type=float,
        metavar="GB/S",
        help="with --scaling: network bandwidth of one GPU between nodes "
        f"(default: {scaling.NETWORK_GB_S})",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="with --scaling: also write an HTML page of it"
    )


def bandwidth(options: argparse.Namespace) -> float:
    """Return --network or its default. Raise ConfigError if it is not positive."""
    if options.network is None:
        return scaling.NETWORK_GB_S
    if not options.network > 0:
        raise ConfigError(
            f"--network {options.network:g} is not a bandwidth",
            "it must be greater than 0",
            "give GB/s per GPU",
        )
    return options.network


def show(
    name: str,
    kind: GpuKind,
    head: list[str],
    best: Mapping[int, scaling.ScalingPoint | None],
    options: argparse.Namespace,
    more: Sequence[str] = (),
) -> None:
    """Print the table with the columns `head`, as JSON with --json, and write the page of --page.

    `name`: what is trained. `more`: further lines below the table.
    """
    rows = [row(gpus, each, head) for gpus, each in best.items()]
    below = [*remarks(best), *more]
    if options.json:
        print(json.dumps([dict(zip(head, each, strict=True)) for each in rows], indent=1))
    else:
        print(f"{name} on {kind.name}, {bandwidth(options):g} GB/s per GPU between nodes\n")
        print(table(head, rows))
        print("", *below, sep="\n")
    if options.page:
        write_text(options.page, page(name, kind, head, best, below))


def remarks(best: Mapping[int, scaling.ScalingPoint | None]) -> list[str]:
    """Return the lines below the table: its marks and its assumptions."""
    lines = [
        "Calculated, not measured. The costs of a step that do not shrink with its sequences, such "
        "as the optimizer's, are not counted.",
    ]
    if any(point and not point.measured for point in best.values()):
        lines.insert(
            0, "* interpolated between the reference's batches, or continued beyond the largest"
        )
    return lines


def page(
    name: str,
    kind: GpuKind,
    head: list[str],
    best: Mapping[int, scaling.ScalingPoint | None],
    below: list[str],
) -> str:
    """Return the HTML page: table, and the time and GPU-hours over the number of GPUs."""
    points = [each for each in best.values() if each]
    unit = "days" if "days" in head else "minutes"
    scale = DAY if unit == "days" else 1
    times = Curve(unit, [(each.gpus, each.minutes / scale) for each in points], dots=True)
    hours = Curve("GPU-hours", [(each.gpus, each.gpu_hours) for each in points], 1, dots=True)
    rows = [row(gpus, each, head) for gpus, each in best.items()]
    blocks = [
        {"notes": below},
        html.table(head, rows, words=()),
        html.chart(unit, "GPUs", [times]),
        html.chart("GPU-hours", "GPUs", [hours]),
    ]
    return html.render(f"{name} on 1 to {max(best)} {kind.name}", [("Scaling", blocks)])


def row(gpus: int, point: scaling.ScalingPoint | None, head: Sequence[str] = HEAD) -> list[str]:
    """Return the table row of `point` with the columns `head`."""
    if point is None:
        cells = {"GPUs": str(gpus), "minutes": "does not fit", "days": "does not fit"}
        return [cells.get(name, "-") for name in head]
    config = point.config
    kind = KINDS.get(config.gpu)
    energy = "-"  # of the cards at their power limit, without host and network
    if kind and kind.board_watts:
        energy = f"{point.gpu_hours * kind.board_watts / 1e3:,.1f}"
    star = "" if point.measured else "*"
    cells = {
        "GPUs": str(gpus),
        "global batch": f"{config.global_batch_size}",
        "learning rate": f"{config.opt_base_learning_rate:.2g}{star}",
        "sequences to target": f"{point.samples:,.0f}{star}",
        "tok/s/GPU": f"{point.tokens_per_s_per_gpu:,.0f}",
        "step ms": f"{point.step_s * 1e3:,.0f}",
        "links ms": f"{point.exposed_s * 1e3:,.1f}",
        "minutes": f"{point.minutes:,.1f}",
        "days": f"{point.minutes / DAY:.3g}",
        "GPU-hours": f"{point.gpu_hours:,.1f}",
        "kWh": energy,
    }
    return [cells[name] for name in head]
