"""The page about a series of runs: verdict and score, all curves against the RCP band, how they differ, and what each was.

Which ten count, and which attempts are good, lost or no run, is what submission/series.py says.
"""

from __future__ import annotations

from html import escape

from submission import plots
from submission.plots import Curve, median, number, points, section, table
from submission.run_page import evaluations, measured, phases, provenance, rcp_band
from submission.runs import GOOD, Run
from submission.score import score_lines
from submission.series import Series, TenRuns, ten_runs, windows

HEADS = ("attempt", "state", "seed", "samples", "minutes", "init, s", "step, ms", "tok/s/GPU", "GiB", "exit", "reason")


def render(series: Series) -> str:
    """The page as HTML text. Raises PreflightError where mlperf-logging is missing and a verdict needs it."""
    ten = ten_runs(series)
    sections = [
        _banner(series, ten),
        section("Score", f"<pre>{escape(chr(10).join(score_lines(ten)))}</pre>"),
        section("Evaluation loss of all runs", _losses(series)),
        section("Where the time went", plots.phase_table([(f"attempt {run.number}", phases(run)) for run in series.runs])),
        section("Attempts", _attempts(series, ten)),
        section("Provenance", _provenance(series)),
        section("Could not be read, or odd", plots.notes(f"attempt {run.number}: {note}" for run in series.runs for note in run.notes)),
    ]
    return plots.page(f"{series.first.benchmark or 'runs'} · {series.name}", sections, wide=True)


# Verdict and score.


def _banner(series: Series, ten: TenRuns) -> str:
    share = f"{len(series.good)} of {len(series.runs)} attempts are good"
    if series.first.is_miniature:
        return plots.MINIATURE_NOTICE + plots.banner("good" if series.good else "bad", [share])
    if ten.invalid:
        return plots.banner("warn" if series.good else "bad", [share, f"no score: {escape(ten.invalid)}"])
    count = sum(not window.invalid for window in windows(series))
    extent = f"attempts {ten.runs[0].number} to {ten.runs[-1].number}" + (f", the median of {count} windows" if count > 1 else "")
    test = "passed" if ten.passed else f"FAILED: {escape(ten.verdict.message if ten.verdict else '')}"
    lines = [f"{ten.rank:.3f} minutes", f"score of {extent}; {share}", f"RCP test {test}"]
    return plots.banner("good" if ten.passed else "bad", lines)


def _losses(series: Series) -> str:
    """Evaluations of all runs over each other."""
    target, band = series.first.target, rcp_band(series.first)
    curves = [
        Curve(
            points(evaluations(run), "samples", "loss"), f"run{'' if run.state == GOOD else ' other'}", f"attempt {run.number}", dots=True
        )
        for run in series.runs
    ]
    drawn = plots.chart(curves, ("training sequences", "evaluation loss, nats per token"), target, band)
    entries = [("key-eval", "&#9679; good run")] + [("dim", "&#9679; other attempt")] * (len(series.good) < len(series.runs))
    return drawn and drawn + plots.legend(entries, target, band)


# Tables.


def _attempts(series: Series, ten: TenRuns) -> str:
    counts = () if ten.invalid else ten.runs
    rows = [_attempt_row(run, any(run is one for one in counts)) for run in series.runs]
    note = "<p class=dim>* among the ten of the score; step and tok/s are medians, GiB the peak</p>" if counts else ""
    return table(list(HEADS), rows, texts=(1, len(HEADS) - 1), kind="many") + note


def _attempt_row(run: Run, counts: bool) -> list[str]:
    steps, rates, memory = (measured(run, key) for key in ("step_time_ms", "tokens_per_s_per_gpu", "memory_gib"))
    seconds, last = phases(run), evaluations(run)[-1:]
    return [
        f"{run.number}{' *' if counts else ''}",
        escape(run.state),
        escape(str(run.start.get("seed", run.log.value("seed")))),
        number(last[0]["samples"]) if last else "-",
        f"{run.minutes:.2f}" if run.minutes is not None else "-",
        f"{seconds['init'] + seconds['warmup']:.0f}" if seconds["init"] else "-",
        f"{median(steps):,.1f}" if steps else "-",
        f"{median(rates):,.0f}" if rates else "-",
        f"{max(memory):.1f}" if memory else "-",
        escape(str(run.end.get("exit_code", "-"))),
        escape(run.reason or str(run.failure.get("what") or "")) if run.state != GOOD else "",
    ]


def _provenance(series: Series) -> str:
    """What differs among the runs, with who differs; then what they share. A run that has not got so far is not asked."""
    facts = [(run.number, provenance(run)) for run in series.runs]
    same, differing = [], []
    for key in dict.fromkeys(key for _, each in facts for key in each):
        holders: dict[str, list[str]] = {}
        for attempt, each in facts:
            if key in each:
                holders.setdefault(each[key], []).append(str(attempt))
        if len(holders) == 1:
            same.append((key, next(iter(holders))))
        else:
            differing.append((key, "\n".join(f"attempt {', '.join(numbers)}: {value}" for value, numbers in holders.items())))
    warning = plots.banner("warn", ["The runs differ in what should be the same"]) if differing else ""
    return warning + plots.facts(differing) + plots.facts(same) + _config(series)


def _config(series: Series) -> str:
    configs = [run.config for run in series.runs if run.config]
    if not configs:
        return ""
    note = "" if len(set(configs)) == 1 else plots.banner("warn", [f"{len(set(configs))} different configs; this is the first"])
    return f"<h2>Config, as resolved</h2>{note}<pre>{escape(configs[0])}</pre>"
