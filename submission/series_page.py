"""The pages of several runs: the report of a series, and the comparison of runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from common.html import page
from common.html.page import Block, Curve, Link, banner, points, table
from common.records.rcp import SUBMISSION_RUNS
from common.records.windows import good_runs_needed
from submission import run_page
from submission.run_page import FORMS, Labeled, evaluations, figures_of, of_steps, shown
from submission.runs import GOOD, Run
from submission.score import score_lines
from submission.series import Series, TenRuns, counted, ten_runs, windows
from submission.terminal import plural

OF_AN_ATTEMPT = (
    "samples",
    "minutes",
    "init, s",
    "step, ms",
    "tokens/s/GPU",
    "GiB, peak",
    "GPU kWh",
)


def series_page(series: Series, folder: Path, refresh_s: float | None = None) -> str:
    """Return the page as HTML text, for a file in `folder`. `refresh_s`: see `page.render`.

    Raises PreflightError if mlperf-logging or jinja2 is missing.
    """
    ten, runs = ten_runs(series), [(f"attempt {run.number}", run) for run in series.runs]
    counts = () if ten.invalid else ten.runs
    figures = [figures_of(run) for run in series.runs]
    measured = [
        name for name in OF_AN_ATTEMPT if any(of_a_run[name] is not None for of_a_run in figures)
    ]
    heads, rows = _rows(
        [(f"{run.number}{' *' if run in counts else ''}", run) for run in series.runs],
        figures,
        measured,
        folder,
    )
    known = run_page.provenance(runs, ask_all=False)
    differ = (
        [banner("warn", "The runs differ in what should be the same")]
        if known[0][1][0]["table"]
        else []
    )
    return page.render(
        f"{run_page.heading(series.runs[0])} · {plural(len(series.runs), 'attempt')}",
        [
            (
                "",
                [
                    *[run_page.MINIATURE_NOTICE] * series.first.is_miniature,
                    _banner(series, ten),
                    *differ,
                ],
            ),
            ("What to do next", [{"steps": _next_steps(series, ten, shlex.quote(str(folder)))}]),
            ("Score", [{"text": "\n".join(score_lines(ten))}]),
            (
                "Loss of all runs",
                [
                    _losses(
                        [
                            (label if run.state == GOOD else f"{label}, {run.outcome}", run)
                            for label, run in runs
                        ]
                    )
                ],
            ),
            (
                "Attempts",
                [
                    table(heads, rows, (0, 1, 2)),
                    {"notes": ["* among the ten of the score"] if counts else []},
                ],
            ),
            *known,
            run_page.files(folder),
        ],
        series.name,
        refresh_s,
    )


def comparison_page(runs: list[Run], folder: Path) -> str:
    """Return the page as HTML text, for a file in `folder`.

    The runs are named A, B, ..., and changes are relative to A. Raises PreflightError if
    mlperf-logging or jinja2 is missing.
    """
    named = [(chr(ord("A") + index), run) for index, run in enumerate(runs)]
    losses = _curves(named, "loss", "samples")
    times = _curves(named, "step_time_ms", "step")
    first, *others = figures = [figures_of(run) for run in runs]
    heads, rows = _rows(named, figures, FORMS, folder)
    for (label, _), other in zip(named[1:], others, strict=True):
        changes = [
            f"{value / base - 1:+.1%}"
            if (base := first[name]) and (value := other[name]) is not None
            else "-"
            for name in FORMS
        ]
        rows.append([f"{label} against A", "", "", "", "", *changes])
    top, *cells = zip(heads, *rows, strict=True)
    return page.render(
        f"{plural(len(runs), 'run')} compared · {run_page.heading(runs[0])}",
        [
            ("Differences", [table(top, [row for row in cells if {*row[1:]} - {"-", ""}])]),
            ("Loss", [_losses(named), run_page.loss_chart("training loss", runs[0], losses)]),
            ("Step time", [run_page.step_chart(times)]),
            *run_page.provenance(named),
        ],
        " · ".join(f"{label}: {run.folder.resolve().name}" for label, run in named),
    )


def _rows(
    runs: list[Labeled], figures: list[dict[str, float | None]], names: Iterable[str], folder: Path
) -> tuple[list[str], list[list[str | Link]]]:
    """Return the heads and rows of a table of `runs`.

    `figures`: the `figures_of` each run. `names`: the figures to show. `folder`: the directory of
    the page, which the links to the reports are relative to.
    """
    rows: list[list[str | Link]] = []
    for (label, run), of_this in zip(runs, figures, strict=True):
        report = run.folder / "report.html"
        link = (
            Link("report", quote(Path(os.path.relpath(report, folder)).as_posix()))
            if report.is_file()
            else "-"
        )
        seed, code = (
            str(run.start.get("seed", run.log.value("seed"))),
            str(run.end.get("exit_code", "-")),
        )
        reason = str(run.reason or run.failure.get("what") or "") if run.state != GOOD else ""
        state = f"{run.outcome}: {reason}" if reason else run.outcome
        rows.append([label, link, state, code, seed, *(shown(of_this, name) for name in names)])
    unit = run_page.unit_of([run for _, run in runs])
    return [
        "run",
        "page",
        "state",
        "exit",
        "seed",
        *(name.replace("GPU", unit) for name in names),
    ], rows


def _curves(runs: list[Labeled], key: str, x: str) -> list[Curve]:
    """Return a curve of `key` of the steps of each run, over their values of `x`."""
    return [Curve(label, of_steps(run, key, x), color) for color, (label, run) in enumerate(runs)]


def _losses(runs: list[Labeled]) -> Block:
    curves = [
        Curve(label, points(evaluations(run), "samples", "loss"), index, dots=True)
        for index, (label, run) in enumerate(runs)
    ]
    return run_page.loss_chart(
        "evaluation loss", next((run for _, run in runs if run.benchmark), runs[0][1]), curves
    )


def _banner(series: Series, ten: TenRuns) -> Block:
    share = f"{len(series.good)} of {len(series.runs)} attempts are good"
    if any(run.running for run in series.runs):
        return banner("info", f"Running: {share}")
    if series.first.is_miniature:
        return banner("good" if series.good else "bad", share)
    if ten.invalid:
        return banner("warn" if series.good else "bad", share, f"no score: {ten.invalid}")
    count = sum(not window.invalid for window in windows(series))
    extent = f"attempts {ten.runs[0].number} to {ten.runs[-1].number}" + (
        f", the median of {count} windows" if count > 1 else ""
    )
    test = "passed" if ten.passed else f"FAILED: {ten.verdict.message if ten.verdict else ''}"
    return banner(
        "good" if ten.passed else "bad",
        f"{ten.rank:.3f} minutes",
        f"score of {extent}; {share}",
        f"RCP test {test}",
    )


def _next_steps(series: Series, ten: TenRuns, folder: str) -> list[tuple[str, str]]:
    """Return pairs of a sentence and a command."""
    command, benchmark = "./run_and_time.sh", series.first.benchmark
    if series.first.is_miniature:
        return [
            (
                "The package runs on this machine. What do the benchmark's own sizes need?",
                f"{command} {benchmark} plan",
            )
        ]
    if ten.invalid:
        wanted = len(series.good) + good_runs_needed([run.converged for run in counted(series)])
        return [
            (
                "Go on until the median window is valid:",
                f"NEXP={max(wanted, SUBMISSION_RUNS)} {command} {benchmark} --resume",
            )
        ]
    score = ("Beside the best published result of these GPUs:", f"{command} score {folder}")
    return [
        score,
        *[("The tree of a submission, checked:", f"{command} package --help")] * ten.passed,
    ]
