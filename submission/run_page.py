"""The report of one run, and the parts that it shares with the pages of several runs.

A run that ended early has a page as well: result.txt, events.jsonl, gpu_samples.jsonl, config.toml,
versions.json and failure.json may each be missing or truncated.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from statistics import fmean

from common import benchmarks
from common.benchmarks import OPEN
from common.errors import ConfigError
from common.html import page
from common.html.page import Block, Curve, Section, banner, finite, number, points, table
from common.records.run_states import words
from submission import check, gpu_samples, output
from submission.advice import Advice
from submission.intervals import samples_of
from submission.log_rules import PRECISION_KEYS
from submission.run import GOOD, Run

# Facts that the page shows. The reader has to unfold the others.
IMPORTANT = ("submission_platform", "config_filename", "commit", "seed", "torch", "driver")
# Facts that come from the log.
FACTS = (
    "submission_org",
    "submission_platform",
    "submission_division",
    "submission_status",
    "config_filename",
    "global_batch_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "opt_base_learning_rate",
    *PRECISION_KEYS,
)
MINIATURE_NOTICE = banner(
    "warn",
    "A miniature: this is not a benchmark result.",
    "A small model with its own target.",
)
# Key of a record of the speed -> name of its figure.
SPEED = {
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "tflops_per_gpu": "TFLOP/s/GPU",
    "mfu": "MFU",
}
# Name of a figure -> its format.
FORMS = {
    "minutes": ",.2f",
    "samples": ",.0f",
    "epochs": ",.3g",
    "last evaluation": ".4f",
    "init, s": ",.0f",
    "train, s": ",.0f",
    "eval, s": ",.1f",
    "step, ms": ",.1f",
    "tokens/s/GPU": ",.0f",
    "TFLOP/s/GPU": ",.4g",
    "MFU": ".1%",
    "GiB, peak": ",.1f",
    "GPU-hours": ",.2f",
    "GPU kWh": ",.3f",
}

# Text of the next step after a miniature.
PLAN_TEXT = "Show what the benchmark itself needs in memory and time:"

Labeled = tuple[str, Run]  # label on a page of several runs ("" for one run), run


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
        ("Where the time went", [page.shares(phases(run))]),
        ("Training", training_charts(run)),
        ("GPUs during the run", gpu_samples.blocks(samples)),
        ("Comparison of ranks", gpu_samples.rank_blocks(run)),
        ("Verdict of the checker", verdict),
        *provenance([("", run)]),
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


# Values from the log and the events.


def unit_of(runs: list[Run]) -> str:
    """Return "CPU" if all runs are on the CPU, else "GPU"."""
    return "CPU" if all(run.gpu == "CPU" for run in runs) else "GPU"


def of_steps(run: Run, key: str, x: str = "samples") -> list[tuple[float, float]]:
    """Return the pairs of values of `x` and `key` in the step events."""
    steps = (record for record in run.records if record.get("event") == "step")
    return points(steps, x, key)


def evaluations(run: Run) -> list[dict]:
    """Return samples, loss, minutes since run_start, and duration in seconds of each evaluation."""
    seconds = {interval.stop_samples: interval.seconds for interval in run.evaluations}
    start = run.log.first("run_start")
    rows = []
    for event in run.log.all("eval_accuracy"):
        minutes = (event.time_ms - start.time_ms) / 60_000 if start else None
        rows.append(
            {
                "samples": event.samples,
                "loss": event.value,
                "minutes": minutes,
                "seconds": seconds.get(samples_of(event)),
            }
        )
    return rows


def phases(run: Run) -> dict[str, float]:
    """Return the seconds of each phase: init, warmup, train and eval.

    Training and evaluation are taken from the log, which a run that ended early has as well.
    """
    seconds = {"init": 0.0, "warmup": 0.0}
    for record in run.records:
        if record.get("event") != "phase" or record.get("name") not in ("init", "warmup"):
            continue
        if finite(record.get("seconds")):
            seconds[record["name"]] += record["seconds"]
    seconds["train"] = sum(block.seconds for block in run.blocks)
    seconds["eval"] = run.evaluation_s or 0.0
    return seconds


def figures_of(run: Run) -> dict[str, float | None]:
    """Return the figures of a run by their names in FORMS. Unknown figures are None.

    GPU-hours are those of the GPUs in all nodes, from run_start to run_stop. kWh is the energy of
    the sampled GPUs in the same time.
    """
    figures: dict[str, float | None] = dict.fromkeys(FORMS)
    seconds = phases(run)
    figures["minutes"] = run.minutes
    figures["init, s"] = seconds["init"] + seconds["warmup"] or None
    figures["train, s"] = seconds["train"] or None
    figures["eval, s"] = seconds["eval"] or None
    evaluated = points(evaluations(run), "samples", "loss")
    if evaluated:
        figures["samples"], figures["last evaluation"] = evaluated[-1]
        samples_per_epoch = run.log.value("train_samples")
        if finite(samples_per_epoch) and samples_per_epoch > 0:
            figures["epochs"] = evaluated[-1][0] / samples_per_epoch
    figures |= speed(run)
    memory = [value for _, value in of_steps(run, "memory_gib")]
    figures["GiB, peak"] = max(memory, default=None)
    if run.gpus and run.gpu != "CPU" and run.minutes is not None:
        figures["GPU-hours"] = run.gpus * run.minutes / 60
    figures["GPU kWh"] = gpu_samples.energy_kwh(gpu_samples.read_samples(run))
    return figures


def speed(run: Run) -> dict[str, float]:
    """Return step time and the figures of SPEED, by their names. Empty without a record of speed.

    Every tenth step, and the last one before an evaluation, records the mean speed of the steps
    since the record before. All figures are means over the same steps: those of the record with the
    median tokens/s.
    """
    windows: list[tuple[float, list[float], dict]] = []
    times_ms: list[float] = []
    for record in run.records:
        if record.get("event") != "step":
            continue
        if finite(record.get("step_time_ms")):
            times_ms.append(record["step_time_ms"])
        if finite(record.get("tokens_per_s_per_gpu")):
            windows.append((record["tokens_per_s_per_gpu"], times_ms, record))
            times_ms = []
    if not windows:
        return {}
    windows.sort(key=lambda window: window[0])
    _, times_ms, record = windows[len(windows) // 2]
    figures = {name: record[key] for key, name in SPEED.items() if finite(record.get(key))}
    if times_ms:
        figures["step, ms"] = fmean(times_ms)
    return figures


def shown(figures: dict[str, float | None], name: str) -> str:
    """Return the figure `name` as text in its format, or "-" if it is unknown."""
    return output.number(figures[name], FORMS[name])


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


def compared_facts(
    runs: list[Labeled], ask_all: bool = True
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the facts that differ among the runs, and the facts that are equal, as (name, text).

    `ask_all`: whether a missing fact counts as a difference. If not, a run without the fact is left
    out of the comparison, because it may have ended before the fact was logged.
    """
    facts = [(label, _facts(run, len(runs) == 1)) for label, run in runs]
    keys: dict[str, None] = {}
    for _, of_run in facts:
        keys |= dict.fromkeys(of_run)
    same = []
    differing = []
    for key in keys:
        labels_of_value: dict[str, list[str]] = {}
        for label, of_run in facts:
            if ask_all or key in of_run:
                labels_of_value.setdefault(of_run.get(key, "-"), []).append(label)
        if len(labels_of_value) == 1:
            same.append((key, next(iter(labels_of_value))))
            continue
        lines = []
        for value, labels in labels_of_value.items():
            names = ", ".join(labels).replace(", attempt ", ", ")
            lines.append(f"{names}: {value}")
        differing.append((key, "\n".join(lines)))
    return differing, same


def provenance(runs: list[Labeled], ask_all: bool = True) -> list[Section]:
    """Return three sections: the facts that differ among the runs, equal facts, and notes.

    `ask_all`: as in `compared_facts`.
    """
    differing, same = compared_facts(runs, ask_all)
    config = {"text": runs[0][1].config if len(runs) == 1 else "", "title": "Config, as resolved"}
    notes = []
    for label, run in runs:
        notes += [f"{label} {note}".strip() for note in run.notes]
    return [
        ("What differs", [table((), differing)]),
        ("Provenance", [*_folded(same), config]),
        ("Anomalies", [{"notes": notes}]),
    ]


def _folded(facts: list[tuple[str, str]]) -> list[Block]:
    """Return a table of the IMPORTANT facts, in that order, and a folded table of the others."""
    named = dict(facts)
    important = [(key, named[key]) for key in IMPORTANT if key in named]
    others = [(key, value) for key, value in facts if key not in IMPORTANT]
    return [table((), important), table((), others, title=f"{len(others)} more")]


def _facts(run: Run, alone: bool) -> dict[str, str]:
    """Return the facts in the log, the self-test and versions.json.

    `alone`: whether the page is about this run only. If so, the seed is added. Otherwise the keys
    of config.toml are added, so that they are compared.
    """
    facts = {}
    for key in (*FACTS, "seed") if alone else FACTS:
        value = run.log.value(key)
        if value is not None:
            facts[key] = value
    facts |= run.versions
    if torch := run.versions.get("packages", {}).get("torch"):
        facts["torch"] = torch
    for record in run.records:
        if record.get("event") == "self_test":
            facts["attention by"] = record.get("attention")
    if not alone:
        with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):  # a truncated file
            facts |= tomllib.loads(run.config)
    return {str(key): _plain(value) for key, value in facts.items() if value is not None}


def _plain(value: object) -> str:
    """Return a value of JSON or TOML as one line. Equal names in a list are counted."""
    if isinstance(value, str):
        return value or "none"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        names = []
        for name, count in Counter(value).items():
            names.append(f"{count} x {name}" if count > 1 else name)
        return ", ".join(names) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return json.dumps(value, default=str)


def files(folder: Path) -> Section:
    """Return a section with links to the files in `folder`."""
    names = {path.name for path in folder.glob("[!.]*")} - {"report.html"}
    return "Files", [{"links": sorted(names)}]


# Blocks of this page only.


def _banner(run: Run, clean: bool) -> Block:
    """Return the banner with the state of the run.

    The log decides the state, as in score and package. failure.json only explains it.
    """
    headline = run.outcome[:1].upper() + run.outcome[1:]
    if run.state != GOOD and run.reason:
        headline += f": {run.reason}"
    elif run.state == GOOD and not clean:
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
    if run.outcome == words("interrupted"):
        return banner("warn", *lines)
    if run.state != GOOD:
        return banner("bad", *lines)
    return banner("good" if clean else "warn", *lines)


def _next_steps(run: Run, clean: bool) -> list[tuple[str, str]]:
    """Return pairs of a sentence and a command, which may be ""."""
    command = "./run_and_time.sh"
    folder = shlex.quote(str(run.folder))
    series = shlex.quote(str(run.folder.parent))
    if run.running:
        text = "Keep this page up to date until the run ends:"
        return [(text, f"{command} report {folder} --watch")]
    steps = []
    if run.state != GOOD:
        advice = run.failure.get("do") or "Look up the exit code in docs/troubleshooting.md."
        steps.append((str(advice), ""))
    elif not clean:
        steps.append(("Show all findings about the log:", f"{command} check {folder}"))
    if run.state == GOOD and run.is_miniature:
        steps.append((PLAN_TEXT, f"{command} {run.benchmark} plan"))
    elif run.state == GOOD and run.division == OPEN and run.rules is not None:
        steps += _steps_with_model(run, folder)
    elif run.state == GOOD:
        text = "Start a series of ten runs, which a result needs:"
        steps.append((text, f"NEXP=10 {command} {run.benchmark}"))
        text = "Score a series, and test it against the reference convergence points:"
        steps.append((text, f"{command} score {series}"))
    steps.append(("Compare with another run:", f"{command} report {folder} OTHER_RUN"))
    return steps


def _steps_with_model(run: Run, folder: str) -> list[tuple[str, str]]:
    """Return the steps after a run whose config sets its rules: uses of the model or adapters."""
    command = f"./run_and_time.sh {benchmarks.open_benchmark()}"
    config: dict = {}
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):  # a truncated file
        config = tomllib.loads(run.config)
    model = f"{folder}/model"
    adapter = ""
    steps = []
    if config.get("lora_rank"):
        model = shlex.quote(str(config.get("weights", "BASE")))
        adapter = f" --adapter {folder}/adapter"
        text = "Merge the adapters into the weights of their base:"
        steps.append((text, f"{command} merge --base {model}{adapter} --out DIR"))
    text = "Let the model continue a text:"
    steps.append((text, f'{command} generate {model}{adapter} --prompt "..."'))
    data = f"--data DATADIR/{config.get('validation_data', 'validation')}"
    length = f"--sequence-length {config.get('sequence_length', 'N')}"
    text = "Measure its loss on any token file:"
    steps.append((text, f"{command} eval {model}{adapter} {data} {length}"))
    return steps


def _verdict(run: Run) -> tuple[bool, list[Block]]:
    """Return whether the log is clean, and blocks with the output of `check`.

    Raises PreflightError without the official checker.
    """
    # A missing or unreadable log is already among the notes of the run.
    with contextlib.suppress(ConfigError):
        examined = check.examine(run.path)
        findings: Block = {"text": "\n".join(check.finding_lines(run.path.name, examined.findings))}
        if run.state != GOOD and run.status != "success":
            return False, [findings | {"title": "findings in the log of a run without a result"}]
        clean = not examined.errors()
        summary = check.summary_line(examined)
        return clean, [
            banner("good" if clean else "bad", summary, check.title_line(examined)),
            findings,
        ]
    return True, []
