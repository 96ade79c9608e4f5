"""Tracking process: `python -m launch.monitor.tracking RUN_DIR TRACKER...`.

It follows events.jsonl and gpu_samples.jsonl of a run and sends their numbers to tracking packages.
It is a separate process, so that the ranks never wait for a server. When its standard input closes,
it sends the rest of the files and ends; after END_S seconds, it is killed. Its output, including
the reason of a failure, is in RUN_DIR/tracking.txt.

A number is named <event>/<key>: step/loss, eval/loss, gpu0/power_w, ... The position of an event is
its optimizer step, that of a GPU sample its second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.records.json_lines import Tail, is_number
from common.terminal import print_stderr
from launch.monitor import gpu_sampler
from launch.monitor.trackers import SECONDS, STEP, TRACKERS, Tracker, require_installed

EVENTS = "events.jsonl"
OUTPUT = "tracking.txt"
PERIOD_S = 2.0
# Seconds that trackers have after the run. A server that does not answer delays the end no longer.
END_S = 60.0
POSITIONS = ("step", "time_s")  # keys of events that are positions, not values


@dataclass(frozen=True)
class MetricPoint:
    """Values at one position of an axis."""

    axis: str
    position: int
    values: dict[str, float]


# --- the launcher's side


@contextlib.contextmanager
def tracked(run_dir: Path, names: Sequence[str]) -> Iterator[None]:
    """Track the run in `run_dir` during the block. If a tracker fails, the run continues.

    `names`: keys of TRACKERS.
    """
    if not names:
        yield
        return
    command = [sys.executable, "-m", "launch.monitor.tracking", str(run_dir), *names]
    with (run_dir / OUTPUT).open("ab") as output:
        # A new session keeps Ctrl-C away from the process. The launcher handles it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        _end(process, run_dir / OUTPUT)


def _end(process: subprocess.Popen, output: Path) -> None:
    """End the tracking process, and print a note if it failed or did not end in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the packages' own processes
        process.wait()
        print_stderr(
            f"note: tracking did not end within {END_S:.0f} s and was killed; the run is not "
            f"affected. See {output}"
        )
        return
    if code:
        print_stderr(f"note: tracking failed; the run is not affected. See {output}")


# --- points of a run


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
        self.samples = Tail(run_dir / gpu_sampler.NAME)
        self.step = 0

    def points(self) -> Iterator[MetricPoint]:
        """Yield the points that were written since the last call."""
        for record in _objects(self.events):
            point = point_of_event(record, self.step)
            self.step = point.position
            if point.values:
                yield point
        for record in _objects(self.samples):
            point = point_of_sample(record)
            if point.values:
                yield point


def _objects(file: Tail) -> Iterator[dict]:
    """Yield the JSON objects in the new lines of `file`, and skip other lines."""
    while lines := file.lines():
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def facts(run_dir: Path) -> dict[str, str]:
    """Return dotted name -> value, as a text, of the config and the versions of a run."""
    tables: dict = {}
    with contextlib.suppress(OSError, ValueError):
        tables["config"] = tomllib.loads((run_dir / "config.toml").read_text())
    with contextlib.suppress(OSError, ValueError):
        tables["versions"] = json.loads((run_dir / "versions.json").read_text())
    return dict(_flat("", tables))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every value in nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, str(value)


# --- the process


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
    tracker.finish()


def follow(run_dir: Path, names: Sequence[str]) -> int:
    """Send the points of a run to the trackers until standard input closes. Return the exit code.

    It is 1 if a tracker failed; the others continue without it.
    """
    exit_code = 0
    trackers: dict[str, Tracker] = {}
    for name in names:
        try:
            trackers[name] = TRACKERS[name](run_dir, facts(run_dir))
        except Exception:
            exit_code = _report_failure(name)
    follower = Follower(run_dir)
    closed = False
    while not closed:
        closed = gpu_sampler.input_closed(PERIOD_S)
        for point in follower.points():
            for name, tracker in list(trackers.items()):
                try:
                    tracker.log(point.axis, point.position, point.values)
                except Exception:
                    exit_code = _report_failure(name)
                    del trackers[name]
    for name, tracker in trackers.items():
        try:
            tracker.finish()
        except Exception:
            exit_code = _report_failure(name)
    return exit_code


def _report_failure(name: str) -> int:
    """Print the exception that tracker `name` raised, and return the exit code 1."""
    print(f"note: tracking by {name} failed:", flush=True)
    traceback.print_exc()
    return 1


if __name__ == "__main__":
    os.nice(gpu_sampler.NICE)
    sys.exit(follow(Path(sys.argv[1]), sys.argv[2:]))
