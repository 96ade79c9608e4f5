"""The report of one run, and the parts that it shares with the pages of several runs.

A run that ended early has a page as well: result.txt, events.jsonl, gpu_samples.jsonl, config.toml,
versions.json and failure.json may each be missing or truncated.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from common import benchmarks
from common.atomic_write import SUFFIX
from common.benchmarks import OPEN
from common.errors import ConfigError, Interrupted
from common.html import page
from common.html.page import Block, Curve, Section, banner, number, points, table
from common.records import run_states
from common.training.arguments import data_of_run
from submission import check_output, gpu_samples, provenance
from submission.advice import Advice
from submission.examined_log import examine
from submission.figures import FORMS, evaluations, figures_of, of_steps, phases, shown, unit_of
from submission.run import Run

MINIATURE_NOTICE = banner(
    "warn",
    "A miniature: this is not a benchmark result.",
    "A small model with its own target.",
)

# Text of the next step after a miniature.
PLAN_TEXT = "Show what the benchmark itself needs in memory and time:"


def run_page(run: Run, advised: list[Advice], refresh_s: float | None = None) -> str:
    """Return the page of `run` as HTML text.

    `advised`: advice to show. `refresh_s`: see `page.render`. Raises PreflightError if
    mlperf-logging or jinja2 is missing.
    """
    samples = gpu_samples.read_samples(run)
    figures = figures_of(run)
    clean, verdict = _verdict(run)
    tiles = []
    for name in FORMS:
        if figures[name] is not None:
            tiles.append((name.replace("GPU", unit_of([run])), shown(figures, name)))
    top: list[Block] = [_banner(run, clean), {"tiles": tiles}]
    if run.is_miniature:
        top.insert(0, MINIATURE_NOTICE)
    advice_heads = ("what the samples and events show", "possible gain", "what to do", "source")
    advice_table = table(advice_heads, advised, range(4))
    curves = [
        Curve("train", of_steps(run, "loss")),
        Curve("evaluation", points(evaluations(run), "samples", "loss"), 1, dots=True),
    ]
    evaluation_heads = ["samples", "loss", "minutes since run_start", "duration, s"]
    evaluated = [[number(value) for value in row.values()] for row in evaluations(run)]
    sections: list[Section] = [
        ("", top),
        ("What to do next", [{"steps": _next_steps(run, clean)}, advice_table]),
        ("Loss", [loss_chart("loss", run, curves)]),
        ("Evaluations", [table(evaluation_heads, evaluated)]),
        ("Engines", [_engine_table(run)]),
        ("Where the time went", [page.shares(phases(run))]),
        ("Training", training_charts(run)),
        ("GPUs during the run", gpu_samples.blocks(samples)),
        ("Comparison of ranks", gpu_samples.rank_blocks(run)),
        ("Verdict of the checker", verdict),
        *provenance.sections([("", run)]),
        files(run.folder),
    ]
    return page.render(heading(run), sections, run.folder.resolve().name, refresh_s)


def heading(run: Run) -> str:
    """Return benchmark, machine and time: "llama31_8b · 8 x H200 · 2026-11-23 10:00 UTC"."""
    parts = [run.benchmark or "run"]
    if run.machine:
        parts.append(run.machine)
    if began := run.began:
        parts.append(f"{began:%Y-%m-%d %H:%M} UTC")
    return " · ".join(parts)


# Blocks shared with other pages.


def loss_chart(label: str, run: Run, curves: list[Curve]) -> Block:
    """Return a loss chart with the target of `run` and its RCP band.

    The band begins at the lowest mean with which a series passes and ends at the reference mean.
    """
    label += ", nats per token"
    if run.target is not None:
        label += f" · dashed line: target {run.target}"
    band = None
    if run.point:
        band = (run.point.minimum, run.point.mean)
        label += (
            f" · band: RCP, from the lowest mean that passes, {band[0]:,.2f},"
            f" to the mean of the reference, {band[1]:,.2f}"
        )
    return page.chart(label, "training sequences", curves, target=run.target, band=band)


def step_chart(curves: list[Curve]) -> Block:
    """Return a chart of step times over optimizer steps."""
    return page.chart("step time, ms", "optimizer steps", curves, max, sync="steps")


def training_charts(run: Run) -> list[Block]:
    """Return charts of throughput, step time, gradient norm and learning rate over the steps."""
    rate = f"tokens/s/{unit_of([run])}"
    speeds = [Curve(rate, of_steps(run, "tokens_per_s_per_gpu", "step"))]
    norms = [Curve("gradient norm", of_steps(run, "grad_norm", "step"))]
    rates = [Curve("learning rate", of_steps(run, "learning_rate", "step"))]
    return [
        page.chart(rate, "optimizer steps", speeds, sync="steps"),
        step_chart([Curve("step", of_steps(run, "step_time_ms", "step"))]),
        page.chart("gradient norm, before clipping", "optimizer steps", norms, max, sync="steps"),
        page.chart("learning rate", "optimizer steps", rates, sync="steps"),
    ]


def files(folder: Path) -> Section:
    """Return a section with links to the files in `folder`."""
    paths = (path for path in folder.glob("[!.]*") if path.suffix != SUFFIX)
    names = {path.name for path in paths} - {"report.html"}
    return "Files", [{"links": sorted(names)}]


# Blocks of this page only.


def _engine_table(run: Run) -> Block:
    """Return the engine of each operation, the ms of one layer with each engine, and why."""
    rows = []
    for operation, choice in run.engine_choices.items():
        times = choice.get("ms")
        described = []
        for name, values in times.items() if isinstance(times, dict) else ():
            if isinstance(values, list):
                described.append(f"{name} {' and '.join(map(number, values))}")
        shown_times = ", ".join(described) or "not timed"
        rows.append((operation, choice["engine"], shown_times, str(choice.get("why", ""))))
    return table(("operation", "engine", "ms per layer, twice", "why"), rows, range(4))


def _banner(run: Run, clean: bool) -> Block:
    """Return the banner with the state of the run.

    The log decides the state, as in score and package. failure.json only explains it.
    """
    headline = run.outcome[:1].upper() + run.outcome[1:]
    if run.reason:
        headline += f": {run.reason}"
    elif run.state == run_states.GOOD and not clean:
        headline += ", but the log is not clean"
    lines = [headline]
    if evaluated := evaluations(run):
        last = evaluated[-1]
        target = f", target {number(run.target)}" if run.has_target else ""
        lines.append(
            f"last evaluation {number(last['loss'])}{target}, at {number(last['samples'])} samples"
        )
    for key in ("what", "why"):
        if run.failure.get(key):
            lines.append(f"{key}: {run.failure[key]}")
    if run.running:
        return banner("info", *lines)
    if run.state == Interrupted.kind:
        return banner("warn", *lines)
    if not run.converged:
        return banner("bad", *lines)
    return banner("good" if clean and not run.reason else "warn", *lines)


def _next_steps(run: Run, clean: bool) -> list[tuple[str, str]]:
    """Return pairs of a sentence and a command, which may be ""."""
    command = "./run_and_time.sh"
    folder = shlex.quote(str(run.folder))
    series = shlex.quote(str(run.folder.parent))
    if run.running:
        text = "Keep this page up to date until the run ends:"
        return [(text, f"{command} report {folder} --watch")]
    steps = []
    if not run.converged:
        advice = run.failure.get("do") or "Look up the exit code in docs/troubleshooting.md."
        is_command = str(advice).startswith(command)
        steps.append(("Go on:", advice) if is_command else (str(advice), ""))
    elif not clean:
        steps.append(("Show all findings about the log:", f"{command} check {folder}"))
    if run.converged and run.is_miniature:
        steps.append((PLAN_TEXT, f"{command} {run.benchmark} plan"))
    elif run.converged and run.division == OPEN and run.rules is not None:
        steps += _steps_with_model(run, folder)
    elif run.converged:
        text = "Start a series of ten runs, which a result needs:"
        steps.append((text, f"NEXP=10 {command} {run.benchmark}"))
        text = "Score a series, and test it against the reference convergence points:"
        steps.append((text, f"{command} score {series}"))
    steps.append(("Compare with another run:", f"{command} report {folder} OTHER_RUN"))
    return steps


def _steps_with_model(run: Run, folder: str) -> list[tuple[str, str]]:
    """Return the steps after a run whose config sets its rules: uses of the model or adapters."""
    command = f"./run_and_time.sh {benchmarks.open_benchmark()}"
    steps = []
    if run.settings.get("lora_rank"):
        text = "Merge the adapters into the weights of their base:"
        steps.append((text, f"{command} merge --adapter {folder} --out DIR"))
    text = "Let the model continue a text:"
    steps.append((text, f'{command} generate {folder} --prompt "..."'))
    data = f"{data_of_run(run.folder) or 'DATADIR'}/{run.settings.get('validation_data')}"
    text = "Measure its loss on any token file:"
    steps.append((text, f"{command} eval {folder} --data {shlex.quote(data)}"))
    return steps


def _verdict(run: Run) -> tuple[bool, list[Block]]:
    """Return whether the log is clean, and blocks with the output of `check`.

    Raises PreflightError without the official checker.
    """
    # A missing or unreadable log is already among the notes of the run.
    with contextlib.suppress(ConfigError):
        examined = examine(run.path)
        findings: Block = {
            "text": "\n".join(check_output.finding_lines(run.path.name, examined.findings))
        }
        if not run.converged and run.status != "success":
            return False, [findings | {"title": "findings in the log of a run without a result"}]
        clean = not examined.errors()
        summary = check_output.summary_line(examined)
        return clean, [
            banner("good" if clean else "bad", summary, check_output.title_line(examined)),
            findings,
        ]
    return True, []
