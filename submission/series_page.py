"""The page about a series of runs: verdict and score, all curves against the RCP band, how they differ, and what each was.

Which ten count, and which attempts are good, lost or no run, is what submission/series.py says.
"""

from __future__ import annotations

from html import escape

from records.rcp import trimmed_mean
from submission import plots, rcp
from submission.plots import Axes, median, number, points, section, table
from submission.run_page import evaluations, measured, phases, provenance, rcp_point
from submission.runs import GOOD, Run
from submission.series import Series, TenRuns, ten_runs, windows

PRUNED = rcp.POINT_SETS[:1]
HEADS = ("attempt", "state", "seed", "samples", "minutes", "init, s", "step, ms", "tok/s/GPU", "GiB", "exit", "reason")


def render(series: Series) -> str:
    """The page as HTML text. Raises PreflightError where mlperf-logging is missing and a verdict needs it."""
    ten, point = ten_runs(series, points=PRUNED), rcp_point(series.first)
    sections = [
        _banner(series, ten),
        section("Score", _score(series, ten, point)),
        section("Evaluation loss of all runs, and near the target", _losses(series, point)),
        section("Run by run", _run_by_run(series, point)),
        section("Step time, all runs", _step_times(series)),
        section("Where the time went", _phases(series)),
        section("Attempts", _attempts(series, ten)),
        section("Provenance", _provenance(series)),
        section("Could not be read, or odd", _notes(series)),
    ]
    return plots.page(f"{series.first.benchmark or 'runs'} · {series.name}", sections, wide=True)


# Verdict and score.


def _banner(series: Series, ten: TenRuns) -> str:
    share = f"{len(series.good)} of {len(series.runs)} attempts are good"
    if series.first.is_miniature:
        return plots.MINIATURE_NOTICE + plots.banner("good" if series.good else "bad", [share])
    if ten.invalid:
        return plots.banner("warn" if series.good else "bad", [share, f"no score: {escape(ten.invalid)}"])
    count = sum(not window.invalid for window in windows(series, PRUNED))
    extent = f"attempts {ten.runs[0].number} to {ten.runs[-1].number}" + (f", the median of {count} windows" if count > 1 else "")
    test = "passed" if ten.passed else f"FAILED: {escape(ten.verdicts[0].message)}"
    lines = [f"{ten.rank:.3f} minutes", f"score of {extent}; {share}", f"RCP test {test}"]
    return plots.banner("good" if ten.passed else "bad", lines)


def _score(series: Series, ten: TenRuns, point: rcp.Point | None) -> str:
    """How the score comes about; of whatever good runs there are while there are no ten."""
    if len(ten.counted) < 1 or len(series.good) < 3:
        return ""
    which = f"{len(ten.runs)} runs" if ten.invalid else "the ten runs"
    rows = [[f"mean of {which} without fastest and slowest", f"{number(ten.minutes)} min"]]
    rows += [["training sequences to the target, likewise", number(ten.samples)]]
    if point and ten.verdicts:
        verdict = ten.verdicts[0]
        rows += [[f"reference convergence point, global batch {point.batch}: mean", f"{point.mean:,.2f}"]]
        rows += [["least mean that passes", f"{point.minimum:,.2f}"]]
        rows += [["RCP test", f"{'passed' if verdict.passed else 'failed'} ({escape(verdict.message)})"]]
        rows += [["factor on the score", f"{verdict.factor:.6f}"]]
    if ten.score is not None:
        rows += [["<b>score</b>", f"<b>{ten.score:.4f} min</b>"]]
    return table(["", ""], rows)


# Curves.


def _losses(series: Series, point: rcp.Point | None) -> str:
    curves = [(run, points(evaluations(run), "samples", "loss")) for run in series.runs]
    everything = [spot for _, curve in curves for spot in curve]
    if not everything:
        return ""
    target = series.first.target
    losses = [y for _, y in everything] + ([target] if target is not None else [])
    samples = [x for x, _ in everything] + ([point.mean] if point else [])
    whole = _curves(curves, Axes(0, 1.02 * max(*samples, 1), *plots.padded(min(losses), max(losses))), target, point)
    axes = _near(curves, target, point)
    near = _curves(curves, axes, target, point) if axes else ""
    return f"<div class=two><div>{whole}</div><div>{near}</div></div>{_legend(series, target, point)}"


def _curves(curves: list[tuple[Run, list[tuple[float, float]]]], axes: Axes, target: float | None, point: rcp.Point | None) -> str:
    """Evaluations of all runs over each other, as far as they are within `axes`."""
    body = axes.band(point.minimum, point.mean) if point else ""
    if point and axes.x_low <= point.mean <= axes.x_high:
        body += axes.upright(point.mean, "bandline")
    for run, curve in curves:
        seen = [(x, y) for x, y in curve if axes.holds(x, y)]
        other = "" if run.state == GOOD else " other"
        body += axes.line(seen, f"run{other}", f"attempt {run.number}")
        body += "".join(axes.point(x, y, f"attempt {run.number}: {y:.4f} at {x:.0f}", f"point{other}", 2.6) for x, y in seen)
    body += axes.level(target, "target") if target is not None else ""
    return axes.svg(body, "training sequences", "evaluation loss, nats per token")


def _near(curves: list[tuple[Run, list[tuple[float, float]]]], target: float | None, point: rcp.Point | None) -> Axes | None:
    """From the last four evaluations before the first run got there, to the last evaluation of all."""
    ends = [curve[-1][0] for run, curve in curves if curve and run.state == GOOD]
    counts = sorted({x for _, curve in curves for x, _ in curve})
    if not ends or target is None:
        return None
    low, high = [x for x in counts if x <= min(ends)][-4:][0], max(*counts, point.mean if point else 0)
    losses = [y for _, curve in curves for x, y in curve if low <= x <= high] + [target]
    return Axes(*plots.padded(low, high), *plots.padded(min(losses), max(losses))) if low < high else None


def _legend(series: Series, target: float | None, point: rcp.Point | None) -> str:
    entries = [("key-eval", "&#9679; good run")]
    entries += [("key-dim", "&#9675; other attempt")] if len(series.good) < len(series.runs) else []
    entries += [("key-target", f"&#9476; target {target}")] if target is not None else []
    if point:
        text = f"RCP band, from the least mean that passes, {point.minimum:,.0f}, to the reference's mean, {point.mean:,.0f}"
        entries.append(("key-band", f"&#9608; {text}"))
    return plots.keys(entries)


# Run by run.


def _run_by_run(series: Series, point: rcp.Point | None) -> str:
    """Samples to the target and minutes of the good runs, by attempt."""
    if not series.good:
        return ""
    band = (point.minimum / 1000, point.mean / 1000) if point else None
    count = max(run.number for run in series.runs)
    samples = _dots(count, [(run.number, (run.samples or 0) / 1000) for run in series.good], "thousand sequences to the target", band)
    minutes = _dots(count, [(run.number, run.minutes or 0.0) for run in series.good], "minutes", None)
    notes = ["blue: mean without fastest and slowest"] * (len(series.good) > 2) + ["violet: the RCP band"] * (point is not None)
    return f"<div class=two><div>{samples}</div><div>{minutes}</div></div><p class=dim>{'; '.join(notes)}</p>"


def _dots(count: int, data: list[tuple[float, float]], label: str, band: tuple[float, float] | None) -> str:
    values = [y for _, y in data]
    axes = Axes(0.4, count + 0.6, *plots.padded(min(*values, *(band or values)), max(*values, *(band or values))))
    body = axes.band(*band, upright=False) if band else ""
    body += axes.level(trimmed_mean(values), "mean") if len(values) > 2 else ""
    body += "".join(axes.point(x, y, f"attempt {x}: {y:,.2f}", radius=5) for x, y in data)
    return axes.svg(body, "attempt", label, whole_x=True)


def _step_times(series: Series) -> str:
    by_run = [times for run in series.runs if (times := measured(run, "step_time_ms"))]
    pooled = [time for times in by_run for time in times]
    if not pooled:
        return ""
    medians = [median(times) for times in by_run]
    facts = f"{len(pooled):,} steps recorded; medians of the runs from {number(min(medians))} to {number(max(medians))} ms"
    facts += f" ({max(medians) / min(medians) - 1:.2%} apart)" if min(medians) > 0 else ""
    chart = plots.histogram(pooled, "step time, ms (last bar: the slowest percent too)", "steps")
    return f"<div class=solo>{chart}</div><p>{facts}</p>"


def _phases(series: Series) -> str:
    """One bar per attempt, all to the same scale; init and warm-up are before the clock."""
    by_run = [(run, phases(run)) for run in series.runs]
    longest = max((sum(seconds.values()) for _, seconds in by_run), default=0.0)
    if not longest:
        return ""
    key = " &nbsp; ".join(f"{plots.phase_key(name)} {name}" for name in plots.PHASES)
    rows = []
    for run, seconds in by_run:
        cells = [f"{seconds[name]:,.0f}" if seconds[name] else "-" for name in plots.PHASES]
        rows.append([str(run.number), f'<div class="phases">{plots.phase_bar(seconds, longest, 22)}</div>', *cells])
    return f"<p>{key}; seconds</p>" + table(["attempt", "", *plots.PHASES], rows, texts=(1,), kind="many bars")


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


def _notes(series: Series) -> str:
    lines = [f"attempt {run.number}: {note}" for run in series.runs for note in run.notes]
    return "".join(f"<p class=dim>{escape(line)}</p>" for line in lines)
