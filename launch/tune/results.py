"""Results of a search: lines and table for the screen, page, and config."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, fields

from common.config import RunConfig
from common.errors import OutOfMemory
from common.gpu_kinds import GIB
from common.html import page as html
from common.html.page import Curve
from common.terminal import table
from launch.job import Job
from launch.plan.estimate import memory_peak
from launch.tune.candidates import Changes, Value, changed, value_of
from launch.tune.search import Journal, Measurement, best_of, text_of, text_of_value
from launch.tune.target import Target

HEAD = ["step ms", "steps", "against best", "spread", "peak GiB", "planned GiB", "changes"]
WORTH_HEAD = ["setting", "value", "step ms", "against best", "other settings"]
HARDWARE = ("gpu", "nodes", "gpus_per_node", "miniature")


def line(measurement: Measurement, number: int) -> str:
    """Return one line of progress about a measurement."""
    if measurement.outcome != "done":
        return f"{number:4}  {outcome_text(measurement):>13}  {text_of(measurement.changes)}"
    memory = f"  {measurement.peak_bytes / GIB:.1f} GiB" if measurement.peak_bytes else ""
    return f"{number:4}  {measurement.step_ms:10,.1f} ms{memory}  {text_of(measurement.changes)}"


def outcome_text(measurement: Measurement) -> str:
    if measurement.outcome == OutOfMemory.kind:
        return "out of memory"
    if measurement.outcome == "stopped":
        return f"stopped at {measurement.seconds:.0f} s"
    return f"fails: {measurement.outcome}"


@dataclass(frozen=True)
class Worth:
    """A measurement with one value of a setting. `same`: all else is as in the best config."""

    name: str
    value: Value
    measurement: Measurement
    same: bool


@dataclass(frozen=True)
class Outcome:
    """A search's journal and the changes that it found best."""

    target: Target
    journal: Journal
    best: Changes
    command: str

    @property
    def job(self) -> Job:
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
        return str(self.journal.facts["gpus"]) if self.job.selection.device == "cuda" else "a CPU"

    def distinct(self) -> list[Measurement]:
        """Return one measurement of each candidate, its longest one, the fastest first."""
        found = []
        seen: list[Changes] = []
        for each in self.journal.measurements:
            if each.changes not in seen:
                seen.append(each.changes)
                found.append(best_of(self.journal, each.changes) or each)
        return sorted(found, key=lambda each: each.step_ms)

    @property
    def fastest(self) -> Measurement:
        """The measurement of the best config."""
        found = best_of(self.journal, self.best)
        assert found is not None, "the search chooses among measured candidates"
        return found

    def against_best(self, measurement: Measurement) -> str:
        """Return how much longer the step is than that of the best config.

        A short measurement is compared with a short one: the machine may warm up.
        """
        reference = self.journal.find(self.best, measurement.length)
        if reference is None or reference.outcome != "done":
            reference = self.fastest
        return f"{measurement.step_ms / reference.step_ms - 1:+.1%}"

    def rows(self) -> list[list[str]]:
        """Return the cells of HEAD for each candidate."""
        work = self.target.work
        rows = []
        for each in self.distinct():
            planned = memory_peak(changed(self.base, each.changes), work).allocated / GIB
            measured = f"{each.peak_bytes / GIB:.2f}" if each.peak_bytes else "-"
            last = [measured, f"{planned:.2f}", text_of(each.changes)]
            if each.outcome == "done":
                spread = f"{min(each.times_ms):,.1f} to {max(each.times_ms):,.1f}"
                first = [
                    f"{each.step_ms:,.1f}",
                    str(len(each.times_ms)),
                    self.against_best(each),
                    spread,
                ]
            else:
                first = [outcome_text(each), "-", "-", "-"]
            rows.append([*first, *last])
        return rows

    def worth(self) -> list[Worth]:
        """Return what each value of each setting is worth, the fastest value first."""
        names = sorted({name for each in self.journal.measurements for name in each.changes})
        return [each for name in names for each in self._worth_of(name)]

    def _worth_of(self, name: str) -> list[Worth]:
        """Return the measurement that shows best what each value of the setting `name` is worth.

        That is the best config with this value, else the fastest candidate with it.
        """
        found: dict[Value, Worth] = {}
        for each in self.distinct():  # the fastest first
            config = changed(self.base, each.changes)
            value = value_of(config, name)
            same = changed(config, {name: value_of(self.config, name)}) == self.config
            if value not in found or (same and not found[value].same):
                found[value] = Worth(name, value, each, same)
        return sorted(found.values(), key=lambda each: each.measurement.step_ms)

    def worth_rows(self) -> list[list[str]]:
        """Return the cells of WORTH_HEAD."""
        rows = []
        for each in self.worth():
            step = outcome_text(each.measurement)
            difference = "-"
            if each.measurement.outcome == "done":
                step = f"{each.measurement.step_ms:,.1f}"
                difference = self.against_best(each.measurement)
            others = "as in the best" if each.same else "differ"
            rows.append([each.name, text_of_value(each.value), step, difference, others])
        return rows

    def summary(self) -> list[str]:
        """Return the steps of the best and of the base config, and what the best one changes."""
        base = best_of(self.journal, {})
        tried = self.journal.find({}, "short")
        before = "not measured"
        if base is not None:
            before = f"{base.step_ms:,.1f} ms"
        elif tried is not None:
            before = outcome_text(tried)
        return [
            f"best: {self.fastest.step_ms:,.1f} ms a step; the base config: {before}",
            f"changes: {text_of(self.best)}",
        ]

    def table(self) -> list[str]:
        """Return the lines that `tune` prints."""
        return [
            *table([HEAD, *self.rows()], ">>>>>><"),
            "",
            *table([WORTH_HEAD, *self.worth_rows()], "<<>><"),
            "",
            *self.summary(),
        ]

    def page(self) -> str:
        """Return the HTML page: time against memory, and what each setting is worth."""
        facts = self.journal.facts
        failures = [
            [outcome_text(each), text_of(each.changes), str((each.error or {}).get("what", ""))]
            for each in self.distinct()
            if each.outcome != "done"
        ]
        sections = [
            (
                "",
                [
                    html.banner("good", *self.summary()),
                    html.table(
                        (),
                        [
                            ["config", self.job.selection.path.name],
                            ["machine", self.machine],
                            ["commit", str(facts["commit"])],
                            ["command", self.command],
                        ],
                    ),
                ],
            ),
            ("Time against memory", self._chart()),
            (
                "What each setting is worth",
                [
                    {
                        "notes": [
                            "The best config with each value, where that was measured, else the "
                            "fastest candidate with the value."
                        ]
                    },
                    html.table(WORTH_HEAD, self.worth_rows(), words=(0, 1, 4)),
                ],
            ),
            ("Candidates", [html.table(HEAD, self.rows(), words=(6,))]),
            ("Failures", [html.table(["outcome", "changes", "error"], failures, words=(0, 1, 2))]),
        ]
        return html.render(f"tune {self.job.benchmark}", sections)

    def _chart(self) -> list[html.Block]:
        """Return the chart of all candidates that were measured. On a CPU the memory is planned."""
        work = self.target.work
        is_measured = self.job.selection.device == "cuda"
        done = [each for each in self.distinct() if each.outcome == "done"]

        def gib(each: Measurement) -> float:
            if is_measured:
                return each.peak_bytes / GIB
            return memory_peak(changed(self.base, each.changes), work).allocated / GIB

        spots = {
            "candidates": [each for each in done if each.changes not in ({}, self.best)],
            "best": [each for each in done if each.changes == self.best],
            "base config": [each for each in done if each.changes == {}],
        }
        curves = [
            Curve(name, [(each.step_ms, gib(each)) for each in of_kind], color, scatter=True)
            for color, (name, of_kind) in enumerate(spots.items())
        ]
        label = "peak memory, GiB" if is_measured else "planned memory, GiB"
        return [html.chart(label, "ms per step", curves)]

    def toml(self) -> str:
        """Return the best config in the form of configs/, with what was measured in comments."""
        facts = self.journal.facts
        config = self.config
        header = [
            f"# Tuned on {self.machine}, {time.strftime('%Y-%m-%d')}, "
            f"commit {str(facts['commit'])[:12]}, from",
            f"# {self.job.selection.path.name}, by: {self.command}",
            f"# {self.fastest.step_ms:,.1f} ms a step, median of {len(self.fastest.times_ms)}",
        ]
        tuned = {each.name for each in self.worth()}
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
            groups[group].append(_assignment(each.name, value) + self._comment(each.name))
        if config.env:
            groups["env"].append("[env]")
        for name, value in config.env.items():
            groups["env"].append(_assignment(name, value) + self._comment(name))
        return "\n\n".join("\n".join(group) for group in groups.values() if group) + "\n"

    def _comment(self, setting: str) -> str:
        """Return what the best config measures with each value of a setting, as a comment."""
        parts = []
        for each in self.worth():
            if each.name == setting and each.same:
                measured = outcome_text(each.measurement)
                if each.measurement.outcome == "done":
                    measured = self.against_best(each.measurement)
                if each.measurement.changes == self.best:
                    measured = f"{each.measurement.step_ms:,.1f} ms"
                parts.append(f"{text_of_value(each.value)}: {measured}")
        return f"  # {', '.join(parts)}" if parts else ""


def _assignment(name: str, value: object) -> str:
    """Return the line of TOML that sets `name`."""
    import tomli_w  # an installed package: see RunConfig.as_toml

    return tomli_w.dumps({name: value}).rstrip("\n")
