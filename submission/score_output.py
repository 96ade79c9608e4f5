"""The score of a series, as lines for the screen and as a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from common.command_line import PROGRAM
from common.records.rcp import SUBMISSION_RUNS
from common.terminal import plural
from common.text_tables import number
from submission.comparison import where
from submission.log_rules import REHEARSAL_KEY
from submission.output import table
from submission.run import NOT_STARTED, Run
from submission.series import Series, TenRuns, pace

# Attributes of a Run that the JSON object has for the series, and those that it has for each run.
SERIES_KEYS = ("benchmark", "division", "org", "ruleset", "gpu", "gpus")
RUN_KEYS = (
    "name",
    "number",
    "state",
    "state_words",
    "counts_as",
    "reason",
    "converged",
    "minutes",
    "samples",
    "z",
    "samples_per_s",
    "tokens_per_s_per_gpu",
    "evaluation_s",
    "notes",
)


def as_dict(series: Series, ten: TenRuns) -> dict:
    """Return the JSON object of --json.

    `result` describes the median window, or the whole series if it has no more than ten runs.
    `windows` has the scores of all windows of ten runs.
    """
    first = series.first
    parts = pace(ten)
    return {
        **{key: getattr(first, key) for key in SERIES_KEYS},
        "global_batch_size": first.batch,
        "runs": [{key: getattr(run, key) for key in RUN_KEYS} for run in series.runs],
        "result": {
            **_numbers(ten),
            "factor": ten.factor,
            "passed": ten.passed,
            "samples": ten.samples,
            "rcp": asdict(ten.verdict) if ten.verdict else None,
            "pace": asdict(parts) if parts else None,
        },
        "windows": [
            {"first": window.runs[0].name, **_numbers(window)}
            for window in series.windows
            if window.runs
        ],
        "notes": series.notes,
    }


def _numbers(ten: TenRuns) -> dict:
    return {"minutes": ten.minutes, "score": ten.score, "invalid": ten.invalid or None}


def report(series: Series, ten: TenRuns) -> list[str]:
    """Return the lines to print before the comparison: runs, notes and score."""
    first = series.first
    division = first.division or "no division"
    runs = plural(len(series.runs), "run")
    lines = [f"{first.benchmark}, {division}: {runs}, {where(first)}", ""]
    lines += table(_run_rows(series, ten))
    notes = list(series.notes)
    invented = [run for run in series.runs if run.log.all(REHEARSAL_KEY)]
    if invented:
        notes.append(f"{plural(len(invented), 'log')} INVENTED by package --rehearse: no result")
    for run in series.runs:
        notes += [f"{run.name}: {note}" for note in _notes(run)]
    if notes:
        lines += ["", *(f"  {note}" for note in notes)]
    total = len(series.windows)
    if total > 1:
        median = f"{ten.runs[0].name} to {ten.runs[-1].name}"
        lines += [
            "",
            f"median of {total} windows of {SUBMISSION_RUNS} consecutive runs: {median}"
            " (all windows: --json)",
        ]
    return [*lines, "", *score_lines(ten)]


def _notes(run: Run) -> list[str]:
    """Return remarks on `run`: unusual values, and why it is not good or not counted."""
    if run.counts_as == NOT_STARTED:
        reason = run.reason or "its log ends before run_start"
        return [f"not counted, because its clock never started: {reason}"]
    if run.reason:
        return [*run.notes, f"{run.state_words}: {run.reason}"]
    return run.notes


def _run_rows(series: Series, ten: TenRuns) -> list[Sequence[str]]:
    """Return the head and one row per run of the table of runs."""
    rows: list[Sequence[str]] = [
        (
            "run",
            "minutes",
            "converged",
            "samples",
            "deviation, SD",  # from the reference mean, in its standard deviations
            "seq/s",
            "tokens/s/GPU",
            "evaluation s",
            "",
        )
    ]
    for run in series.runs:
        rows.append(
            (
                run.name,
                number(run.minutes, ".3f"),
                "yes" if run.converged else "NO",
                number(run.samples, ",d"),
                number(run.z if run.converged else None, "+.2f"),
                number(run.samples_per_s, ".3f"),
                number(run.tokens_per_s_per_gpu, ",.0f"),
                number(run.evaluation_s, ".1f"),
                _role(run, ten),
            )
        )
    return rows


def _role(run: Run, ten: TenRuns) -> str:
    """Return why a run is not in the mean, for the last column, or "" if it is."""
    if run not in ten.runs:
        return run.outcome if run.counts_as == NOT_STARTED else "not in the median window"
    if not run.converged:
        return run.outcome
    if run in ten.counted:
        return ""
    converged = (each for each in ten.runs if each.converged)
    fastest = min(converged, key=lambda each: each.minutes or 0.0)  # the first of equal ones
    return "dropped: fastest" if run == fastest else "dropped: slowest"


def score_lines(ten: TenRuns) -> list[str]:
    """Return the lines that explain the score, and that compare the samples with the reference."""
    if not ten.runs:
        return ["score", "  no run started its clock"]
    return ["score", *_mean_lines(ten), *_verdict_lines(ten), *_sample_lines(ten)]


def _mean_lines(ten: TenRuns) -> list[str]:
    """Return the line with the mean of the minutes."""
    runs = len(ten.counted)
    minutes = number(ten.minutes, ".4f")
    if not runs:
        return ["  minutes         none: no run converged"]
    if len(ten.runs) >= 3:
        return [
            f"  minutes         {minutes}, mean of {plural(runs, 'run')},"
            " without the fastest and the slowest"
        ]
    if runs == 1:
        return [f"  minutes         {minutes}, of one run"]
    return [f"  minutes         {minutes}, mean of {runs} runs, too few to drop any"]


def _verdict_lines(ten: TenRuns) -> list[str]:
    """Return the line of the RCP test, if it was made, and the line with the score."""
    lines = []
    if ten.verdict:
        verdict = "passed" if ten.verdict.passed else "FAILED"
        lines.append(f"  RCP test        {verdict} ({ten.verdict.message})")
    if ten.runs[0].is_miniature:
        lines.append("  miniature       no score: not a benchmark result")
    elif ten.invalid:
        lines.append(f"  INVALID         {ten.invalid}")
        if len(ten.runs) < SUBMISSION_RUNS:
            command = f"NEXP={SUBMISSION_RUNS} {PROGRAM} {ten.runs[0].benchmark} --resume"
            lines.append(f"                  to run the others: {command}")
    elif ten.score is None:
        line = "  NO SCORE        the RCP test failed"
        point = ten.runs[0].point
        if point is not None and ten.samples is not None and ten.samples < point.minimum:
            line += ": the runs converged faster than it allows"
        lines.append(line)
    else:
        lines.append(
            f"  score           {ten.score:.4f} min = {ten.minutes:.4f} x {ten.factor:.6f}"
        )
    return lines


def _sample_lines(ten: TenRuns) -> list[str]:
    """Return the lines that compare the samples to the target with the reference."""
    first = ten.runs[0]
    if first.is_miniature:
        return []
    lines = ["", "samples to the target"]
    point = first.point
    mean = ten.samples
    if point is None:
        return [*lines, "  no reference convergence point at this global batch"]
    if mean is None:
        return [*lines, "  too few runs converged to compare with the reference"]
    change = (mean / point.mean - 1) * 100
    return [
        *lines,
        f"  reference {point.mean:,.2f} +- {point.sigma:,.2f};"
        f" lowest mean that passes: {point.minimum:,.2f}",
        f"  mean {mean:,.2f}: {change:+.2f} % from the reference,"
        f" {point.z_score(mean):+.2f} standard deviations",
    ]
