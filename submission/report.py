"""`python -m submission.report DIR`: one page about one run, DIR/report.html, or about a series of runs.

Self-contained: no script, no link to anything outside, curves as inline SVG, light and dark. A run's page reads result.txt,
events.jsonl, gpu_samples.jsonl, config.toml, versions.json and failure.json; a run that died early gets a report of what there is. If DIR holds a
ledger or the directories of several runs, such as LOGDIR/<benchmark>, the page is about them (submission/series_report.py).
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

from common.errors import RunError, StorageError
from submission import gpu_samples, plots, series_report
from submission.plots import Axes, finite, median, number, points, section, table
from submission.run_dir import Run, read_run

OF_A_RUN = ("result.txt", "events.jsonl", "config.toml", "failure.json")


def render(run: Run, samples: gpu_samples.Samples | None = None) -> str:
    """The page as HTML text."""
    title = f"{run.log.value('submission_benchmark') or 'run'} · {run.name}"
    sections = [
        _banner(run),
        section("Loss", _loss_plot(run)),
        section("Evaluations", _evaluation_table(run)),
        section("Where the time went", _phases(run)),
        section("Step time", _step_times(run)),
        section("GPUs during the run", gpu_samples.section(samples)),
        section("Ranks compared", gpu_samples.ranks_compared(run)),
        section("Provenance", _provenance(run)),
        section("Config, as resolved", f"<pre>{escape(run.config)}</pre>" if run.config else ""),
        section("Could not be read", "".join(f"<p class=dim>{escape(note)}</p>" for note in run.notes)),
    ]
    return plots.page(title, sections)


# Verdict.


def _banner(run: Run) -> str:
    kind, head = _verdict(run)
    lines = [escape(head)]
    last = run.evaluations()[-1:]
    if last:
        lines.append(f"last evaluation {number(last[0].get('loss'))}, target {number(run.target)}, at {number(last[0]['samples'])} samples")
    if run.minutes is not None:
        lines.append(f"{run.minutes:.2f} minutes from run_start to run_stop")
    for key in ("what", "why", "do"):
        if run.failure.get(key):
            lines.append(escape(f"{key}: {run.failure[key]}"))
    return (plots.MINIATURE_NOTICE if run.is_miniature else "") + plots.banner(kind, lines)


def _verdict(run: Run) -> tuple[str, str]:
    """Class of the banner, and its first line. The log's run_stop decides; failure.json only explains."""
    stop = run.log.first("run_stop")
    losses = [row.get("loss") for row in run.evaluations()]
    reached = bool(losses) and (run.target is None or (finite(losses[-1]) and losses[-1] <= run.target))
    if stop and stop.metadata.get("status") == "success":
        return ("good", "Target reached") if reached else ("bad", "The log claims success, but its last evaluation misses the target")
    if run.failure.get("kind", "target_missed") != "target_missed":
        return "bad", f"Aborted: {run.failure['kind']}"
    if stop:
        return "bad", "Target not reached"
    return "bad", "The run did not end: run_stop is missing from its log"


# Curves.


def _loss_plot(run: Run) -> str:
    train = points(run.of("step"), "samples", "loss")
    evaluations = points(run.evaluations(), "samples", "loss")
    if not train and not evaluations:
        return ""
    reference = run.rcp_point
    samples = [x for x, _ in train + evaluations] + ([reference.mean] if reference else [])
    losses = [y for _, y in train + evaluations] + ([run.target] if run.target is not None else [])
    axes = Axes(0, max(*samples, 1), *plots.padded(min(losses), max(losses)))
    legend = [("key-train", "&#9473; train"), ("key-eval", "&#9679; evaluation")]
    body = axes.band(reference.minimum, reference.mean) if reference else ""
    body += axes.line(plots.thinned(train), "curve") + axes.line(evaluations, "evalcurve")
    body += "".join(axes.point(x, y, f"{y:.4f} at {x:.0f} samples") for x, y in evaluations)
    if run.target is not None:
        body += axes.level(run.target, "target")
        legend.append(("key-target", f"&#9476; target {run.target}"))
    if reference:
        legend.append(("key-band", f"&#9608; RCP: least mean of a series {reference.minimum:,.0f} to reference mean {reference.mean:,.0f}"))
    return axes.svg(body, "training sequences", "loss, nats per token") + plots.keys(legend)


def _step_times(run: Run) -> str:
    """Histogram of the step times, and the medians of what was measured besides."""
    times = run.numbers("step_time_ms")
    if not times:
        return ""
    facts = [f"median {number(median(times))} ms", f"slowest {number(max(times))} ms", f"{len(times)} steps recorded"]
    for key, unit in (
        ("tokens_per_s_per_gpu", "tokens/s per GPU"),
        ("tflops_per_gpu", "TFLOP/s per GPU"),
        ("mfu", "MFU"),
        ("memory_gib", "GiB"),
    ):
        values = run.numbers(key)
        if values:
            facts.append(f"median {number(median(values))} {unit}")
    label = "step time, ms (the last bar holds the slowest percent too)"
    return plots.histogram(times, label, "steps") + f"<p>{escape(' · '.join(facts))}</p>"


def _phases(run: Run) -> str:
    seconds = run.phases()
    total = sum(seconds.values())
    if not total:
        return ""
    rows = [[f"{plots.phase_key(name)} {name}", f"{value:.1f} s", f"{value / total:.1%}"] for name, value in seconds.items() if value]
    return plots.phase_bar(seconds, total) + table(["phase", "time", "share"], rows)


# Tables.


def _evaluation_table(run: Run) -> str:
    rows = []
    for row in run.evaluations():
        loss = row.get("loss")
        reached = "yes" if finite(loss) and run.target is not None and loss <= run.target else "no"
        rows.append([number(row["samples"]), number(loss), reached, number(row["minutes"]), number(row.get("seconds"))])
    return table(["samples", "loss", "target reached", "minutes on the clock", "took, s"], rows) if rows else ""


def _provenance(run: Run) -> str:
    keys = (
        "submission_org",
        "submission_platform",
        "submission_division",
        "submission_status",
        "seed",
        "config_filename",
        "global_batch_size",
    )
    rows = [(key, str(run.log.value(key))) for key in keys if run.log.value(key) is not None]
    rows += [(str(key), value if isinstance(value, str) else json.dumps(value)) for key, value in run.versions.items()]
    return plots.facts(rows)


def write_report(folder: Path) -> Path:
    """Write report.html into the directory of a run and return its path. Raises ConfigError, StorageError."""
    run = read_run(folder)
    return write_page(folder / "report.html", render(run, gpu_samples.read_samples(folder, run)))


def write_series_report(folder: Path, series: str = "") -> Path:
    """Write report.html about the runs below `folder` and return its path. Raises ConfigError, StorageError."""
    return write_page(folder / "report.html", series_report.render(series_report.read_series(folder, series)))


def write_page(path: Path, text: str) -> Path:
    """Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}", str(error), "free space, or make the directory writable") from error
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.report", description="Write report.html into the directory of a run, or of a series.")
    parser.add_argument("directory", type=Path, help="of a run, or LOGDIR/<benchmark>")
    parser.add_argument("--series", default="", metavar="ID", help="which series of the ledger (how its id begins); default: the newest")
    options = parser.parse_args(arguments)
    is_run = any((options.directory / name).exists() for name in OF_A_RUN)
    try:
        if not is_run and series_report.holds_runs(options.directory):
            print(write_series_report(options.directory, options.series))
        else:
            print(write_report(options.directory))
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
