"""`python -m submission.report DIR`: one page about one run, DIR/report.html, or about a series of runs.

Self-contained: no script, no link to anything outside, curves as inline SVG, light and dark. A run that died early gets a report of
what there is: result.txt, events.jsonl, gpu_samples.jsonl, config.toml, versions.json and failure.json may be missing or cut off.
If DIR holds a ledger or the directories of several runs, such as LOGDIR/<benchmark>, the page is about them: which ten count, and
which attempts are good, lost or no run, is what submission/series.py says. Nothing is written into any other directory.

Exit code: 0, 2 for a directory that is no run, 17 cannot be written, 18 no mlperf-logging.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

from common.errors import ConfigError
from records import ledger
from submission import gpu_samples, plots, terminal
from submission.intervals import samples_of
from submission.log_rules import PRECISION_KEYS
from submission.plots import Curve, finite, median, number, points, section, table
from submission.runs import GOOD, Run, read_attempt
from submission.score import score_lines
from submission.series import Series, TenRuns, read_series, ten_runs, windows

OF_A_RUN = ("result.txt", "events.jsonl", "config.toml", "failure.json", gpu_samples.NAME)
FACTS = (
    *("submission_org", "submission_platform", "submission_division", "submission_status", "config_filename"),
    *("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "opt_base_learning_rate", *PRECISION_KEYS),
)
MEASURED = {"tokens_per_s_per_gpu": "tokens/s per GPU", "tflops_per_gpu": "TFLOP/s per GPU", "mfu": "MFU", "memory_gib": "GiB"}
PHASES = ("init", "warmup", "train", "eval")
ATTEMPT_HEADS = ["attempt", "state", "seed", "samples", "minutes", "init, s", "step, ms", "tok/s/GPU", "GiB", "exit", "reason"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.report", description="Write report.html into the directory of a run, or of a series.")
    parser.add_argument("directory", type=Path, help="of a run, or LOGDIR/<benchmark>")
    parser.add_argument("--series", default="", metavar="ID", help="which series of the ledger (how its id begins); default: the newest")
    options = parser.parse_args(arguments)
    return terminal.run(lambda: write(options.directory, options.series))


def write(folder: Path, series: str) -> int:
    """Raises ConfigError for what is neither a run nor a series of ours, StorageError, PreflightError without mlperf-logging."""
    if any((folder / name).exists() for name in OF_A_RUN):
        text = run_page(read_attempt(folder / "result.txt"))
    elif (folder / ledger.NAME).is_file() or any(folder.glob("*/result.txt")):
        text = series_page(read_series([folder], series))
    else:
        why = f"it has none of {', '.join(OF_A_RUN)}, no ledger and no runs" if folder.is_dir() else "it is not a directory"
        raise ConfigError(f"{folder}: no such run", why, "name the directory that a run has written, or LOGDIR/<benchmark>")
    path = folder / "report.html"
    terminal.write(path, text)
    print(path)
    return 0


# What both pages have.


def _common_sections(runs: list[Run]) -> list[str]:
    """Provenance: what differs among the runs, with who differs, then what they share; the config; what could not be read."""
    keys = (*FACTS, "seed") if len(runs) == 1 else FACTS
    facts = [(run.number, _provenance(run, keys)) for run in runs]
    same, differing = [], []
    for key in dict.fromkeys(key for _, each in facts for key in each):
        holders: dict[str, list[str]] = {}
        for attempt, each in facts:
            if key in each:  # a run that has not got so far is not asked
                holders.setdefault(each[key], []).append(str(attempt))
        if len(holders) == 1:
            same.append((key, next(iter(holders))))
        else:
            differing.append((key, "\n".join(f"attempt {', '.join(numbers)}: {value}" for value, numbers in holders.items())))
    warning = plots.banner("warn", ["The runs differ in what should be the same"]) if differing else ""
    configs = dict.fromkeys(run.config for run in runs if run.config)
    note = plots.banner("warn", [f"{len(configs)} different configs; this is the first"]) if len(configs) > 1 else ""
    return [
        section("Provenance", warning + plots.facts(differing) + plots.facts(same)),
        section("Config, as resolved", f"{note}<pre>{escape(next(iter(configs)))}</pre>" if configs else ""),
        section("Could not be read, or odd", plots.notes(" ".join([*_attempt(run), note]) for run in runs for note in run.notes)),
    ]


def _attempt(run: Run) -> list[str]:
    return [f"attempt {run.number}"] if run.number else []


def _provenance(run: Run, keys: tuple[str, ...]) -> dict[str, str]:
    """Of the log, the self-test and versions.json, as text."""
    facts = {key: str(value) for key in keys if (value := run.log.value(key)) is not None}
    for record in _of(run, "self_test"):
        facts["attention by"] = str(record.get("attention"))
    return facts | {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in run.versions.items()}


def _loss_chart(run: Run, curves: list[Curve], label: str, keys: list[tuple[str, str]]) -> str:
    """With the target of `run`, and the band from the least mean of a series that passes to the reference's mean."""
    band = (run.point.minimum, run.point.mean) if run.point else None
    return plots.chart(curves, ("training sequences", f"{label}, nats per token"), run.target, band, keys)


def _of(run: Run, event: str) -> list[dict]:
    return [record for record in run.records if record.get("event") == event]


def _measured(run: Run, key: str) -> list[float]:
    """Of all recorded steps that have it: step_time_ms, memory_gib, ..."""
    return [value for _, value in points(_of(run, "step"), "samples", key)]


def _evaluations(run: Run) -> list[dict]:
    seconds = {interval.stop_samples: interval.seconds for interval in run.evaluations}
    start, rows = run.log.first("run_start"), []
    for event in run.log.all("eval_accuracy"):
        minutes = (event.time_ms - start.time_ms) / 60_000 if start else None
        took = seconds.get(samples_of(event))
        rows.append({"samples": event.samples, "loss": event.value, "minutes": minutes, "seconds": took})
    return rows


def _phases(run: Run) -> dict[str, float]:
    """Seconds by phase; training and evaluation by the log, which a run that broke off has too."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for record in _of(run, "phase"):
        if record.get("name") in ("init", "warmup") and finite(record.get("seconds")):
            seconds[record["name"]] += record["seconds"]
    return seconds | {"train": sum(block.seconds for block in run.blocks), "eval": run.evaluation_s or 0.0}


def _phase_table(runs: list[Run]) -> str:
    rows = [["".join(_attempt(run)), *(f"{seconds:,.1f}" for seconds in _phases(run).values())] for run in runs]
    return table(["seconds", *PHASES], rows)


# The page of a run.


def run_page(run: Run) -> str:
    """The page as HTML text. Raises PreflightError where mlperf-logging is missing and the run's verdict needs it."""
    train, evaluated = (points(records, "samples", "loss") for records in (_of(run, "step"), _evaluations(run)))
    curves = [Curve(train, "curve", "train"), Curve(evaluated, "run", "evaluation", dots=True)]
    keys = [("key-train", "&#9473; train"), ("key-eval", "&#9679; evaluation")]
    sections = [
        _run_banner(run),
        section("Loss", _loss_chart(run, curves, "loss", keys)),
        section("Evaluations", _evaluation_table(run)),
        section("Where the time went", _phase_table([run])),
        section("Step time", _step_times(run)),
        section("GPUs during the run", gpu_samples.section(gpu_samples.read_samples(run))),
        section("Ranks compared", gpu_samples.ranks_compared(run)),
        *_common_sections([run]),
    ]
    return plots.page(f"{run.benchmark or 'run'} · {run.folder.resolve().name}", sections)


def _run_banner(run: Run) -> str:
    """The log decides, as it does in score and package; failure.json only explains."""
    why = run.reason or run.failure.get("kind", "")
    lines = ["Target reached" if run.state == GOOD else escape(f"{run.state}{': ' if why else ''}{why}")]
    if last := _evaluations(run)[-1:]:
        lines.append(f"last evaluation {number(last[0]['loss'])}, target {number(run.target)}, at {number(last[0]['samples'])} samples")
    if run.minutes is not None:
        lines.append(f"{run.minutes:.2f} minutes from run_start to run_stop")
    lines += [escape(f"{key}: {run.failure[key]}") for key in ("what", "why", "do") if run.failure.get(key)]
    notice = plots.MINIATURE_NOTICE if run.is_miniature else ""
    return notice + plots.banner("good" if run.state == GOOD else "bad", lines)


def _evaluation_table(run: Run) -> str:
    rows = []
    for row in _evaluations(run):
        reached = finite(row["loss"]) and run.target is not None and 0 < row["loss"] <= run.target
        samples, loss, minutes, seconds = (number(row[key]) for key in ("samples", "loss", "minutes", "seconds"))
        rows.append([samples, loss, "yes" if reached else "no", minutes, seconds])
    return table(["samples", "loss", "target reached", "minutes on the clock", "took, s"], rows) if rows else ""


def _step_times(run: Run) -> str:
    """The step times, and the medians of what was measured besides."""
    times = _measured(run, "step_time_ms")
    if not times:
        return ""
    facts = [f"median {number(median(times))} ms", f"slowest {number(max(times))} ms", f"{len(times)} steps recorded"]
    facts += [f"median {number(median(values))} {unit}" for key, unit in MEASURED.items() if (values := _measured(run, key))]
    curve = Curve(points(_of(run, "step"), "samples", "step_time_ms"), "curve", "step time")
    return plots.chart([curve], ("training sequences", "step time, ms")) + f"<p>{escape(' · '.join(facts))}</p>"


# The page of a series.


def series_page(series: Series) -> str:
    """The page as HTML text. Raises PreflightError where mlperf-logging is missing and a verdict needs it."""
    ten, runs = ten_runs(series), series.runs
    curves = []
    for run in runs:
        kind = "run" if run.state == GOOD else "run other"
        curves.append(Curve(points(_evaluations(run), "samples", "loss"), kind, f"attempt {run.number}", dots=True))
    keys = [("key-eval", "&#9679; good run")] + [("dim", "&#9679; other attempt")] * (len(series.good) < len(runs))
    sections = [
        _series_banner(series, ten),
        section("Score", f"<pre>{escape(chr(10).join(score_lines(ten)))}</pre>"),
        section("Evaluation loss of all runs", _loss_chart(series.first, curves, "evaluation loss", keys)),
        section("Where the time went", _phase_table(runs)),
        section("Attempts", _attempts(series, ten)),
        *_common_sections(runs),
    ]
    return plots.page(f"{series.first.benchmark or 'runs'} · {series.name}", sections, wide=True)


def _series_banner(series: Series, ten: TenRuns) -> str:
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


def _attempts(series: Series, ten: TenRuns) -> str:
    counts = () if ten.invalid else ten.runs
    rows = [_attempt_row(run, run in counts) for run in series.runs]
    note = "<p class=dim>* among the ten of the score; step and tok/s are medians, GiB the peak</p>" if counts else ""
    return table(ATTEMPT_HEADS, rows, texts=(1, len(ATTEMPT_HEADS) - 1), kind="many") + note


def _attempt_row(run: Run, counts: bool) -> list[str]:
    steps, rates, memory = (_measured(run, key) for key in ("step_time_ms", "tokens_per_s_per_gpu", "memory_gib"))
    seconds, last = _phases(run), _evaluations(run)[-1:]
    return [
        f"{run.number}{' *' if counts else ''}",
        escape(run.state),
        escape(str(run.start.get("seed", run.log.value("seed")))),
        number(last[0]["samples"]) if last else "-",
        terminal.number(run.minutes, ".2f"),
        terminal.number(seconds["init"] + seconds["warmup"] or None, ".0f"),
        terminal.number(median(steps) if steps else None, ",.1f"),
        terminal.number(median(rates) if rates else None, ",.0f"),
        terminal.number(max(memory, default=None), ".1f"),
        escape(str(run.end.get("exit_code", "-"))),
        escape(run.reason or str(run.failure.get("what") or "")) if run.state != GOOD else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
