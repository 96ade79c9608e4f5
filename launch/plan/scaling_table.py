"""The table and the page of `plan --scaling`, for a benchmark or a model. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.benchmarks import divisions
from common.estimate.step_time import HOST_S_PER_LAYER, SHARED_SEQUENCE
from common.gpu_kinds import KINDS, GpuKind
from common.html import page as html
from common.html.page import Curve
from common.records import published
from common.text_tables import number
from launch.plan import scaling
from launch.plan.plans import table

DAY = 24 * 60  # minutes

# Columns of a benchmark.
HEAD = [
    "GPUs",
    "global batch",
    "GPUs a sequence",
    "learning rate",
    "sequences to target",
    "tok/s/GPU",
    "step ms",
    "links ms",
    "minutes",
    "published tok/s/GPU",
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


@dataclass(frozen=True)
class ScalingTable:
    """The times that something takes to train, by the number of GPUs."""

    name: str  # what is trained
    kind: GpuKind
    network_gb_s: float
    head: list[str]
    points: Mapping[int, scaling.ScalingPoint | None]
    notes: list[str]  # lines below the table

    def rows(self) -> list[list[str]]:
        return [row(gpus, point, self.head, self.name) for gpus, point in self.points.items()]

    def below(self) -> list[str]:
        """Return the lines below the table: its marks, its assumptions and the notes."""
        lines = [
            "Calculated, not measured. The optimizer and the cast of the weights take the time of "
            "their bytes.",
            *self.notes,
        ]
        if any(point and point.config.context_parallel > 1 for point in self.points.values()):
            lines.append(
                f"GPUs that share a sequence are assumed to reach {SHARED_SEQUENCE:.0%} of the "
                "rate of others, before the time of the links. On two H200s it was 91 to 93% after "
                "it."
            )
            lines.append(
                f"Their steps take at least {HOST_S_PER_LAYER * 1e3:g} ms for each layer and "
                "micro-batch, in which the host launches kernels, as with the 8B on H200s."
            )
        if any(point and not point.measured for point in self.points.values()):
            lines.insert(
                0, "* interpolated between the reference's batches, or continued beyond the largest"
            )
        return lines

    def text(self) -> str:
        """Return the table with the lines around it."""
        title = f"{self.name} on {self.kind.name}, {self.network_gb_s:g} GB/s per GPU between nodes"
        return "\n".join([title, "", table(self.head, self.rows()), "", *self.below()])

    def json(self) -> str:
        """Return the rows as JSON."""
        return json.dumps(
            [dict(zip(self.head, each, strict=True)) for each in self.rows()], indent=1
        )

    def page(self) -> str:
        """Return the HTML page: table, and the time and GPU-hours over the number of GPUs."""
        points = [each for each in self.points.values() if each]
        unit = "days" if "days" in self.head else "minutes"
        scale = DAY if unit == "days" else 1
        times = Curve(unit, [(each.gpus, each.minutes / scale) for each in points], dots=True)
        hours = Curve("GPU-hours", [(each.gpus, each.gpu_hours) for each in points], 1, dots=True)
        blocks = [
            {"notes": self.below()},
            html.table(self.head, self.rows(), words=()),
            html.chart(unit, "GPUs", [times]),
            html.chart("GPU-hours", "GPUs", [hours]),
        ]
        title = f"{self.name} on 1 to {max(self.points)} {self.kind.name}"
        return html.render(title, [("Scaling", blocks)])


def published_rate(name: str, gpu: str, gpus: int) -> str:
    """Return the highest published rate of a benchmark on these GPUs, with its batch, or "-"."""
    results = [each for each in published.published(name, gpu, gpus) if each.samples_per_s]
    if not results:
        return "-"
    best = max(results, key=lambda each: each.samples_per_s or 0)
    rules = divisions(name)["closed"]
    rate = (best.samples_per_s or 0) * rules.sequence_length / gpus
    return f"{rate:,.0f} (batch {best.batch})"


def row(gpus: int, point: scaling.ScalingPoint | None, head: Sequence[str], name: str) -> list[str]:
    """Return the table row of `point` with the columns `head`. `name`: benchmark or model."""
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
        "GPUs a sequence": str(config.context_parallel),
        "learning rate": number(config.opt_base_learning_rate, ".2g") + star,
        "sequences to target": f"{point.samples:,.0f}{star}",
        "tok/s/GPU": f"{point.speed.tokens_per_s_per_gpu:,.0f}",
        "step ms": f"{point.speed.step_s * 1e3:,.0f}",
        "links ms": f"{point.speed.exposed_s * 1e3:,.1f}",
        "minutes": f"{point.minutes:,.1f}",
        "published tok/s/GPU": published_rate(name, config.gpu, gpus),
        "days": number(point.minutes / DAY, ",.3g"),
        "GPU-hours": f"{point.gpu_hours:,.1f}",
        "kWh": energy,
    }
    return [cells[name] for name in head]
