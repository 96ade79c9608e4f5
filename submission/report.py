"""`python -m submission.report RUN_DIR`: one page about one run, RUN_DIR/report.html.

Self-contained: no script, no link to anything outside, curves as inline SVG, light and dark. It reads result.txt,
events.jsonl, config.toml, versions.json and failure.json; a run that died early gets a report of what there is.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TypeGuard

from common.errors import ConfigError, RunError, StorageError
from submission.lint import Log, parse

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 44  # margins of a plot, in SVG units
MAX_POINTS = 800  # of a curve; a run of 10,000 steps needs no more on 680 pixels
STEP_TIME_BINS = 40
PHASES = ("init", "warmup", "train", "eval")

STYLE = """
:root { color-scheme: light dark; --text:#1b1f24; --dim:#5b6470; --page:#ffffff; --card:#f4f5f7; --line:#d5d9de;
  --train:#2166ac; --eval:#b2182b; --target:#1a7f37; --good:#1a7f37; --bad:#b2182b; --warn:#8a5a00; --on:#ffffff;
  --init:#8073ac; --warmup:#b8860b; }
@media (prefers-color-scheme: dark) { :root { --text:#e4e7eb; --dim:#9aa4b0; --page:#14171a; --card:#1e2327; --line:#3a4249;
  --train:#78b4e8; --eval:#f08070; --target:#5fc57a; --good:#237a3b; --bad:#a32a36; --warn:#8a5a00;
  --init:#a99bd6; --warmup:#d9b44a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 800px; margin: 0 auto; padding: 16px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 32px; }
.banner { color: var(--on); padding: 12px 16px; border-radius: 6px; margin: 12px 0; } .banner b { font-size: 18px; }
.good { background: var(--good); } .bad { background: var(--bad); } .warn { background: var(--warn); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--dim); font-weight: 600; } td.n, th.n { text-align: right; }
pre { background: var(--card); padding: 12px; border-radius: 6px; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--line); } .curve { fill: none; stroke: var(--train); stroke-width: 1.5; } .point { fill: var(--eval); }
.evalcurve { fill: none; stroke: var(--eval); stroke-width: 1.2; } .target { stroke: var(--target); stroke-dasharray: 6 4; }
.bar { fill: var(--train); } .key-train { color: var(--train); } .key-eval { color: var(--eval); } .key-target { color: var(--target); }
.p-init { fill: var(--init); } .p-warmup { fill: var(--warmup); } .p-train { fill: var(--train); } .p-eval { fill: var(--eval); }
.dim { color: var(--dim); }
"""


@dataclass
class Run:
    """What a run left behind; every part may be missing."""

    name: str
    log: Log
    events: list[dict] = field(default_factory=list)
    config: str = ""
    versions: dict = field(default_factory=dict)
    failure: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be read

    def of(self, event: str) -> list[dict]:
        return [record for record in self.events if record.get("event") == event]

    @property
    def target(self) -> float | None:
        return self.log.number("target_accuracy")

    @property
    def is_miniature(self) -> bool:
        return self.log.value("submission_division") == "miniature" or "miniature = true" in self.config

    @property
    def minutes(self) -> float | None:
        start, stop = self.log.first("run_start"), self.log.first("run_stop")
        return (stop.time_ms - start.time_ms) / 60_000 if start and stop else None

    def evaluations(self) -> list[dict]:
        """From the log, which is what counts; from events.jsonl if the log has none, and for how long each took."""
        recorded = {record["samples"]: record for record in self.of("eval") if _finite(record.get("samples"))}
        start = self.log.first("run_start")
        rows = []
        for event in self.log.all("eval_accuracy"):
            seconds = recorded.get(event.samples, {}).get("seconds") if _finite(event.samples) else None
            minutes = (event.time_ms - start.time_ms) / 60_000 if start else None
            rows.append({"samples": event.samples, "loss": event.value, "minutes": minutes, "seconds": seconds})
        return rows or [{**record, "minutes": _minutes(record.get("time_s"))} for record in recorded.values()]


def _minutes(seconds: object) -> float | None:
    return seconds / 60 if _finite(seconds) else None


def read_run(folder: Path) -> Run:
    """All there is to know about the run in `folder`. Raises ConfigError if that is no directory."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such run", "it is not a directory", "name the directory that a run has written")
    run = Run(folder.resolve().name, Log([]))
    if (folder / "result.txt").is_file():
        events, findings = parse(folder / "result.txt")
        run.log = Log(events)
        run.notes += [f"result.txt line {finding.line}: {finding.message}" for finding in findings]
    else:
        run.notes.append("result.txt is missing")
    run.events = _read_events(folder / "events.jsonl", run.notes)
    if (folder / "config.toml").is_file():
        run.config = (folder / "config.toml").read_text(errors="replace")
    run.versions = _read_object(folder / "versions.json", run.notes)
    run.failure = _read_object(folder / "failure.json", run.notes)
    return run


def _read_events(path: Path, notes: list[str]) -> list[dict]:
    if not path.is_file():
        notes.append("events.jsonl is missing")
        return []
    events = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            notes.append(f"events.jsonl line {number} is cut off or spoilt")
            continue
        if isinstance(record, dict):
            events.append(record)
    return events


def _read_object(path: Path, notes: list[str]) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(errors="replace"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is cut off or spoilt")
        return {}
    return value


def render(run: Run) -> str:
    """The page as HTML text."""
    title = f"{run.log.value('submission_benchmark') or 'run'} · {run.name}"
    sections = [
        _banner(run),
        _section("Loss", _loss_plot(run)),
        _section("Evaluations", _evaluation_table(run)),
        _section("Where the time went", _phases(run)),
        _section("Step time", _step_times(run)),
        _section("Provenance", _provenance(run)),
        _section("Config, as resolved", f"<pre>{escape(run.config)}</pre>" if run.config else ""),
        _section("Could not be read", "".join(f"<p class=dim>{escape(note)}</p>" for note in run.notes)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


# Verdict.


def _banner(run: Run) -> str:
    kind, head = _verdict(run)
    lines = [f"<b>{escape(head)}</b>"]
    last = run.evaluations()[-1:]
    if last:
        lines.append(
            f"last evaluation {_number(last[0].get('loss'))}, target {_number(run.target)}, at {_number(last[0]['samples'])} samples"
        )
    if run.minutes is not None:
        lines.append(f"{run.minutes:.2f} minutes from run_start to run_stop")
    for key in ("what", "why", "do"):
        if run.failure.get(key):
            lines.append(escape(f"{key}: {run.failure[key]}"))
    banner = f'<div class="banner {kind}">{"<br>".join(lines)}</div>'
    if not run.is_miniature:
        return banner
    notice = "<b>A miniature: this is not a benchmark result.</b><br>A small model with its own target; it says nothing about MLPerf."
    return f'<div class="banner warn">{notice}</div>{banner}'


def _verdict(run: Run) -> tuple[str, str]:
    """Class of the banner, and its first line. The log's run_stop decides; failure.json only explains."""
    stop = run.log.first("run_stop")
    losses = [row.get("loss") for row in run.evaluations()]
    reached = bool(losses) and (run.target is None or (_finite(losses[-1]) and losses[-1] <= run.target))
    if stop and stop.metadata.get("status") == "success":
        return ("good", "Target reached") if reached else ("bad", "The log claims success, but its last evaluation misses the target")
    if run.failure.get("kind", "target_missed") != "target_missed":
        return "bad", f"Aborted: {run.failure['kind']}"
    if stop:
        return "bad", "Target not reached"
    return "bad", "The run did not end: run_stop is missing from its log"


# Curves.


@dataclass(frozen=True)
class Axes:
    """Maps data to the plot area of an SVG."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def svg(self, body: str, x_label: str, y_label: str) -> str:
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{y_label} over {x_label}">']
        for value in _ticks(self.x_low, self.x_high):
            parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_tick(value)}</text>')
        for value in _ticks(self.y_low, self.y_high):
            y = self.y(value)
            parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
        middle = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) / 2
        parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
        parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{y_label}</text>')
        return "".join(parts) + body + "</svg>"


def _loss_plot(run: Run) -> str:
    train = _points(run.of("step"), "samples", "loss")
    evaluations = _points(run.evaluations(), "samples", "loss")
    if not train and not evaluations:
        return ""
    samples = [x for x, _ in train + evaluations]
    losses = [y for _, y in train + evaluations] + ([run.target] if run.target is not None else [])
    axes = Axes(0, max(*samples, 1), *_padded(min(losses), max(losses)))
    body = f'<polyline class="curve" points="{_polyline(axes, _thinned(train))}"/>'
    body += f'<polyline class="evalcurve" points="{_polyline(axes, evaluations)}"/>'
    for x, y in evaluations:
        hint = f"<title>{y:.4f} at {x:.0f} samples</title>"
        body += f'<circle class="point" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3.5">{hint}</circle>'
    keys = "<span class=key-train>&#9473; train</span> &nbsp; <span class=key-eval>&#9679; evaluation</span>"
    if run.target is not None:
        y = axes.y(run.target)
        body += f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        keys += f" &nbsp; <span class=key-target>&#9476; target {run.target}</span>"
    return axes.svg(body, "training sequences", "loss, nats per token") + f"<p>{keys}</p>"


def _step_times(run: Run) -> str:
    """Histogram of the step times, and the medians of what was measured besides."""
    times = [time for _, time in _points(run.of("step"), "samples", "step_time_ms")]
    if not times:
        return ""
    high = sorted(times)[math.ceil(0.99 * len(times)) - 1]  # the slowest percent would squeeze the rest into one bin
    low, high = _padded(min(times), high)
    counts = [0] * STEP_TIME_BINS
    for time in times:
        counts[min(int((time - low) / (high - low) * STEP_TIME_BINS), STEP_TIME_BINS - 1)] += 1
    axes = Axes(low, high, 0, max(counts))
    width = (WIDTH - LEFT - RIGHT) / STEP_TIME_BINS
    body = "".join(
        f'<rect class="bar" x="{LEFT + index * width:.1f}" y="{axes.y(count):.1f}" width="{width - 1:.1f}" height="{axes.y(0) - axes.y(count):.1f}"/>'
        for index, count in enumerate(counts)
        if count
    )
    facts = [f"median {_number(_median(times))} ms", f"slowest {_number(max(times))} ms", f"{len(times)} steps recorded"]
    for key, unit in (
        ("tokens_per_s_per_gpu", "tokens/s per GPU"),
        ("tflops_per_gpu", "TFLOP/s per GPU"),
        ("mfu", "MFU"),
        ("memory_gib", "GiB"),
    ):
        values = [value for _, value in _points(run.of("step"), "samples", key)]
        if values:
            facts.append(f"median {_number(_median(values))} {unit}")
    note = "the last bar holds the slowest percent too"
    return axes.svg(body, f"step time, ms ({note})", "steps") + f"<p>{escape(' · '.join(facts))}</p>"


def _phases(run: Run) -> str:
    seconds = dict.fromkeys(PHASES, 0.0)
    for record in run.of("phase"):
        if record.get("name") in PHASES and _finite(record.get("seconds")):
            seconds[record["name"]] += max(record["seconds"], 0.0)
    if not seconds["train"] and not seconds["eval"]:  # a run that broke off has not summed them up; its log has the intervals
        seconds["train"], seconds["eval"] = _seconds_within(run.log, "block"), _seconds_within(run.log, "eval")
    total = sum(seconds.values())
    if not total:
        return ""
    bar, left = "", 0.0
    for name, value in seconds.items():
        width = value / total * WIDTH
        bar += f'<rect class="p-{name}" x="{left:.2f}" y="0" width="{width:.2f}" height="28"><title>{name} {value:.1f} s</title></rect>'
        left += width
    rows = [[f"{_colour_key(name)} {name}", f"{value:.1f} s", f"{value / total:.1%}"] for name, value in seconds.items() if value]
    return f'<svg viewBox="0 0 {WIDTH} 28" role="img" aria-label="phases">{bar}</svg>' + _table(["phase", "time", "share"], rows)


def _seconds_within(log: Log, interval: str) -> float:
    pairs = zip(log.all(f"{interval}_start"), log.all(f"{interval}_stop"), strict=False)
    return sum(max(stop.time_ms - start.time_ms, 0) for start, stop in pairs) / 1000


def _colour_key(phase: str) -> str:
    return f'<svg viewBox="0 0 10 10" style="width:10px"><rect class="p-{phase}" width="10" height="10"/></svg>'


# Tables.


def _evaluation_table(run: Run) -> str:
    rows = []
    for row in run.evaluations():
        loss = row.get("loss")
        reached = "yes" if _finite(loss) and run.target is not None and loss <= run.target else "no"
        rows.append([_number(row["samples"]), _number(loss), reached, _number(row["minutes"]), _number(row.get("seconds"))])
    return _table(["samples", "loss", "target reached", "minutes on the clock", "took, s"], rows) if rows else ""


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
    rows = [[escape(key), escape(str(run.log.value(key)))] for key in keys if run.log.value(key) is not None]
    rows += [[escape(str(key)), escape(value if isinstance(value, str) else json.dumps(value))] for key, value in run.versions.items()]
    return _table([], rows) if rows else ""


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML already. All columns but the first hold numbers, unless the table has no heads."""
    kind = ' class="n"' if heads else ""

    def row(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{kind if index else ''}>{cell}</{tag}>" for index, cell in enumerate(cells)) + "</tr>"

    return f"<table>{row('th', heads) if heads else ''}{''.join(row('td', cells) for cells in rows)}</table>"


# Numbers.


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _points(records: list[dict], x: str, y: str) -> list[tuple[float, float]]:
    return [(record[x], record[y]) for record in records if _finite(record.get(x)) and _finite(record.get(y))]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS, each the mean of a group of neighbours."""
    group = math.ceil(len(points) / MAX_POINTS)
    if group <= 1:
        return points
    chunks = [points[index : index + group] for index in range(0, len(points), group)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def _polyline(axes: Axes, points: list[tuple[float, float]]) -> str:
    return " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between `low` and `high`."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _tick(value: float) -> str:
    return f"{round(value, 10):,.10g}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _number(value: object) -> str:
    """Whole numbers in full, others with about four digits; a dash for what is missing."""
    if value is None:
        return "-"
    if not _finite(value):
        return escape(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4f}"


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html and return its path. Raises ConfigError, StorageError."""
    path = folder / "report.html"
    page = render(read_run(folder))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}", str(error), "free space, or make the directory writable") from error
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.report", description="Write report.html into a run's directory.")
    parser.add_argument("run_dir", type=Path)
    try:
        print(write_report(parser.parse_args(arguments).run_dir))
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
