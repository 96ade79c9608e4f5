"""The page about one run: verdict, curves, evaluations, phases, GPUs and provenance; and what the page of a series takes from a run.

Reads result.txt, events.jsonl, gpu_samples.jsonl, config.toml, versions.json and failure.json, each of which may be missing or cut off.
"""

from __future__ import annotations

import json
from html import escape

from submission import gpu_samples, plots
from submission.plots import PHASES, Curve, finite, median, number, points, section, table
from submission.runs import GOOD, LOST, NOT_STARTED, Run

FACTS = (
    *("submission_org", "submission_platform", "submission_division", "submission_status", "config_filename"),
    *("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "opt_base_learning_rate"),
    *(f"lowest_numerical_precision_in_{part}" for part in ("linear", "attn", "comm")),
)
MEASURED = {"tokens_per_s_per_gpu": "tokens/s per GPU", "tflops_per_gpu": "TFLOP/s per GPU", "mfu": "MFU", "memory_gib": "GiB"}


def render(run: Run) -> str:
    """The page as HTML text. Raises PreflightError where mlperf-logging is missing and the run's verdict needs it."""
    name = run.folder.resolve().name
    sections = [
        _banner(run),
        section("Loss", _loss(run)),
        section("Evaluations", _evaluation_table(run)),
        section("Where the time went", plots.phase_table([("", phases(run))])),
        section("Step time", _step_times(run)),
        section("GPUs during the run", gpu_samples.section(gpu_samples.read_samples(run))),
        section("Ranks compared", gpu_samples.ranks_compared(run)),
        section("Provenance", plots.facts(provenance(run, "seed").items())),
        section("Config, as resolved", f"<pre>{escape(run.config)}</pre>" if run.config else ""),
        section("Could not be read, or odd", plots.notes(run.notes)),
    ]
    return plots.page(f"{run.benchmark or 'run'} · {name}", sections)


# What both pages read out of a run.


def rcp_band(run: Run) -> tuple[float, float] | None:
    """Training sequences: the least mean of a series that passes, and the reference's mean."""
    return (run.point.minimum, run.point.mean) if run.point else None


def of(run: Run, event: str) -> list[dict]:
    return [record for record in run.records if record.get("event") == event]


def measured(run: Run, key: str) -> list[float]:
    """Of all recorded steps that have it: step_time_ms, memory_gib, ..."""
    return [value for _, value in points(of(run, "step"), "samples", key)]


def evaluations(run: Run) -> list[dict]:
    """From the log, which is what counts; from events.jsonl if the log has none, and for how long each took."""
    recorded = {record["samples"]: record for record in of(run, "eval") if finite(record.get("samples"))}
    start, rows = run.log.first("run_start"), []
    for event in run.log.all("eval_accuracy"):
        seconds = recorded.get(event.samples, {}).get("seconds") if finite(event.samples) else None
        minutes = (event.time_ms - start.time_ms) / 60_000 if start else None
        rows.append({"samples": event.samples, "loss": event.value, "minutes": minutes, "seconds": seconds})
    return rows or [{**record, "minutes": s / 60 if finite(s := record.get("time_s")) else None} for record in recorded.values()]


def phases(run: Run) -> dict[str, float]:
    """Seconds by phase."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for record in of(run, "phase"):
        if record.get("name") in PHASES and finite(record.get("seconds")):
            seconds[record["name"]] += max(record["seconds"], 0.0)
    if not seconds["train"] and not seconds["eval"]:  # a run that broke off has not summed them up; its log has the intervals
        seconds["train"], seconds["eval"] = sum(block.seconds for block in run.blocks), run.evaluation_s or 0.0
    return seconds


def provenance(run: Run, *more: str) -> dict[str, str]:
    """Of the log and versions.json, as text."""
    facts = {key: str(value) for key in (*FACTS, *more) if (value := run.log.value(key)) is not None}
    return facts | {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in run.versions.items()}


# Verdict.


def _banner(run: Run) -> str:
    kind, head = _verdict(run)
    lines = [escape(head)]
    if last := evaluations(run)[-1:]:
        lines.append(f"last evaluation {number(last[0].get('loss'))}, target {number(run.target)}, at {number(last[0]['samples'])} samples")
    if run.minutes is not None:
        lines.append(f"{run.minutes:.2f} minutes from run_start to run_stop")
    lines += [escape(f"{key}: {run.failure[key]}") for key in ("what", "why", "do") if run.failure.get(key)]
    return (plots.MINIATURE_NOTICE if run.is_miniature else "") + plots.banner(kind, lines)


def _verdict(run: Run) -> tuple[str, str]:
    """Class of the banner, and its first line. The log decides, as it does in score and package; failure.json only explains."""
    if run.state == GOOD:
        return "good", "Target reached"
    if run.status == "success" and not run.reached:
        return "bad", "The log claims success, but no evaluation reached the target"
    if run.status == "success":
        return "bad", f"Target reached, but the run does not count: {run.reason}"
    if run.failure.get("kind", "target_missed") != "target_missed":
        return "bad", f"Aborted: {run.failure['kind']}"
    if run.state in (LOST, NOT_STARTED) or not run.log.first("run_stop"):
        return "bad", "The run did not end: run_stop is missing from its log"
    return "bad", "Target not reached"


# Charts.


def _loss(run: Run) -> str:
    train, evaluated = points(of(run, "step"), "samples", "loss"), points(evaluations(run), "samples", "loss")
    band = rcp_band(run)
    curves = [Curve(train, "curve", "train"), Curve(evaluated, "run", "evaluation", dots=True)]
    drawn = plots.chart(curves, ("training sequences", "loss, nats per token"), run.target, band)
    entries = [("key-train", "&#9473; train"), ("key-eval", "&#9679; evaluation")]
    return drawn and drawn + plots.legend(entries, run.target, band)


def _step_times(run: Run) -> str:
    """The step times, and the medians of what was measured besides."""
    times = measured(run, "step_time_ms")
    if not times:
        return ""
    facts = [f"median {number(median(times))} ms", f"slowest {number(max(times))} ms", f"{len(times)} steps recorded"]
    facts += [f"median {number(median(values))} {unit}" for key, unit in MEASURED.items() if (values := measured(run, key))]
    curve = Curve(points(of(run, "step"), "samples", "step_time_ms"), "curve", "step time")
    return plots.chart([curve], ("training sequences", "step time, ms")) + f"<p>{escape(' · '.join(facts))}</p>"


def _evaluation_table(run: Run) -> str:
    rows = []
    for row in evaluations(run):
        loss = row.get("loss")
        reached = "yes" if finite(loss) and run.target is not None and 0 < loss <= run.target else "no"
        rows.append([number(row["samples"]), number(loss), reached, number(row["minutes"]), number(row.get("seconds"))])
    return table(["samples", "loss", "target reached", "minutes on the clock", "took, s"], rows) if rows else ""
