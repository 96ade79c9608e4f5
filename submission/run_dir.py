"""A run's directory, read back: log, events, config, versions and failure, each of which may be missing or cut off.

Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from records import rcp
from submission.log import Log, read
from submission.plots import PHASES, finite, points


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

    @property
    def rcp_point(self) -> rcp.Point | None:
        """The reference convergence point of its batch; None for a miniature, and where there is none."""
        benchmark, batch = self.log.value("submission_benchmark"), self.log.number("global_batch_size")
        if self.is_miniature or benchmark not in rcp.REFERENCE_RUNS or batch is None:
            return None
        return rcp.point_at(benchmark, int(batch))

    def numbers(self, key: str) -> list[float]:
        """Of all recorded steps that have it: step_time_ms, memory_gib, ..."""
        return [value for _, value in points(self.of("step"), "samples", key)]

    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for record in self.of("phase"):
            if record.get("name") in PHASES and finite(record.get("seconds")):
                seconds[record["name"]] += max(record["seconds"], 0.0)
        if not seconds["train"] and not seconds["eval"]:  # a run that broke off has not summed them up; its log has the intervals
            seconds["train"], seconds["eval"] = _seconds_within(self.log, "block"), _seconds_within(self.log, "eval")
        return seconds

    def evaluations(self) -> list[dict]:
        """From the log, which is what counts; from events.jsonl if the log has none, and for how long each took."""
        recorded = {record["samples"]: record for record in self.of("eval") if finite(record.get("samples"))}
        start = self.log.first("run_start")
        rows = []
        for event in self.log.all("eval_accuracy"):
            seconds = recorded.get(event.samples, {}).get("seconds") if finite(event.samples) else None
            minutes = (event.time_ms - start.time_ms) / 60_000 if start else None
            rows.append({"samples": event.samples, "loss": event.value, "minutes": minutes, "seconds": seconds})
        return rows or [{**record, "minutes": _minutes(record.get("time_s"))} for record in recorded.values()]


def _minutes(seconds: object) -> float | None:
    return seconds / 60 if finite(seconds) else None


def read_run(folder: Path) -> Run:
    """All there is to know about the run in `folder`. Raises ConfigError if that is no directory."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such run", "it is not a directory", "name the directory that a run has written")
    run = Run(folder.resolve().name, Log())
    if (folder / "result.txt").is_file():
        run.log = read(folder / "result.txt") if (folder / "result.txt").stat().st_size else Log()
        run.notes += [f"result.txt line {bad.line}: {bad.reason}" for bad in run.log.bad]
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


def _seconds_within(log: Log, interval: str) -> float:
    pairs = zip(log.all(f"{interval}_start"), log.all(f"{interval}_stop"), strict=False)
    return sum(max(stop.time_ms - start.time_ms, 0) for start, stop in pairs) / 1000
