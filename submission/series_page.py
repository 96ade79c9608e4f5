"""The pages of several runs: the report of a series, and the comparison of runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from common.html import page
from common.html.page import Block, Curve, Link, Section, banner, points, table
from common.records.rcp import SUBMISSION_RUNS
from common.records.windows import good_runs_needed
from common.terminal import plural
from submission import provenance, run_list, run_page
from submission.figures import FORMS, evaluations, figures_of, of_steps, shown, unit_of
from submission.provenance import Labeled
from submission.run import Run
from submission.score_output import score_lines
from submission.series import Series, TenRuns, started_runs, ten_runs

# Figures that the table of attempts shows.
ATTEMPT_FIGURES = (
    "samples",
    "minutes",
    "init, s",
    "step, ms",
    "tokens/s/GPU",
    "GiB, peak",
    "GPU kWh",
)
MAX_KEYS = 2  # config keys in the legend of a comparison
OTHER_SEEDS = (
    "The seeds differ. Runs of one config with other seeds differ in their losses too, so a small "
    "difference may be chance: set SEED, or compare several seeds."
)


def series_page(series: Series, folder: Path, refresh_s: float | None = None) -> str:
    """Return the page of a series as HTML text, for a file in `folder`.

    `refresh_s`: see `page.render`. Raises PreflightError if mlperf-logging or jinja2 is missing.
    """
    ten = ten_runs(series)
    runs = [(f"attempt {run.number}", run) for run in series.runs]
    differing, _ = provenance.compared_facts(runs, ask_all=False)
    top = [_banner(series, ten)]
    if series.first.is_miniature:
        top.insert(0, run_page.MINIATURE_NOTICE)
    if differing:
        top.append(banner("warn", "The runs differ in facts that must be equal"))
    labeled = []
    for label, run in runs:
        labeled.append((label if run.converged else f"{label}, {run.outcome}", run))
    sections: list[Section] = [
        ("", top),
        ("What to do next", [{"steps": _next_steps(series, ten, shlex.quote(str(folder)))}]),
        ("Score", [{"text": "\n".join(score_lines(ten))}]),
        ("Loss of all runs", [_losses(labeled)]),
        ("Attempts", _attempts(series, ten, folder)),
        *provenance.sections(runs, ask_all=False),
        run_page.files(folder),
    ]
    title = f"{run_page.heading(series.runs[0])} · {plural(len(series.runs), 'attempt')}"
    return page.render(title, sections, series.name, refresh_s)


def _attempts(series: Series, ten: TenRuns, folder: Path) -> list[Block]:
    """Return a table of the attempts, with a * after those that are in the score."""
    scored = () if ten.invalid else ten.runs
    figures = [figures_of(run) for run in series.runs]
    names = []
    for name in ATTEMPT_FIGURES:
        if any(of_run[name] is not None for of_run in figures):
            names.append(name)
    labeled = []
    for run in series.runs:
        labeled.append((f"{run.number} *" if run in scored else f"{run.number}", run))
    heads, rows = _rows(labeled, figures, names, folder)
    notes = ["* one of the runs in the score"] if scored else []
    return [table(heads, rows, (0, 1, 2)), {"notes": notes}]


def comparison_page(runs: list[Run], folder: Path) -> str:
    """Return the page that compares `runs` as HTML text, for a file in `folder`.

    The runs are named A, B, ..., and changes are relative to A. Raises PreflightError if
    mlperf-logging or jinja2 is missing.
    """
    labeled = [(chr(ord("A") + index), run) for index, run in enumerate(runs)]
    named = _named_by_settings(labeled)
    losses = _curves(named, "loss", "samples")
    times = _curves(named, "step_time_ms", "step")
    figures = [figures_of(run) for run in runs]
    heads, rows = _rows(labeled, figures, FORMS, folder)
    for (label, _), of_run in zip(labeled[1:], figures[1:], strict=True):
        changes = [_change(figures[0][name], of_run[name]) for name in FORMS]
        rows.append([f"{label} against A", "", "", "", "", *changes])
    # Each run is a column on the page, and a figure that no run has is left out.
    top, *columns = zip(heads, *rows, strict=True)
    known = [cells for cells in columns if {*cells[1:]} - {"-", ""}]
    (_, differing), *provenance_sections = provenance.sections(labeled)
    if len({run.seed for run in runs}) > 1:
        differing = [*differing, {"notes": [OTHER_SEEDS]}]
    sections: list[Section] = [
        ("What differs", differing),
        ("Results", [table(top, known)]),
        ("Loss", [_losses(named), run_page.loss_chart("training loss", runs[0], losses)]),
        ("Step time", [run_page.step_chart(times)]),
        *provenance_sections,
    ]
    title = f"{plural(len(runs), 'run')} compared · {run_page.heading(runs[0])}"
    names = " · ".join(f"{label}: {run.folder.resolve().name}" for label, run in labeled)
    return page.render(title, sections, names)


def _named_by_settings(runs: list[Labeled]) -> list[Labeled]:
    """Return the runs with the config keys that differ among them in their labels, if few do."""
    keys = run_list.differing_keys([run.settings for _, run in runs])
    if len(keys) > MAX_KEYS:
        return runs
    named = []
    for label, run in runs:
        values = [f"{key} {run.settings.get(key, '-')}" for key in keys]
        named.append((", ".join([label, *values]), run))
    return named


def _change(base: float | None, value: float | None) -> str:
    """Return the change from `base` to `value` in percent, or "-" if it is unknown."""
    if not base or value is None:
        return "-"
    return f"{value / base - 1:+.1%}"


def _rows(
    runs: list[Labeled], figures: list[dict[str, float | None]], names: Iterable[str], folder: Path
) -> tuple[list[str], list[list[str | Link]]]:
    """Return the heads and rows of a table of `runs`.

    `figures`: the `figures_of` each run. `names`: the figures to show. `folder`: the directory of
    the page, to which the links to the reports are relative.
    """
    rows: list[list[str | Link]] = []
    for (label, run), of_run in zip(runs, figures, strict=True):
        report = run.folder / "report.html"
        link: str | Link = "-"
        if report.is_file():
            link = Link("report", quote(Path(os.path.relpath(report, folder)).as_posix()))
        state = f"{run.outcome}: {run.reason}" if run.reason else run.outcome
        code = str(run.end.get("exit_code", "-"))
        rows.append(
            [label, link, state, code, str(run.seed), *(shown(of_run, name) for name in names)]
        )
    unit = unit_of([run for _, run in runs])
    heads = ["run", "page", "state", "exit code", "seed"]
    heads += [name.replace("GPU", unit) for name in names]
    return heads, rows


def _curves(runs: list[Labeled], key: str, x: str) -> list[Curve]:
    """Return a curve of `key` over `x` for each run, from its step events."""
    return [Curve(label, of_steps(run, key, x), color) for color, (label, run) in enumerate(runs)]


def _losses(runs: list[Labeled]) -> Block:
    """Return a chart of the evaluation loss of each run."""
    curves = []
    for index, (label, run) in enumerate(runs):
        losses = points(evaluations(run), "samples", "loss")
        curves.append(Curve(label, losses, index, dots=True))
    first = next((run for _, run in runs if run.benchmark), runs[0][1])
    return run_page.loss_chart("evaluation loss", first, curves)


def _banner(series: Series, ten: TenRuns) -> Block:
    """Return the banner with the score of the series, or why it has none."""
    share = f"{len(series.good)} of {len(series.runs)} attempts are good"
    if any(run.running for run in series.runs):
        return banner("info", f"Running: {share}")
    if series.first.is_miniature:
        return banner("good" if series.good else "bad", share)
    if ten.invalid:
        return banner("warn" if series.good else "bad", share, f"no score: {ten.invalid}")
    scored = f"attempts {ten.runs[0].number} to {ten.runs[-1].number}"
    count = sum(not window.invalid for window in series.windows)
    if count > 1:
        scored += f", the median of {count} windows"
    kind = "good"
    test = "passed"
    if not ten.passed:
        kind = "bad"
        test = f"FAILED: {ten.verdict.message if ten.verdict else ''}"
    minutes = f"{ten.rank:.3f} minutes"
    return banner(kind, minutes, f"score of {scored}; {share}", f"RCP test {test}")


def _next_steps(series: Series, ten: TenRuns, folder: str) -> list[tuple[str, str]]:
    """Return pairs of a sentence and a command. `folder`: path of the series, shell-quoted."""
    command = "./run_and_time.sh"
    benchmark = series.first.benchmark
    if series.first.is_miniature:
        return [(run_page.PLAN_TEXT, f"{command} {benchmark} plan")]
    if ten.invalid:
        needed = good_runs_needed([run.converged for run in started_runs(series)])
        runs = max(len(series.good) + needed, SUBMISSION_RUNS)
        text = "Continue until the median window is valid:"
        return [(text, f"NEXP={runs} {command} {benchmark} --resume")]
    text = "Compare with the best published result on these GPUs:"
    steps = [(text, f"{command} score {folder}")]
    if ten.passed:
        steps.append(("Make a submission and check it:", f"{command} package --help"))
    return steps
