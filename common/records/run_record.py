"""The record of a run: how it began and ended, and what it measured, from the files of the run.

The files are the log, the run's lines in the ledger, and failure.json, config.toml, versions.json
and events.jsonl beside the log. Each may be missing or truncated. Only a display that follows
events.jsonl while it grows reads the file itself.

The log may come from any submitter. Values that decide a score are read as the official tools of
mlcommons/logging read them. Minutes begin at the last run_start before the first run_stop
(result_summarizer). Samples come from the last eval_accuracy before run_stop (rcp_checker).

Other values are read as far as possible. The logs of other submitters may

- have the rank before the token, or contain every line eight times
- have epochs instead of blocks
- give the size of a block where others give the number of samples so far
- count one optimizer step too few

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Self

from common import benchmarks
from common.benchmarks import OPEN, Rules
from common.engines import ENGINES
from common.errors import ConfigError
from common.gpu_kinds import DERIVED_SPEEDS, KINDS
from common.records import intervals, json_lines, ledger, mlperf_log, run_states
from common.records.intervals import Interval
from common.records.json_lines import is_number
from common.records.ledger import SeriesRecord
from common.records.mlperf_log import Log

EVENTS = "events.jsonl"
INTERVALS = tuple(
    f"{name}_{end}"
    for name in ("init", "run", "block", "epoch", "eval")
    for end in ("start", "stop")
)
# Keys whose records are all read. For other keys, only the first record is read.
REPEATED = frozenset(
    {*INTERVALS, "eval_accuracy", "eval_error", "submission_benchmark", "global_batch_size", "seed"}
)

# More GPUs than any system has: a larger number in a description is an error.
MAX_GPUS = 1_000_000


@dataclass(eq=False)
class RunRecord:
    """One run. Two records are equal only if they are the same object."""

    path: Path  # of the log
    number: int = 0  # number of the attempt in its series, from 1
    series: SeriesRecord = field(default_factory=SeriesRecord)  # empty without a ledger
    alive: bool = False  # whether its launcher is alive and has yet to enter its end in the ledger
    # All records of the keys in REPEATED, and the first record of each other key.
    log: Log = field(default_factory=Log)
    unreadable: ConfigError | OSError | None = None  # why the log could not be read
    benchmark: str = ""
    org: str = ""
    division: str = ""
    batch: int | None = None
    status: str = ""  # as claimed by the log: success, aborted, or "" without a run_stop
    # Wall time from run_start to run_stop. If the log has no run_stop: by the ledger.
    minutes: float | None = None
    # Whether an evaluation reached the target. Without a target: whether there was an evaluation.
    reached: bool = False
    samples: int | None = None  # training sequences at the last evaluation, for the RCP test
    blocks: list[Interval] = field(default_factory=list)  # training only
    evaluations: list[Interval] = field(default_factory=list)
    gpu: str | None = None  # such as H200
    gpus: int | None = None  # in all nodes
    nodes: int = 0  # from config.toml, or 0 without it
    gpus_per_node: int = 0
    notes: list[str] = field(default_factory=list)  # anomalies found while reading
    # Contents of the files beside the log.
    config: str = ""
    versions: dict = field(default_factory=dict)
    failure: dict = field(default_factory=dict)

    # Reading.

    @classmethod
    def read(
        cls, path: Path, number: int = 0, series: SeriesRecord | None = None, alive: bool = False
    ) -> Self:
        """Return the run in the log at `path`.

        If the log is missing, empty or truncated, a note of the run says so. `number`: of the
        attempt in `series`. `alive`: whether the launcher of the series is alive.
        """
        run = cls(path, number, series or SeriesRecord())
        run.alive = alive and not run.end
        try:
            run.log = mlperf_log.read(path, REPEATED)
        except (ConfigError, OSError) as error:
            run.unreadable = error
            what = error.what if isinstance(error, ConfigError) else f"{path}: {error.strerror}"
            run.notes.append(what)
        run._fill()
        return run

    @classmethod
    def in_series(cls, folder: Path, series: SeriesRecord) -> list[Self]:
        """Return the attempts of a `series` of the ledger in `folder`, in their order."""
        alive = bool(series.open_starts) and ledger.launcher_is_alive(folder, series.id)
        return [
            cls.read(folder / start["run"] / ledger.LOG, number, series, alive)
            for number, start in sorted(series.starts.items())
        ]

    @classmethod
    def in_folder(cls, folder: Path) -> list[Self]:
        """Return the runs in `folder`, LOGDIR/<benchmark>, in the order of their starts.

        Earlier versions named run directories by local time, so their names do not give the order.
        It comes from the ledger, otherwise from the log. Directories without either come first,
        in the order of their names.
        """
        runs = []
        for series in ledger.read(folder / ledger.NAME):
            runs += cls.in_series(folder, series)
        named = {run.folder.name for run in runs}
        others = [path for path in folder.glob("*/") if path.name not in named]
        runs += [cls.read(path / ledger.LOG) for path in others]
        return sorted(runs, key=lambda run: (*run.order, run.folder.name))

    @classmethod
    def in_directory(cls, run_dir: Path) -> Self:
        """Return the run in `run_dir`, with its lines in the ledger of the folder, if any."""
        path = run_dir.resolve()
        for series in ledger.read(path.parent / ledger.NAME):
            for number, start in series.starts.items():
                if start["run"] == path.name:
                    alive = ledger.launcher_is_alive(path.parent, series.id)
                    return cls.read(run_dir / ledger.LOG, number, series, alive)
        return cls.read(run_dir / ledger.LOG)

    def _fill(self) -> None:
        """Fill in the fields from the log and the other files of the run."""
        batch = self.log.last("global_batch_size")
        self.config = self._text("config.toml") or ""
        self.versions = self._object("versions.json")
        self.failure = self._object("failure.json")
        for name in ("packages", "engines", "variables", "system_tuning"):
            if not isinstance(self.versions.get(name, {}), dict):
                self.notes.append(f"versions.json: {name} is not an object")
                self.versions[name] = {}
        self.benchmark = str(self.log.last("submission_benchmark") or "")
        self.org = str(self.log.value("submission_org") or "")
        self.division = str(self.log.value("submission_division") or "")
        if self.unreadable and self.folder.resolve().parent.name == benchmarks.open_benchmark():
            self.division = OPEN  # so its config.toml says whether it had a target
        self.batch = int(batch) if is_number(batch) and batch >= 1 else None
        self.notes += [f"line {bad.line}: {bad.reason}" for bad in self.log.bad[:3]]
        self._read_result()
        self.evaluations = intervals.pairs(self.log.events, "eval", self.batch or 1)
        self.blocks = intervals.training(self.log.events, self.evaluations)
        counted = self.stands and self.blocks and self.samples is not None
        if counted and self.trained != self.samples:
            self.notes.append(
                f"the last evaluation is logged at {self.samples:,} sequences,"
                f" the blocks end at {self.trained:,}"
            )
        self._find_gpus()

    def _text(self, name: str) -> str | None:
        """Return the text of the file `name` beside the log, None if there is none.

        If it cannot be read, return None and add a note.
        """
        path = self.folder / name
        why = "it is not a regular file"
        try:
            if path.is_file():
                return path.read_text(errors="replace")
        except OSError as error:
            why = error.strerror or str(error)
        if os.path.lexists(path):
            self.notes.append(f"{name} cannot be read: {why}")
        return None

    def _object(self, name: str) -> dict:
        """Return the JSON object in the file `name` beside the log, {} if there is none.

        If the file is not a JSON object, return {} and add a note.
        """
        text = self._text(name)
        if text is None:
            return {}
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            if isinstance(value, dict):
                return value
        self.notes.append(f"{name} is truncated or damaged")
        return {}

    def _read_result(self) -> None:
        """Set the status, minutes and samples, and whether the run reached the target."""
        evaluated = [
            event for event in self.log.events if event.key in ("eval_accuracy", "eval_error")
        ]
        if self.rules is not None:
            target = self.target or math.inf
            for event in evaluated:
                if is_number(event.value) and 0 < event.value <= target:
                    self.reached = True
        stops = self.log.all("run_stop")
        if not stops:
            minutes = self.end.get("minutes")
            self.minutes = minutes if is_number(minutes) else None
            if evaluated:
                self.samples = intervals.samples_of(evaluated[-1])
            if self.log.events:
                self.notes.append("no run_stop: the run did not end")
            return
        self.status = str(stops[-1].metadata.get("status", ""))
        before_stop = [event for event in evaluated if event.line < stops[-1].line]
        if before_stop:
            self.samples = intervals.samples_of(before_stop[-1])
        starts = [event for event in self.log.all("run_start") if event.line < stops[0].line]
        if starts:
            # Divided in this order, as in the summarizer.
            self.minutes = (stops[0].time_ms - starts[-1].time_ms) / 60 / 1000
        else:
            self.notes.append("run_stop is before run_start, or there is no run_start")

    def _find_gpus(self) -> None:
        """Set the kind and number of GPUs.

        The sources are config.toml, otherwise systems/<system>.json of a submission, otherwise
        submission_platform, which gives only the kind.
        """
        with contextlib.suppress(KeyError):
            sizes = (self.settings["nodes"], self.settings["gpus_per_node"])
            gpu = self.settings["gpu"]
            if isinstance(gpu, str) and all(type(size) is int and size > 0 for size in sizes):
                self.gpu = gpu
                self.nodes, self.gpus_per_node = sizes
                self.gpus = self.nodes * self.gpus_per_node
                return
        # The log is <org>/results/<system>/<benchmark>/result_0.txt.
        model = ""
        system = self.path.resolve().parent.parent
        file = system.parent.parent / "systems" / f"{system.name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            description = json.loads(file.read_text(encoding="utf-8-sig"))
            nodes = int(description["number_of_nodes"])
            gpus = nodes * int(description["accelerators_per_node"])
            self.gpus = gpus if 1 <= gpus <= MAX_GPUS else None
            model = str(description["accelerator_model_name"])
        platform = str(self.log.value("submission_platform") or "")
        # An unknown name is kept unchanged.
        self.gpu = _kind_in(model or platform) or model or None

    # How it began.

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        return self.folder.name if self.path.name == ledger.LOG else self.path.name

    @property
    def start(self) -> dict:
        """The attempt's line `start` in the ledger, or {}."""
        return self.series.starts.get(self.number, {})

    @property
    def end(self) -> dict:
        """The attempt's line `end` in the ledger, or {}.

        A run has none while it is running, or if its launcher was killed.
        """
        return self.series.ends.get(self.number, {})

    @property
    def began(self) -> datetime | None:
        """Time of the first line of the log in UTC. Without a log, the start in the ledger."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
            if self.log.events:
                return datetime.fromtimestamp(self.log.events[0].time_ms / 1000, UTC)
            return datetime.fromisoformat(self.start["started"])
        return None

    @property
    def started(self) -> str:
        """Time of the start in the ledger, otherwise in the log, in the same form, or ""."""
        if self.start:
            return str(self.start.get("started", ""))
        return self.began.strftime(ledger.TIME) if self.began else ""

    @property
    def order(self) -> tuple[str, int]:
        """Key that sorts runs by their starts, also runs of several ledgers."""
        return self.series.order.get(self.number, (self.started, 0))

    @property
    def seed(self) -> int | None:
        """The seed in the ledger, otherwise that in the log."""
        seed = self.start.get("seed", self.log.value("seed"))
        return seed if type(seed) is int else None

    @property
    def continues(self) -> str:
        """Name of the run whose checkpoint this run resumed from, or ""."""
        event = self.log.first("resumed")
        return str(event.metadata.get("run", "")) if event else ""

    @cached_property
    def settings(self) -> dict:
        """The keys of config.toml, {} if it is missing or truncated."""
        with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
            return tomllib.loads(self.config)
        return {}

    @property
    def is_miniature(self) -> bool:
        return self.division == "miniature" or "miniature = true" in self.config

    @cached_property
    def rules(self) -> Rules | None:
        """The rules of the run's benchmark and division, or None if this project has none."""
        division = "miniature" if self.is_miniature else "closed"
        if self.division == OPEN:
            division = OPEN
        return benchmarks.rules_of_log(self.benchmark, division, self.folder)

    @property
    def target(self) -> float | None:
        """The loss that an evaluation must reach, or None if there is none or it is unknown."""
        if self.rules is None or not self.rules.target_loss:
            return None
        return self.rules.target_loss

    @property
    def has_target(self) -> bool:
        """Whether there is a target, or none is known. A run without one ends after max_samples."""
        return self.rules is None or bool(self.rules.target_loss)

    @property
    def machine(self) -> str:
        """Number and kind of the GPUs, such as "8 x H200", or "CPU", or "" if unknown."""
        if not self.gpu or self.gpu == "CPU":
            return self.gpu or ""
        return f"{self.gpus} x {self.gpu}" if self.gpus else self.gpu

    @property
    def engines(self) -> dict:
        """Operation -> engine, by the self-test. For SDPA, the backend of attention."""
        if self._self_test:
            return {name: self._self_test[name] for name in ENGINES if self._self_test.get(name)}
        return self.versions.get("engines", {})

    @property
    def variables(self) -> dict[str, str]:
        """Recorded environment variables. There are none in runs of earlier versions."""
        return {name: str(value) for name, value in self.versions.get("variables", {}).items()}

    @property
    def engine_choices(self) -> dict[str, dict]:
        """Operation -> fields of the self-test's EngineChoice: engine, why, ms. {} without them."""
        choices = self._self_test.get("engines")
        if not isinstance(choices, dict):
            return {}
        return {
            name: choice
            for name, choice in choices.items()
            if name in ENGINES and isinstance(choice, dict) and type(choice.get("engine")) is str
        }

    @property
    def _self_test(self) -> dict:
        """The last event of the self-test, or {}."""
        tests = [record for record in self.records if record.get("event") == "self_test"]
        return tests[-1] if tests else {}

    # Measurements.

    @cached_property
    def records(self) -> list[dict]:
        """The records of events.jsonl. Reading problems are added to `notes`."""
        try:
            records, notes = json_lines.read(self.folder / EVENTS)
        except OSError as error:
            records, notes = [], [f"{EVENTS} cannot be read: {error.strerror}"]
        self.notes += notes
        return records

    @property
    def trained(self) -> int | None:
        """Training sequences after the last optimizer step, according to the training blocks.

        If the blocks have no counts, the count at the last evaluation, or else at run_stop.
        """
        counts = [block.stop_samples or 0 for block in self.blocks]
        stop = self.log.first("run_stop")
        at_stop = intervals.samples_of(stop) if stop else None
        return max(counts, default=0) or self.samples or at_stop

    @property
    def progress(self) -> tuple[int | None, float | None]:
        """Training sequences and loss at the last step or evaluation.

        After the end, the ledger gives the sequences. Each is None if nothing gives it.
        """
        samples = self.end.get("samples")
        for event in reversed(self.records):
            if event.get("event") in ("step", "eval") and type(event.get("samples")) is int:
                loss = event.get("loss")
                samples = samples if type(samples) is int else event["samples"]
                return samples, loss if is_number(loss) else None
        return samples if type(samples) is int else None, None

    @property
    def samples_per_s(self) -> float | None:
        """Sequences per second over all training blocks, evaluations excluded."""
        return intervals.rate(self.blocks)

    @cached_property
    def padding(self) -> float:
        """Share of padding in the training sequences, which only the open division may have."""
        if self.division == OPEN:
            for record in self.records:
                if is_number(record.get("padding")):
                    return record["padding"]
        return 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all GPUs without padding, evaluations excluded."""
        rate = self.samples_per_s
        if rate is None or not self.rules:
            return None
        return rate * self.rules.sequence_length * (1 - self.padding)

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        rate = self.tokens_per_s
        return rate / self.gpus if rate is not None and self.gpus else None

    @property
    def evaluation_s(self) -> float | None:
        """Seconds of all evaluations in total, or None if the log does not time them."""
        return sum(interval.seconds for interval in self.evaluations) if self.evaluations else None

    # How it ended.

    @property
    def clock_started(self) -> bool:
        """Whether the log has a run_start."""
        return self.log.first("run_start") is not None

    @property
    def clock_started_in_ledger(self) -> bool:
        """Whether the launcher saw a run_start, which the log may have lost since then."""
        return self.end.get("clock") is True or self.end.get("exit_code") == 0

    @property
    def stands(self) -> bool:
        """Whether run_stop says that the run reached its goal, whatever fails afterwards.

        Only a failed check of the log or of the weights can take it back.
        """
        return self.status == "success"

    @property
    def has_result(self) -> bool:
        """Whether the log has a result: success, and an evaluation that reached the target."""
        timed = self.clock_started and (self.minutes or 0) > 0
        return timed and self.samples is not None and self.stands and self.reached

    @property
    def running(self) -> bool:
        """Whether the run has not ended. A result or a failure shows before the ledger's end."""
        return self.alive and not self.failure and not self.stands

    @property
    def state(self) -> str:
        """How the run ended, a key of run_states.WORDS. All commands show this state.

        A result is decided at run_stop: what the launcher records later, except for findings in the
        log, does not change it.
        """
        if self.running:
            return run_states.RUNNING
        kind = str(self.end.get("kind") or self.failure.get("kind") or "")
        if self.has_result:
            return kind if kind == run_states.UNCLEAN else run_states.GOOD
        if kind or self.start:
            return kind or run_states.LOST
        if not self.clock_started and not self.was_chosen:
            return run_states.NOT_STARTED
        return run_states.LOST if self.was_killed else run_states.MISSED

    @property
    def was_chosen(self) -> bool:
        """Whether a submitter chose the log for a result set: see docs/submission.md."""
        return self.path.name != ledger.LOG

    @property
    def was_killed(self) -> bool:
        """Whether the log of our launcher has no run_stop."""
        return not self.was_chosen and not self.log.first("run_stop")

    @property
    def state_words(self) -> str:
        return run_states.words(self.state, self.has_target)

    @property
    def cause(self) -> str:
        """Why the run ended in `state`, or what failed after run_stop, or "". One line."""
        if self.running:
            return ""
        if self.stands and not self.has_result and self.clock_started:
            return "its log claims success, but no evaluation reached the target"
        # The launcher writes failure.json before it enters the end in the ledger.
        if not self.end and self.failure.get("what"):
            return str(self.failure["what"])
        if not self.end and self.start and not self.alive:
            return run_states.NO_END
        if self.clock_started_in_ledger and not self.clock_started:
            return "its log has lost the run_start that the ledger says it had"
        return str(self.end.get("reason") or "")


def gpus_of(folder: Path | None) -> int | None:
    """Return the number of GPUs of the run whose log is in `folder`, or None if it is unknown."""
    if folder is None:
        return None
    run = RunRecord(folder / ledger.LOG)
    run.config = run._text("config.toml") or ""
    run._find_gpus()
    return run.gpus


def _kind_in(name: str) -> str:
    """Return the GPU kind in a name such as `4xXE9712x4GB200` or `NVIDIA H200-SXM5-141GB`, or "".

    Published names put letters before the kind, so the first match counts: GB200, not B200.
    """
    kinds = sorted((*KINDS, *DERIVED_SPEEDS), key=len, reverse=True)
    found = re.search(rf"({'|'.join(kinds)})(?!\d)", name, re.IGNORECASE)
    return next((kind for kind in kinds if found and kind.upper() == found[1].upper()), "")
