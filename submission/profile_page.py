"""`python -m submission.profile_page DIR`: the picture of a profile, DIR/profile.html, from DIR/profile.json.

Two pies, the step by kernel class and its matrix products by role and shape, each beside its table. Self-contained: no script, no
link to anything outside. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path

from common.errors import DataError, RunError
from submission import plots, report
from submission.plots import section, table

# Of the classes, in the order of profile.json, then again for products: neighbours differ in light and dark.
COLOURS = (
    "#3b75af",
    "#b2182b",
    "#8073ac",
    "#a87708",
    "#1a7f37",
    "#d1652c",
    "#b5548c",
    "#23888a",
    "#7f5539",
    "#5b6470",
    "#a3912c",
    "#8f99a5",
)
SLICES = 11  # a pie shows so many rows; the rest together are one more


def render(profile: dict) -> str:
    """The page as HTML text."""
    title = f"{profile['benchmark']} · {profile['config']} · profile"
    classes, products = profile["classes"], profile["products"]
    others = [[escape(row["name"]), f"{row['ms']:.3f}", f"{row['launches']:,.0f}"] for row in profile["others"]]
    sections = [
        _summary(profile),
        section("The step by kernel class", _pie(classes, "share of the step") + _table(classes, "class")),
        section("Matrix products by role and shape, M x N x K", _pie(products, "share of GEMM") + _table(products, "product")),
        section("Names in class “other”", table(["name", "ms", "launches"], others) if others else ""),
        section("How to read it", _reading(profile["device"] == "cpu")),
    ]
    return plots.page(title, sections, wide=True)


def _summary(profile: dict) -> str:
    step = (
        f"{profile['window_ms']:.2f} ms in the trace; {profile['clock_ms']:.2f} by the clock of the same steps; "
        f"{profile['bench_ms']:.2f} without profiler ({profile['profiler_overhead']:+.1%} for it)"
    )
    rows = [
        ("where", f"{profile['device']}, rank 0 of {profile['world_size']}, torch {profile['torch']}"),
        ("what", f"{profile['layers']} layers, {profile['precision']}, {profile['steps']} steps"),
        ("tokens of a step, per rank", f"{profile['tokens_per_step_per_rank']:,}"),
        ("step", step),
        (
            "classes sum to",
            f"{profile['classes_sum_ms']:.2f} ms, {profile['classes_sum_ms'] / profile['clock_ms']:.2%} of the clock's step",
        ),
    ]
    return plots.facts(rows)


def _table(rows: list[dict], what: str) -> str:
    heads = [what, "ms", "share of step", "us/token", "kernel ms", "hidden ms", "launches", "TFLOP/s"]
    cells = [
        [
            f"{_key(index)} {escape(row['name'])}",
            f"{row['ms']:.3f}",
            f"{row['share']:.1%}",
            f"{row['us_per_token']:.3f}",
            f"{row['kernel_ms']:.3f}",
            f"{row['hidden_ms']:.3f}",
            f"{row['launches']:,.0f}",
            f"{row['tflops']:.4g}" if row["tflops"] else "",
        ]
        for index, row in enumerate(rows)
    ]
    return table(heads, cells) if rows else "<p class=dim>none</p>"


def _key(index: int) -> str:
    return f'<svg viewBox="0 0 10 10" style="width:10px"><rect fill="{_colour(index)}" width="10" height="10"/></svg>'


def _colour(index: int) -> str:
    return COLOURS[min(index, SLICES)]


def _pie(rows: list[dict], label: str) -> str:
    """Milliseconds as slices, clockwise from the top; a slice of 4 % and more has its share written on it."""
    total = sum(row["ms"] for row in rows)
    if total <= 0:
        return ""
    parts, begin = [], 0.0
    for name, ms, colour in _slices(rows):
        end = begin + ms / total
        hint = f"<title>{escape(name)}: {ms:.3f} ms, {ms / total:.1%}</title>"
        parts.append(f'<path d="{_slice(begin, end)}" fill="{colour}">{hint}</path>')
        if ms / total >= 0.04:
            x, y = _at((begin + end) / 2, 72)
            parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" style="fill:#fff">{ms / total:.0%}</text>')
        begin = end
    return f'<svg viewBox="-104 -104 208 208" style="max-width:320px" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _slices(rows: list[dict]) -> list[tuple[str, float, str]]:
    """(name, ms, colour); rows beyond SLICES share the last colour and are one slice."""
    shown = [(row["name"], row["ms"], _colour(index)) for index, row in enumerate(rows[:SLICES]) if row["ms"] > 0]
    rest = rows[SLICES:]
    name = rest[0]["name"] if len(rest) == 1 else f"{len(rest)} more"
    return [*shown, (name, sum(row["ms"] for row in rest), _colour(SLICES))] if sum(row["ms"] for row in rest) > 0 else shown


def _slice(begin: float, end: float) -> str:
    """Path of a slice; `begin` and `end` in turns."""
    if end - begin > 0.9999:  # an arc from a point to itself is nothing: draw two halves
        return "M0,-100 A100,100 0 1 1 0,100 A100,100 0 1 1 0,-100 Z"
    (x0, y0), (x1, y1) = _at(begin, 100), _at(end, 100)
    return f"M0,0 L{x0:.2f},{y0:.2f} A100,100 0 {int(end - begin > 0.5)} 1 {x1:.2f},{y1:.2f} Z"


def _at(turn: float, radius: float) -> tuple[float, float]:
    return radius * math.sin(2 * math.pi * turn), -radius * math.cos(2 * math.pi * turn)


def _reading(on_cpu: bool) -> str:
    lines = [
        "Every instant of the step belongs to one class: where compute kernels run to one of them, where only communication runs to "
        "communication, where nothing runs to idle. So the classes sum to the step.",
        "“kernel ms” is the sum of all durations, two at once counted twice; “hidden ms” is the part of it during which the instant "
        "belonged to something else.",
    ]
    if on_cpu:
        lines.append(
            "On a CPU the events are the ops of the main thread, each without the ops it calls; idle is Python and autograd between them."
        )
    return "".join(f"<p>{line}</p>" for line in lines)


def write_page(folder: Path) -> Path:
    """Write profile.html beside profile.json and return its path. Raises DataError, StorageError."""
    source, path = folder / "profile.json", folder / "profile.html"
    try:
        text = render(json.loads(source.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"cannot read {source}", f"{type(error).__name__}: {error}", "make it with ./run_and_time.sh <benchmark> profile"
        ) from None
    return report.write_page(path, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.profile_page", description="Write profile.html beside profile.json.")
    parser.add_argument("directory", type=Path)
    try:
        print(write_page(parser.parse_args(arguments).directory))
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
