"""Results of a search: lines and a table for the screen, a page, and a config file."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, fields

from common.config import RunConfig, assignment
from common.errors import OutOfMemory
from common.estimate.memory import memory_peak
from common.gpu_kinds import GIB
from common.html import page as html
from common.html.page import Curve
from common.terminal import table
from launch.job import Job
from launch.tune.candidates import Changes, Value, changed, value_of
from launch.tune.search import Journal, Measurement, best_of, text_of, text_of_value
from launch.tune.target import Target

HEAD = ["step ms", "steps", "against best", "spread", "peak GiB", "planned GiB", "changes"]
SETTINGS_HEAD = ["setting", "value", "step ms", "against best", "other settings"]
HARDWARE = ("gpu", "nodes", "gpus_per_node", "miniature")


def line(measurement: Measurement, number: int) -> str:
    """Return one line of progress about a measurement."""
    memory = f"  {measurement.peak_bytes / GIB:.1f} GiB" if measurement.peak_bytes else ""
    changes = text_of(measurement.changes)
    return f"{number:4}  {step_text(measurement, ' ms'):>13}{memory}  {changes}"


def step_text(measurement: Measurement, unit: str = "") -> str:
    """Return the time of a step in ms, or in words why there is none."""
    if measurement.outcome == "done":
        return f"{measurement.step_ms:,.1f}{unit}"
    if measurement.outcome == OutOfMemory.kind:
        return "out of memory"
    if measurement.outcome == "stopped":
        return f"stopped at {measurement.seconds:.0f} s"
    return f"fails: {measurement.outcome}"


@dataclass(frozen=True)
class MeasuredValue:
    """The best measurement with one value of a setting."""

    name: str  # of the setting
    value: Value
    measurement: Measurement
    others_as_in_best: bool  # whether all other settings are as in the best config


@dataclass(frozen=True)
class SearchResult:
    """The journal of a search, and the fastest candidate.

    `best`: changes of the fastest candidate. `command`: the user's command line.
    """

    target: Target
    journal: Journal
    best: Changes
    command: str

    @property
    def job(self) -> Job:
        """The job whose config is searched."""
        return self.target.job

    @property
    def base(self) -> RunConfig:
        return self.job.config

    @property
    def config(self) -> RunConfig:
        """The config that the search found."""
        return changed(self.base, self.best)

    @property
    def machine(self) -> str:
        """The GPUs, or "a CPU"."""
        if self.job.selection.device == "cuda":
            return str(self.journal.identity["gpus"])
        return "a CPU"

    def distinct(self) -> list[Measurement]:
        """Return the longest measurement of each candidate, the fastest candidate first."""
        longest = []
        seen: list[Changes] = []
        for each in self.journal.measurements:
            if each.changes not in seen:
                seen.append(each.changes)
                longest.append(best_of(self.journal, each.changes) or each)
        return sorted(longest, key=lambda each: each.step_ms)

    @property
    def fastest(self) -> Measurement:
        """The measurement of the best config."""
        measurement = best_of(self.journal, self.best)
        assert measurement is not None, "the search chooses among measured candidates"
        return measurement

    def cells(self, measurement: Measurement) -> dict[str, str]:
        """Return the cell of each column of HEAD.

        "against best" says how much longer the step takes than with the best config. A short
        measurement is compared with a short one, since the machine may still warm up.
        """
        times_ms = measurement.times_ms
        row = dict.fromkeys(HEAD, "-") | {
            "step ms": step_text(measurement),
            "planned GiB": f"{self.planned_gib(measurement):.2f}",
            "changes": text_of(measurement.changes),
        }
        if measurement.peak_bytes:
            row["peak GiB"] = f"{measurement.peak_bytes / GIB:.2f}"
        if measurement.outcome == "done":
            reference = self.journal.find(self.best, measurement.length)
            if reference is None or reference.outcome != "done":
                reference = self.fastest
            row["steps"] = str(len(times_ms))
            row["against best"] = f"{measurement.step_ms / reference.step_ms - 1:+.1%}"
            row["spread"] = f"{min(times_ms):,.1f} to {max(times_ms):,.1f}"
        return row

    def planned_gib(self, measurement: Measurement) -> float:
        """Return the calculated peak memory of a candidate in GiB."""
        config = changed(self.base, measurement.changes)
        return memory_peak(config, self.target.work).allocated / GIB

    def rows(self) -> list[list[str]]:
        """Return the table's row for each candidate, with the columns of HEAD."""
        return [[*self.cells(each).values()] for each in self.distinct()]

    def measured_values(self) -> list[MeasuredValue]:
        """Return the best measurement with each value of each setting, the fastest value first."""
        names = sorted({name for each in self.journal.measurements for name in each.changes})
        return [each for name in names for each in self._measured_values(name)]

    def _measured_values(self, name: str) -> list[MeasuredValue]:
        """Return one measurement for each value of the setting `name`, the fastest first.

        The measurement is of the best config with this value, or else of the fastest candidate.
        """
        chosen: dict[Value, MeasuredValue] = {}
        for each in self.distinct():  # the fastest first
            config = changed(self.base, each.changes)
            value = value_of(config, name)
            same = changed(config, {name: value_of(self.config, name)}) == self.config
            if value not in chosen or (same and not chosen[value].others_as_in_best):
                chosen[value] = MeasuredValue(name, value, each, same)
        return sorted(chosen.values(), key=lambda each: each.measurement.step_ms)

    def setting_rows(self) -> list[list[str]]:
        """Return the table's row for each value of a setting. The columns are SETTINGS_HEAD."""
        rows = []
        for each in self.measured_values():
            row = self.cells(each.measurement) | {
                "setting": each.name,
                "value": text_of_value(each.value),
                "other settings": "as in the best" if each.others_as_in_best else "differ",
            }
            rows.append([row[column] for column in SETTINGS_HEAD])
        return rows

    def summary(self) -> list[str]:
        """Return the step times of the best and of the base config, and the best one's changes."""
        base = best_of(self.journal, {}) or self.journal.find({}, "short")
        before = step_text(base, " ms") if base else "not measured"
        return [
            f"best: {step_text(self.fastest, ' ms')} a step; the base config: {before}",
            f"changes: {text_of(self.best)}",
        ]

    def table(self) -> list[str]:
        """Return the lines that `tune` prints."""
        return [
            *table([HEAD, *self.rows()], ">>>>>><"),
            "",
            *table([SETTINGS_HEAD, *self.setting_rows()], "<<>><"),
            "",
            *self.summary(),
        ]

    def page(self) -> str:
        """Return the HTML page: time against memory, effect of each setting, all candidates."""
        failures = [
            [step_text(each), text_of(each.changes), str((each.error or {}).get("what", ""))]
            for each in self.distinct()
            if each.outcome != "done"
        ]
        about = [
            ["config", self.job.selection.path.name],
            ["machine", self.machine],
            ["commit", str(self.journal.identity["commit"])],
            ["command", self.command],
        ]
        note = (
            "The best config with each value if that was measured, otherwise the fastest candidate "
            "with the value."
        )
        settings = html.table(SETTINGS_HEAD, self.setting_rows(), words=(0, 1, 4))
        sections = [
            ("", [html.banner("good", *self.summary()), html.table((), about)]),
            ("Time against memory", [self._chart()]),
            ("Effect of each setting", [{"notes": [note]}, settings]),
            ("Candidates", [html.table(HEAD, self.rows(), words=(6,))]),
            ("Failures", [html.table(["outcome", "changes", "error"], failures, words=(0, 1, 2))]),
        ]
        return html.render(f"tune {self.job.benchmark}", sections)

    def _chart(self) -> html.Block:
        """Return the chart of all measured candidates. On a CPU, the memory is the planned one."""
        is_measured = self.job.selection.device == "cuda"
        done = [each for each in self.distinct() if each.outcome == "done"]
        spots = {
            "candidates": [each for each in done if each.changes not in ({}, self.best)],
            "best": [each for each in done if each.changes == self.best],
            "base config": [each for each in done if each.changes == {}],
        }
        curves = []
        for color, (name, measurements) in enumerate(spots.items()):
            points = []
            for each in measurements:
                gib = each.peak_bytes / GIB if is_measured else self.planned_gib(each)
                points.append((each.step_ms, gib))
            curves.append(Curve(name, points, color, scatter=True))
        label = "peak memory, GiB" if is_measured else "planned memory, GiB"
        return html.chart(label, "ms per step", curves)

    def toml(self) -> str:
        """Return the best config in the form of configs/, with measurements in its comments."""
        identity = self.journal.identity
        config = self.config
        header = [
            f"# Tuned on {self.machine}, {time.strftime('%Y-%m-%d')}, "
            f"commit {str(identity['commit'])[:12]}, from",
            f"# {self.job.selection.path.name}, by: {self.command}",
            f"# {step_text(self.fastest, ' ms')} a step, median of {len(self.fastest.times_ms)}",
        ]
        tuned = {each.name for each in self.measured_values()}
        groups: dict[str, list[str]] = {"hardware": header, "kept": [], "tuned": [], "env": []}
        for each in fields(config):
            value = getattr(config, each.name)
            is_default = each.default is not MISSING and value == each.default
            if each.name == "env" or (is_default and each.name not in tuned):
                continue
            group = "kept"
            if each.name in HARDWARE:
                group = "hardware"
            elif each.name in tuned:
                group = "tuned"
            groups[group].append(assignment(each.name, value) + self._comment(each.name))
        if config.env:
            groups["env"].append("[env]")
        for name, value in config.env.items():
            groups["env"].append(assignment(name, value) + self._comment(name))
        return "\n\n".join("\n".join(group) for group in groups.values() if group) + "\n"

    def _comment(self, setting: str) -> str:
        """Return a comment with the measurements of the best config with each value of `setting`.

        Return "" if there are none.
        """
        parts = []
        for each in self.measured_values():
            if each.name == setting and each.others_as_in_best:
                measured = step_text(each.measurement, " ms")
                if each.measurement.changes != self.best and each.measurement.outcome == "done":
                    measured = self.cells(each.measurement)["against best"]
                parts.append(f"{text_of_value(each.value)}: {measured}")
        return f"  # {', '.join(parts)}" if parts else ""
