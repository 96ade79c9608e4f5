"""The report of one run, and the parts that it shares with the pages of several runs.

The page of a run that ended early shows the files that exist: result.txt, events.jsonl,
gpu_samples.jsonl, config.toml, versions.json and failure.json may be missing or truncated.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tomllib
from collections import Counter
from pathlib import Path

from common.errors import ConfigError
from common.html import page
from common.html.page import Block, Curve, Section, banner, finite, median, number, points, table
from common.records.run_states import words
from submission import check, gpu_samples, terminal
from submission.advice import Advice
from submission.intervals import samples_of
from submission.log_rules import PRECISION_KEYS
from submission.runs import GOOD, Run

# The facts that are shown; the others are folded.
IMPORTANT = ("submission_platform", "config_filename", "commit", "seed", "torch", "driver")
FACTS = (
    *(
        "submission_org",
        "submission_platform",
        "submission_division",
        "submission_status",
        "config_filename",
    ),
    *(
        "global_batch_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "opt_base_learning_rate",
        *PRECISION_KEYS,
    ),
)
MINIATURE_NOTICE = banner(
    "warn",
    "A miniature: this is not a benchmark result.",
    "A small model with a target of its own.",
)
# MEDIANS: key of a step event -> name of the figure with its median. FORMS: figure -> format.
MEDIANS = {
    "step_time_ms": "step, ms",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "tflops_per_gpu": "TFLOP/s/GPU",
    "mfu": "MFU",
}
FORMS = {
    "minutes": ",.2f",
    "samples": ",.0f",
    "last evaluation": ".4f",
    "init, s": ",.0f",
    "train, s": ",.0f",
    "eval, s": ",.1f",
}
FORMS |= {
    "step, ms": ",.1f",
    "tokens/s/GPU": ",.0f",
    "TFLOP/s/GPU": ",.4g",
    "MFU": ".1%",
    "GiB, peak": ",.1f",
}
FORMS |= {"GPU-hours": ",.2f", "GPU kWh": ",.3f"}

Labeled = tuple[str, Run]


def run_page(run: Run, advised: list[Advice], refresh_s: float | None = None) -> str:
    """Return the page as HTML text. `refresh_s`: see `page.render`.

    Raises PreflightError if mlperf-logging or jinja2 is missing.
    """
    samples = gpu_samples.read_samples(run)
    figures = figures_of(run)
    clean, verdict = _verdict(run)
    tiles = [
        (name.replace("GPU", unit_of([run])), shown(figures, name))
        for name in FORMS
        if figures[name] is not None
    ]
    evaluated = [[number(value) for value in row.values()] for row in evaluations(run)]
    curves = [
        Curve("train", of_steps(run, "loss")),
        Curve("evaluation", points(evaluations(run), "samples", "loss"), 1, dots=True),
    ]
    heads = ("what the samples and events show", "what it is worth", "what to do", "source")
    return page.render(
        heading(run),
        [
            ("", [*[MINIATURE_NOTICE] * run.is_miniature, _banner(run, clean), {"tiles": tiles}]),
            (
                "What to do next",
                [{"steps": _next_steps(run, clean)}, table(heads, advised, range(4))],
            ),
            ("Loss", [loss_chart("loss", run, curves)]),
            (
                "Evaluations",
                [table(["samples", "loss", "minutes on the clock", "took, s"], evaluated)],
            ),
            ("Where the time went", [page.shares(phases(run))]),
            ("Training", training_charts(run)),
            ("GPUs during the run", gpu_samples.blocks(samples)),
            ("Ranks compared", gpu_samples.ranks_compared(run)),
            ("The checker's verdict", verdict),
            *provenance([("", run)]),
            files(run.folder),
        ],
        run.folder.resolve().name,
        refresh_s,
    )


def heading(run: Run) -> str:
    """Return benchmark, machine and time, as "llama31_8b · 8 x H200 · 2026-11-23 10:00 UTC"."""
    began = run.began
    parts = (run.benchmark or "run", run.machine, f"{began:%Y-%m-%d %H:%M} UTC" if began else "")
    return " · ".join(part for part in parts if part)


# Values from the log and the events.


def unit_of(runs: list[Run]) -> str:
    """Return "CPU" if all runs are on the CPU, else "GPU"."""
    return "CPU" if all(run.gpu == "CPU" for run in runs) else "GPU"


def of_steps(run: Run, key: str, x: str = "samples") -> list[tuple[float, float]]:
    """Return the values of `key` of the step events, over their values of `x`."""
    return points((record for record in run.records if record.get("event") == "step"), x, key)


def evaluations(run: Run) -> list[dict]:
    seconds = {interval.stop_samples: interval.seconds for interval in run.evaluations}
    start, rows = run.log.first("run_start"), []
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
    """Return the seconds of each phase.

    Training and evaluation are taken from the log, which a run that ended early has as well.
    """
    seconds = {"init": 0.0, "warmup": 0.0}
    for record in run.records:
        if (
            record.get("event") == "phase"
            and record.get("name") in ("init", "warmup")
            and finite(record.get("seconds"))
        ):
            seconds[record["name"]] += record["seconds"]
    return seconds | {
        "train": sum(block.seconds for block in run.blocks),
        "eval": run.evaluation_s or 0.0,
    }


def figures_of(run: Run) -> dict[str, float | None]:
    """Return the figures of a run by their names in FORMS, with None for unknown ones.

    GPU-hours are those of the GPUs in all nodes, from run_start to run_stop. kWh is the energy of
    the sampled GPUs in the same time.
    """
    seconds, last = phases(run), points(evaluations(run), "samples", "loss")[-1:]
    measured = {key: [value for _, value in of_steps(run, key)] for key in (*MEDIANS, "memory_gib")}
    return {
        "minutes": run.minutes,
        "samples": last[0][0] if last else None,
        "last evaluation": last[0][1] if last else None,
        "init, s": seconds["init"] + seconds["warmup"] or None,
        "train, s": seconds["train"] or None,
        "eval, s": seconds["eval"] or None,
        **{name: median(measured[key]) if measured[key] else None for key, name in MEDIANS.items()},
        "GiB, peak": max(measured["memory_gib"], default=None),
        "GPU-hours": run.gpus * run.minutes / 60
        if run.gpus and run.gpu != "CPU" and run.minutes is not None
        else None,
        "GPU kWh": gpu_samples.energy_kwh(gpu_samples.read_samples(run)),
    }


def shown(figures: dict[str, float | None], name: str) -> str:
    """Return the figure `name` in its format, or "-" if it is unknown."""
    return terminal.number(figures[name], FORMS[name])


# Blocks shared with other pages.


def loss_chart(label: str, run: Run, curves: list[Curve]) -> Block:
    """Return a loss chart with the target of `run` and its RCP band.

    The band begins at the lowest mean with which a series passes and ends at the reference mean.
    """
    band = (run.point.minimum, run.point.mean) if run.point else None
    label += ", nats per token" + (
        f" · dashed: target {run.target}" if run.target is not None else ""
    )
    if band:
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


def provenance(runs: list[Labeled], ask_all: bool = True) -> list[Section]:
    """Return the sections on what differs among the runs, what they share, and reading problems.

    `ask_all`: whether a missing fact counts as a difference. If not, a run without the fact is left
    out of the comparison, because it may have ended before the fact was logged.
    """
    facts = [(label, _facts(run, len(runs) == 1)) for label, run in runs]
    same, differing = [], []
    for key in dict.fromkeys(key for _, each in facts for key in each):
        holders: dict[str, list[str]] = {}
        for label, each in facts:
            if ask_all or key in each:
                holders.setdefault(each.get(key, "-"), []).append(label)
        values = [
            f"{', '.join(who).replace(', attempt ', ', ')}: {value}"
            for value, who in holders.items()
        ]
        (
            differing.append((key, "\n".join(values)))
            if len(values) > 1
            else same.append((key, next(iter(holders))))
        )
    config = {"text": runs[0][1].config if len(runs) == 1 else "", "title": "Config, as resolved"}
    unread = [f"{label} {note}".strip() for label, run in runs for note in run.notes]
    return [
        ("What differs", [table((), differing)]),
        ("Provenance", [*_folded(same), config]),
        ("What was odd", [{"notes": unread}]),
    ]


def _folded(facts: list[tuple[str, str]]) -> list[Block]:
    """Return a table of the IMPORTANT facts, in their order, and a folded one of the others."""
    named = dict(facts)
    important = [(key, named[key]) for key in IMPORTANT if key in named]
    others = [(key, value) for key, value in facts if key not in IMPORTANT]
    return [table((), important), table((), others, title=f"{len(others)} more")]


def _facts(run: Run, alone: bool) -> dict[str, str]:
    """Return the facts in the log, the self-test and versions.json.

    `alone`: whether the page has only this run. If so, the seed is added, else config.toml.
    """
    facts = {
        key: value
        for key in (*FACTS, *["seed"] * alone)
        if (value := run.log.value(key)) is not None
    } | run.versions
    if torch := run.versions.get("packages", {}).get("torch"):
        facts["torch"] = torch
    for record in run.records:
        if record.get("event") == "self_test":
            facts["attention by"] = record.get("attention")
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):  # a truncated file
        facts |= {} if alone else tomllib.loads(run.config)
    return {str(key): _plain(value) for key, value in facts.items() if value is not None}


def _plain(value: object) -> str:
    """Return a value of JSON or TOML in one line. Equal names in a list are counted."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return (
            ", ".join(
                f"{count} x {name}" if count > 1 else name for name, count in Counter(value).items()
            )
            or "none"
        )
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return value or "none" if isinstance(value, str) else json.dumps(value, default=str)


def files(folder: Path) -> Section:
    return "Files", [
        {"links": sorted(path.name for path in folder.glob("[!.]*") if path.name != "report.html")}
    ]


# Blocks of this page only.


def _banner(run: Run, clean: bool) -> Block:
    """Return the banner with the state of the run.

    The log decides, as in score and package. failure.json only explains.
    """
    outcome = run.outcome[:1].upper() + run.outcome[1:]
    lines = [outcome if run.state == GOOD or not run.reason else f"{outcome}: {run.reason}"]
    if last := evaluations(run)[-1:]:
        lines.append(
            f"last evaluation {number(last[0]['loss'])}, target {number(run.target)},"
            f" at {number(last[0]['samples'])} samples"
        )
    lines += [f"{key}: {run.failure[key]}" for key in ("what", "why") if run.failure.get(key)]
    lines[0] += ", but the log is not clean" * (run.state == GOOD and not clean)
    if run.running:
        return banner("info", *lines)
    if run.outcome == words("interrupted"):
        return banner("warn", *lines)
    if run.state != GOOD:
        return banner("bad", *lines)
    return banner("good" if clean else "warn", *lines)


def _next_steps(run: Run, clean: bool) -> list[tuple[str, str]]:
    """Return pairs of a sentence and a command, which may be empty."""
    command = "./run_and_time.sh"
    folder = shlex.quote(str(run.folder))
    series = shlex.quote(str(run.folder.parent))
    steps = []
    if run.running:
        return [
            ("Keep this page up to date until the run ends:", f"{command} report {folder} --watch")
        ]
    if run.state != GOOD:
        steps.append(
            (
                str(run.failure.get("do") or "Look up the exit code in docs/troubleshooting.md."),
                "",
            )
        )
    if not clean and run.state == GOOD:
        steps.append(("The log is not clean. All findings:", f"{command} check {folder}"))
    if run.state == GOOD and run.is_miniature:
        steps.append(
            (
                "The package runs on this machine. What do the benchmark's own sizes need?",
                f"{command} {run.benchmark} plan",
            )
        )
    elif run.state == GOOD:
        steps.append(("A result is ten runs in a row:", f"NEXP=10 {command} {run.benchmark}"))
        steps.append(
            ("What a series scores, and how much of it is luck:", f"{command} score {series}")
        )
    return [*steps, ("Beside another run:", f"{command} report {folder} OTHER_RUN")]


def _verdict(run: Run) -> tuple[bool, list[Block]]:
    """Return whether the log is clean, and the output of `check`. Raises PreflightError."""
    # A missing or unreadable log is among the notes of the run already.
    with contextlib.suppress(ConfigError):
        examined = check.examine(run.path)
        _, title, *findings, summary = (
            "\n".join(check.lines(examined, werror=False)).strip().splitlines()
        )
        if run.state != GOOD and run.status != "success":
            title = "findings in the log of a run without a result"
            return False, [{"text": "\n".join(findings), "title": title}]
        state = "bad" if examined.errors() else "good"
        return state == "good", [
            banner(state, summary.strip(), title.strip()),
            {"text": "\n".join(findings)},
        ]
    return True, []
