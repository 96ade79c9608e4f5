"""One page about a series of runs: verdict and score, all curves against the RCP band, how they differ, and what each was.

Reads the ledger and every run's directory as they are; a directory of runs without a ledger is taken as a series in the order
of their names. Standard library only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from common.errors import ConfigError, RunError
from records import ledger, rcp
from submission import plots, window
from submission.log import Log
from submission.plots import Axes, median, number, points, section, table
from submission.run_dir import Run, read_run
from submission.window import Attempt, Window

# Of the log, for provenance; what differs among the runs of a series stands out.
LOG_KEYS = (
    *("submission_org", "submission_platform", "submission_division", "submission_status", "config_filename"),
    *("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "opt_base_learning_rate"),
    *("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn", "lowest_numerical_precision_in_comm"),
)


@dataclass(frozen=True)
class Series:
    """Attempts with what their directories hold, in their order, and the ten that would be submitted, if there are ten."""

    name: str
    attempts: list[Attempt]
    runs: list[Run]
    chosen: Window | None
    windows: int  # how many there were to choose from
    why_not: str  # why there is no window

    @property
    def pairs(self) -> list[tuple[Attempt, Run]]:
        return list(zip(self.attempts, self.runs, strict=True))

    @property
    def good(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.state == window.GOOD]

    @property
    def log(self) -> Log:
        """Of the first good run, else of the first that got so far; what is the same for all is read here."""
        logs = [attempt.log for attempt in (*self.good, *self.attempts) if attempt.log.value("submission_benchmark")]
        return logs[0] if logs else Log([])

    @property
    def benchmark(self) -> str:
        return str(self.log.value("submission_benchmark") or "")

    @property
    def is_miniature(self) -> bool:
        return any(run.is_miniature for run in self.runs)

    @property
    def point(self) -> rcp.Point | None:
        return next((run.rcp_point for run in self.runs if run.rcp_point), None)

    @property
    def target(self) -> float | None:
        return self.log.number("target_accuracy")


def holds_runs(folder: Path) -> bool:
    """`folder` is that of a series, or of several runs."""
    return (folder / ledger.NAME).is_file() or any(folder.glob("*/result.txt"))


def read_series(folder: Path, series: str = "") -> Series:
    """The series `series` (how its id begins) of the ledger in `folder`, or its newest. Raises ConfigError if there is none."""
    records = [record for record in ledger.read(folder / ledger.NAME) if record.id.startswith(series)]
    if records:
        name, attempts = f"series {records[-1].id}", window.attempts_of(folder, records[-1])
    elif series:
        raise ConfigError(f"{folder}: no series {series}", "its ledger has none of that name", f"look into {folder / ledger.NAME}")
    else:
        name, attempts = folder.resolve().name, window.attempts_without_ledger(folder)
    runs = [read_run(attempt.run_dir) if attempt.run_dir.is_dir() else Run(attempt.run_dir.name, Log([])) for attempt in attempts]
    found, chosen, why_not = [], None, "a miniature is never submitted"
    if not any(run.is_miniature for run in runs):
        try:
            benchmark = next((str(value) for a in attempts if (value := a.log.value("submission_benchmark"))), "")
            found = window.windows(attempts, benchmark) if benchmark in rcp.REFERENCE_RUNS else []
            chosen, why_not = window.choose(found, attempts, "median"), ""
        except RunError as error:
            why_not = f"{error.what}; {error.why}"
    return Series(name, attempts, runs, chosen, len(found), why_not)


def render(series: Series) -> str:
    """The page as HTML text."""
    sections = [
        _banner(series),
        section("Score", _score(series)),
        section("Evaluation loss of all runs, and near the target", _losses(series)),
        section("Run by run", _run_by_run(series)),
        section("Step time, all runs", _step_times(series)),
        section("Where the time went", _phases(series)),
        section("Attempts", _attempts(series)),
        section("Provenance", _provenance(series)),
        section("Could not be read", _notes(series)),
    ]
    return plots.page(f"{series.benchmark or 'runs'} · {series.name}", sections, wide=True)


# Verdict and score.


def _banner(series: Series) -> str:
    good, total = len(series.good), len(series.attempts)
    lines = [f"{good} of {total} attempts are good"]
    kind = "good" if good else "bad"
    if series.chosen:
        kind = "good" if series.chosen.passes_rcp else "bad"
        lines[0] = f"{series.chosen.score:.3f} minutes"
        first, last = series.chosen.first, series.chosen.attempts[-1].number
        extent = f"attempts {first} to {last}" + (f", the median of {series.windows} windows" if series.windows > 1 else "")
        lines += [f"score of {extent}; {good} of {total} attempts are good"]
        rcp_text = "passed" if series.chosen.passes_rcp else "FAILED: faster than chance allows, or no reference for this batch"
        lines.append(f"RCP test {rcp_text}")
    elif not series.is_miniature:
        kind = "warn" if good else "bad"
        lines.append(f"no score: {escape(series.why_not)}")
    head = plots.MINIATURE_NOTICE if series.is_miniature else ""
    return head + plots.banner(kind, [line for line in lines if line])


def _score(series: Series) -> str:
    """How the score comes about; of whatever good runs there are while there are no ten."""
    counted = list(series.chosen.attempts) if series.chosen else series.good
    if len(counted) < 3:
        return ""
    minutes, samples = rcp.trimmed_mean([a.minutes for a in counted]), rcp.trimmed_mean([a.samples for a in counted])
    which = "the ten runs" if series.chosen else f"the {len(counted)} good runs"
    rows = [[f"mean of {which} without fastest and slowest", f"{minutes:.4f} min"]]
    rows += [["training sequences to the target, likewise", f"{samples:,.1f}"]]
    if series.point and series.benchmark:
        batch = int(series.log.number("global_batch_size") or 0)
        verdict = rcp.judge(series.benchmark, batch, [attempt.samples for attempt in counted])
        rows += [[f"reference convergence point, global batch {batch}: mean", f"{series.point.mean:,.2f}"]]
        rows += [["least mean that passes", f"{series.point.minimum:,.2f}"]]
        rows += [["RCP test", f"{'passed' if verdict.passed else 'failed'} ({escape(verdict.message)})"]]
        rows += [["factor on the score", f"{verdict.factor:.6f}"]]
        rows += [["<b>score</b>" if series.chosen else "score if these were all", f"<b>{minutes * verdict.factor:.4f} min</b>"]]
    return table(["", ""], rows)


# Curves.


def _losses(series: Series) -> str:
    whole, near = _loss(series, zoomed=False), _loss(series, zoomed=True)
    return f"<div class=two><div>{whole}</div><div>{near}</div></div>{_legend(series)}" if whole else ""


def _loss(series: Series, zoomed: bool) -> str:
    """Evaluations of all runs over each other; `zoomed` shows where they come near the target."""
    curves = [(attempt, points(run.evaluations(), "samples", "loss")) for attempt, run in series.pairs]
    everything = [point for _, curve in curves for point in curve]
    if not everything or (zoomed and series.target is None):
        return ""
    axes = _near(series, curves) if zoomed else _all(series, everything)
    if axes is None:
        return ""
    reference = series.point
    body = axes.band(reference.minimum, reference.mean) if reference else ""
    if reference and axes.x_low <= reference.mean <= axes.x_high:
        body += axes.upright(reference.mean, "bandline")
    for attempt, curve in curves:
        seen = [(x, y) for x, y in curve if axes.holds(x, y)]
        other = "" if attempt.state == window.GOOD else " other"
        body += axes.line(seen, f"run{other}", f"attempt {attempt.number}")
        body += "".join(axes.point(x, y, f"attempt {attempt.number}: {y:.4f} at {x:.0f}", f"point{other}", 2.6) for x, y in seen)
    body += axes.level(series.target, "target") if series.target is not None else ""
    return axes.svg(body, "training sequences", "evaluation loss, nats per token")


def _all(series: Series, everything: list[tuple[float, float]]) -> Axes:
    losses = [y for _, y in everything] + ([series.target] if series.target is not None else [])
    samples = [x for x, _ in everything] + ([series.point.mean] if series.point else [])
    return Axes(0, 1.02 * max(*samples, 1), *plots.padded(min(losses), max(losses)))


def _near(series: Series, curves: list[tuple[Attempt, list[tuple[float, float]]]]) -> Axes | None:
    """The last four evaluations before the first run got there, to the last evaluation of all."""
    ends = [curve[-1][0] for attempt, curve in curves if curve and attempt.state == window.GOOD]
    counts = sorted({x for _, curve in curves for x, _ in curve})
    if not ends or series.target is None:
        return None
    before = [x for x in counts if x <= min(ends)][-4:]
    low, high = before[0], max(*counts, series.point.mean if series.point else 0)
    losses = [y for _, curve in curves for x, y in curve if low <= x <= high] + [series.target]
    if low == high:
        return None
    x_low, x_high = plots.padded(low, high)
    return Axes(x_low, x_high, *plots.padded(min(losses), max(losses)))


def _legend(series: Series) -> str:
    entries = [("key-eval", "&#9679; good run")]
    if len(series.good) < len(series.attempts):
        entries.append(("key-dim", "&#9675; other attempt"))
    if series.target is not None:
        entries.append(("key-target", f"&#9476; target {series.target}"))
    if series.point:
        text = f"RCP band, from the least mean that passes, {series.point.minimum:,.0f}, to the reference's mean, {series.point.mean:,.0f}"
        entries.append(("key-band", f"&#9608; {text}"))
    return plots.keys(entries)


# Run by run.


def _run_by_run(series: Series) -> str:
    """Samples to converge and minutes of the good runs, by attempt."""
    good = [attempt for attempt in series.good if attempt.samples < rcp.NOT_CONVERGED and math.isfinite(attempt.minutes)]
    if not good:
        return ""
    band = (series.point.minimum / 1000, series.point.mean / 1000) if series.point else None
    samples = _dots(series, [(a.number, a.samples / 1000) for a in good], "thousand sequences to the target", band)
    minutes = _dots(series, [(a.number, a.minutes) for a in good], "minutes", None)
    notes = ["blue: mean without fastest and slowest"] * (len(good) > 2) + ["violet: the RCP band"] * (series.point is not None)
    return f"<div class=two><div>{samples}</div><div>{minutes}</div></div><p class=dim>{'; '.join(notes)}</p>"


def _dots(series: Series, data: list[tuple[float, float]], label: str, band: tuple[float, float] | None) -> str:
    values = [y for _, y in data]
    mean = rcp.trimmed_mean(values) if len(values) > 2 else None
    low, high = plots.padded(min(*values, *(band or values)), max(*values, *(band or values)))
    axes = Axes(0.4, len(series.attempts) + 0.6, low, high)
    body = axes.band(*band, upright=False) if band else ""
    body += axes.level(mean, "mean") if mean is not None else ""
    body += "".join(axes.point(x, y, f"attempt {x}: {y:,.2f}", radius=5) for x, y in data)
    return axes.svg(body, "attempt", label, whole_x=True)


def _step_times(series: Series) -> str:
    by_run = [(attempt, run.numbers("step_time_ms")) for attempt, run in series.pairs]
    pooled = [time for _, times in by_run for time in times]
    if not pooled:
        return ""
    medians = [median(times) for _, times in by_run if times]
    facts = f"{len(pooled):,} steps recorded; medians of the runs from {number(min(medians))} to {number(max(medians))} ms"
    facts += f" ({max(medians) / min(medians) - 1:.2%} apart)" if min(medians) > 0 else ""
    chart = plots.histogram(pooled, "step time, ms (last bar: the slowest percent too)", "steps")
    return f"<div class=solo>{chart}</div><p>{facts}</p>"


def _phases(series: Series) -> str:
    """One bar per attempt, all to the same scale; init and warm-up are before the clock."""
    by_run = [(attempt, run.phases()) for attempt, run in series.pairs]
    longest = max((sum(seconds.values()) for _, seconds in by_run), default=0.0)
    if not longest:
        return ""
    key = " &nbsp; ".join(f"{plots.phase_key(name)} {name}" for name in plots.PHASES)
    rows = []
    for attempt, seconds in by_run:
        cells = [f"{seconds[name]:,.0f}" if seconds[name] else "-" for name in plots.PHASES]
        rows.append([str(attempt.number), f'<div class="phases">{plots.phase_bar(seconds, longest, 22)}</div>', *cells])
    return f"<p>{key}; seconds</p>" + table(["attempt", "", *plots.PHASES], rows, texts=(1,), kind="many bars")


# Tables.


def _attempts(series: Series) -> str:
    chosen = series.chosen.attempts if series.chosen else ()
    heads = ["attempt", "state", "seed", "samples", "minutes", "init, s", "step, ms", "tok/s/GPU", "GiB", "exit", "reason"]
    rows = [_attempt_row(attempt, run, attempt in chosen) for attempt, run in series.pairs]
    note = "<p class=dim>* among the ten of the score; step and tok/s are medians, GiB the peak</p>" if chosen else ""
    return table(heads, rows, texts=(1, len(heads) - 1), kind="many") + note


def _attempt_row(attempt: Attempt, run: Run, chosen: bool) -> list[str]:
    steps, rates, memory = (run.numbers(key) for key in ("step_time_ms", "tokens_per_s_per_gpu", "memory_gib"))
    seconds = run.phases()
    evaluations = run.evaluations()
    return [
        f"{attempt.number}{' *' if chosen else ''}",
        escape(attempt.state),
        escape(str(attempt.start.get("seed", run.log.value("seed")))),
        number(evaluations[-1]["samples"]) if evaluations else "-",
        f"{run.minutes:.2f}" if run.minutes is not None else "-",
        f"{seconds['init'] + seconds['warmup']:.0f}" if seconds["init"] else "-",
        f"{median(steps):,.1f}" if steps else "-",
        f"{median(rates):,.0f}" if rates else "-",
        f"{max(memory):.1f}" if memory else "-",
        escape(str(attempt.end.get("exit_code", "-"))),
        escape(str(attempt.end.get("reason") or run.failure.get("what") or "")),
    ]


def _provenance(series: Series) -> str:
    """What differs among the runs, with who differs; then what they share. A run that has not got so far is not asked."""
    facts = [(attempt.number, _facts(run)) for attempt, run in series.pairs]
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


def _facts(run: Run) -> dict[str, str]:
    facts = {key: str(value) for key in LOG_KEYS if (value := run.log.value(key)) is not None}
    return facts | {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in run.versions.items()}


def _config(series: Series) -> str:
    configs = [run.config for run in series.runs if run.config]
    if not configs:
        return ""
    note = "" if len(set(configs)) == 1 else plots.banner("warn", [f"{len(set(configs))} different configs; this is the first"])
    return f"<h2>Config, as resolved</h2>{note}<pre>{escape(configs[0])}</pre>"


def _notes(series: Series) -> str:
    lines = [f"attempt {attempt.number}: {note}" for attempt, run in series.pairs for note in run.notes]
    return "".join(f"<p class=dim>{escape(line)}</p>" for line in lines)
