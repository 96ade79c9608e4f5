"""Numbers of a run for tracking packages, from its events.jsonl and gpu_samples.jsonl.

A number is named <event>/<key>: step/loss, eval/loss, gpu0/power_w, ... An event's position is its
optimizer step, a GPU sample's is its second. Standard library only, except for the packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.records import ledger
from common.records.json_lines import Tail, is_number
from common.records.run_record import EVENTS, RunRecord
from common.records.trackers import SECONDS, STEP, TRACKERS, Tracker, require_installed

GPU_SAMPLES = "gpu_samples.jsonl"
POSITIONS = ("step", "time_s")  # keys of events that are positions, not values


@dataclass(frozen=True)
class MetricPoint:
    """Values at one position of an axis."""

    axis: str
    position: int
    values: dict[str, float]


def point_of_event(record: dict, step: int) -> MetricPoint:
    """Return the numbers in one line of events.jsonl.

    `step`: position of an event that has none.
    """
    event = record.get("event")
    if event == "phase":  # each phase has names of its own
        event = f"phase/{record.get('name')}"
    values: dict[str, float] = {}
    for key, value in record.items():
        if is_number(value) and key not in POSITIONS:
            values[f"{event}/{key}"] = float(value)
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if is_number(each):
                    values[f"{event}/{key}/{index}"] = float(each)
    own = record.get("step")
    return MetricPoint(STEP, own if isinstance(own, int) else step, values)


def point_of_sample(record: dict) -> MetricPoint:
    """Return the numbers in one line of gpu_samples.jsonl."""
    second = record.get("time_s")
    gpus = record.get("gpus")
    if record.get("event") != "sample" or not is_number(second) or not isinstance(gpus, list):
        return MetricPoint(SECONDS, 0, {})
    values = {}
    for index, gpu in enumerate(gpus):
        if isinstance(gpu, dict):
            for key, value in gpu.items():
                if is_number(value):
                    values[f"gpu{index}/{key}"] = float(value)
    return MetricPoint(SECONDS, round(second), values)


class Follower:
    """Reader of a run's new points."""

    def __init__(self, run_dir: Path):
        self.events = Tail(run_dir / EVENTS)
        self.samples = Tail(run_dir / GPU_SAMPLES)
        self.step = 0

    def points(self) -> Iterator[MetricPoint]:
        """Yield the points that were written since the last call."""
        for record in self.events.records():
            point = point_of_event(record, self.step)
            self.step = point.position
            if point.values:
                yield point
        for record in self.samples.records():
            point = point_of_sample(record)
            if point.values:
                yield point


def facts(run_dir: Path) -> dict[str, str]:
    """Return dotted name -> value, as a text, of the config and the versions of a run."""
    run = RunRecord.read(run_dir / ledger.LOG)
    return dict(_flat("", {"config": run.settings, "versions": run.versions}))


def ending(run_dir: Path) -> tuple[str, str]:
    """Return the run's state, and a text of the state and its cause, for `Tracker.finish`."""
    run = RunRecord.in_directory(run_dir)
    return run.state, ": ".join(filter(None, [run.state_words, run.cause]))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every value in nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, str(value)


def export(run_dir: Path, name: str) -> None:
    """Send a run that has ended to one tracker.

    Raises ConfigError if the run has no events, PreflightError if the package is not installed.
    """
    require_installed(name)
    points = list(Follower(run_dir).points())
    if not points:
        raise ConfigError(
            f"{run_dir} has nothing to export",
            f"{EVENTS} is missing or empty",
            "name the directory of a run",
        )
    tracker: Tracker = TRACKERS[name](run_dir.resolve(), facts(run_dir))
    for point in points:
        tracker.log(point.axis, point.position, point.values)
    tracker.finish(*ending(run_dir))
