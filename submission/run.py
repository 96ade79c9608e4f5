"""A run, read from the MLPerf log of any submitter and from the files in the same directory.

Values that decide a score are read as the official tools of mlcommons/logging read them. Minutes
begin at the last run_start before the first run_stop (result_summarizer). Samples are those of the
last eval_accuracy before run_stop (rcp_checker).

Other values are read as far as possible. The logs of other submitters may

- have the rank before the token, or contain every line eight times
- have epochs instead of blocks
- give the size of a block where others give the number of samples so far
- count one optimizer step too few

Standard library only, except for mlperf-logging, which decides whether a log is accepted.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from common import benchmarks
from common.benchmarks import OPEN, Rules
from common.errors import ConfigError
from common.gpu_kinds import DERIVED_SPEEDS, KINDS
from common.records import json_lines, ledger, mlperf_log, run_states
from common.records.json_lines import is_number
from common.records.mlperf_log import Log
from submission import compliance_checker, intervals, rcp, rounds
from submission.intervals import Interval

INTERVALS = tuple(
    f"{name}_{end}"
    for name in ("init", "run", "block", "epoch", "eval")
    for end in ("start", "stop")
)
# Keys of which all records are read. Of other keys, only the first record is read.
REPEATED = frozenset(
    {*INTERVALS, "eval_accuracy", "eval_error", "submission_benchmark", "global_batch_size", "seed"}
)

# More GPUs than any system has: a larger number in a description is an error.
MAX_GPUS = 1_000_000

# How a run counts for a score, as docs/submission.md names it.
GOOD = "good"
FAILED = "did not converge"
LOST = "lost"
NOT_STARTED = run_states.WORDS[run_states.NOT_STARTED]


@dataclass(eq=False)
class Run:
    """One run. Two runs are equal only if they are the same object."""

    path: Path  # of the log
    # All records of the keys in REPEATED, and the first record of each other key.
    log: Log = field(default_factory=Log)
    number: int = 0  # number of the attempt in its series, from 1
    # The attempt's lines in the ledger, or {}. A run has no end while it is running, or if its
    # launcher was killed.
    start: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)
    alive: bool = False  # whether its launcher is alive and has yet to enter its end in the ledger
    shown_round: str = ""  # the newest round that the log shows (submission/rounds.py)
    ruleset: str = ""  # for its log; in a series, that of all logs
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
    # Files in the directory of one of our runs. Each may be missing or truncated.
    config: str = ""
    versions: dict = field(default_factory=dict)
    failure: dict = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        return self.folder.name if self.path.name == "result.txt" else self.path.name

    @property
    def is_miniature(self) -> bool:
        return self.division == "miniature" or "miniature = true" in self.config

    @property
    def rules(self) -> Rules | None:
        """The rules of the run's benchmark and division, or None if this project has none."""
        if self.division == OPEN:
            return benchmarks.rules_of_log(str(self.benchmark), OPEN, self.folder)
        if self.benchmark not in benchmarks.names():
            return None
        division = "miniature" if self.is_miniature else "closed"
        return benchmarks.divisions(self.benchmark).get(division)

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
    def point(self) -> rcp.ReferencePoint | None:
        """The reference convergence point at the run's global batch.

        None for a miniature, for the open division, and if there is no point at that batch.
        """
        if self.is_miniature or self.division == OPEN or self.batch is None:
            return None
        if self.benchmark not in benchmarks.names():
            return None
        return rcp.point_at(self.benchmark, self.batch, self.ruleset)

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """Reasons why the official compliance checker refuses the log.

        Empty for a log without official rules: that of a miniature, or of no MLPerf benchmark.
        """
        unofficial = self.division == OPEN and self.benchmark == benchmarks.open_benchmark()
        if self.is_miniature or unofficial:
            return ()
        return compliance_checker.closed_verdict(self.path, self.ruleset).messages

    @property
    def running(self) -> bool:
        """Whether the run has not ended.

        The launcher writes the page of a run before it enters the end in the ledger.
        """
        return self.alive and not self.failure and self.status != "success"

    @property
    def _has_result(self) -> bool:
        """Whether the log has a result: success, and an evaluation that reached the target."""
        timed = self.log.first("run_start") and (self.minutes or 0) > 0
        measured = timed and self.samples is not None
        return bool(measured and self.status == "success" and self.reached)

    @property
    def state(self) -> str:
        """How the run ended, a key of run_states.WORDS. All commands show this state.

        A result is decided at run_stop: what the launcher records later, except for findings in the
        log, does not change it. The official checker is asked only about a log without a ledger,
        because the launcher has asked it about the others.
        """
        if self.running:
            return run_states.RUNNING
        kind = str(self.end.get("kind") or self.failure.get("kind") or "")
        if self._has_result:
            refused = not kind and not self.start and self.refused
            return run_states.UNCLEAN if refused or kind == run_states.UNCLEAN else run_states.GOOD
        if kind or self.start:
            return kind or run_states.LOST
        states = {LOST: run_states.LOST, NOT_STARTED: run_states.NOT_STARTED}
        return states.get(self.counts_as, run_states.MISSED)

    @property
    def state_words(self) -> str:
        return run_states.words(self.state, self.has_target)

    @cached_property
    def counts_as(self) -> str:
        """How the run counts for a score: GOOD, FAILED, LOST or NOT_STARTED.

        The log decides, because the ledger has no end of a run whose launcher was killed.
        """
        if not self.log.first("run_start"):
            lost_in_ledger = not self.end or self.end.get("kind") == run_states.LOST
            if self.start and lost_in_ledger and not self.log.events:
                return LOST  # nothing says that its clock never started
            return LOST if self._clock_started_in_ledger else NOT_STARTED
        if not self.log.first("run_stop"):
            # A log of another name was chosen by its submitter: see docs/submission.md.
            return LOST if self.path.name == "result.txt" else FAILED
        return GOOD if self._has_result and not self.refused else FAILED

    @property
    def _clock_started_in_ledger(self) -> bool:
        """Whether the launcher saw a run_start, which the log may have lost since then."""
        return self.end.get("clock") is True or self.end.get("exit_code") == 0

    @property
    def began(self) -> datetime | None:
        """Time of the first line of the log in UTC. Without a log, the start in the ledger."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
            if self.log.events:
                return datetime.fromtimestamp(self.log.events[0].time_ms / 1000, UTC)
            return datetime.fromisoformat(self.start["started"])
        return None

    @property
    def machine(self) -> str:
        """Number and kind of the GPUs, such as "8 x H200", or "CPU", or "" if unknown."""
        if not self.gpu or self.gpu == "CPU":
            return self.gpu or ""
        return f"{self.gpus} x {self.gpu}" if self.gpus else self.gpu

    @property
    def outcome(self) -> str:
        """The words of `state`, and how the run counts for a score where they do not tell it."""
        text = self.state_words
        good = self.state == run_states.GOOD and not self.converged
        not_started = self.counts_as == NOT_STARTED and not self.running
        if text != self.counts_as and (good or not_started):
            text += f"; for the score: {self.counts_as}"
        return text

    @property
    def converged(self) -> bool:
        return self.counts_as == GOOD

    @property
    def trained(self) -> int | None:
        """Training sequences after the last optimizer step, according to the training blocks.

        If the blocks have no counts, the count at the last evaluation.
        """
        counts = [block.stop_samples or 0 for block in self.blocks]
        return max(counts, default=0) or self.samples

    @property
    def z(self) -> float | None:
        """Distance of `samples` from the reference mean, in standard deviations (`z_score`)."""
        return self.point.z_score(self.samples) if self.point and self.samples else None

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

    def describe(self) -> str:
        """Return one line about the run: number, outcome, and its result or why it is not good."""
        result = self.reason
        if self.converged:
            result = f"{self.minutes:.2f} min, {self.samples:,} samples"
        line = f"attempt {self.number:>2}  {self.outcome}"
        return f"{line}, {result}" if result else line

    @property
    def reason(self) -> str:
        """Why the run does not count as good, or what failed after run_stop, or "". One line."""
        if self._has_result and not self.running and self.refused:
            return f"the official checker refuses its log: {self.refused[0]}"
        return self.cause

    @property
    def cause(self) -> str:
        """Why the run ended in `state`, or what failed after run_stop, or "". One line.

        In contrast to `reason`, the official checker is not asked.
        """
        if self.running:
            return ""
        if self.status == "success" and not self._has_result and self.log.first("run_start"):
            return "its log claims success, but no evaluation reached the target"
        # The launcher writes the page between failure.json and the entry in the ledger.
        if not self.end and self.failure.get("what"):
            return str(self.failure["what"])
        if not self.end and self.start:
            return run_states.NO_END
        if self._clock_started_in_ledger and not self.log.first("run_start"):
            return "its log has lost the run_start that the ledger says it had"
        return str(self.end.get("reason") or "")

    @cached_property
    def records(self) -> list[dict]:
        """The records of events.jsonl. Reading problems are added to `notes`."""
        records, notes = json_lines.read(self.folder / "events.jsonl")
        self.notes += notes
        return records


# Reading a log.


def read_run(path: Path) -> Run:
    """Return the run in the log at `path`.

    Raises ConfigError if it is not an MLPerf log of one of our benchmarks.
    """
    run = _filled(Run(path, mlperf_log.read(path, REPEATED)))
    if run.benchmark not in benchmarks.names():
        raise ConfigError(
            f"{path} is not a log of {' or '.join(benchmarks.names())}",
            f"its submission_benchmark is {run.benchmark or 'missing'}",
            "name MLPerf result logs",
        )
    return run


def read_attempt(
    path: Path,
    number: int = 0,
    start: dict | None = None,
    end: dict | None = None,
    alive: bool = False,
) -> Run:
    """Return the run in the log at `path`, which is an attempt of our launcher.

    If the log is missing, empty or truncated, a note of the run says so. `number`, `start` and
    `end`: the attempt's number and its lines in the ledger. `alive`: whether its launcher is alive.
    """
    alive = alive and not end
    run = Run(path, number=number, start=start or {}, end=end or {}, alive=alive)
    try:
        run.log = mlperf_log.read(path, REPEATED)
    except ConfigError as error:
        run.notes.append(error.what)
    return _filled(run)


def read_attempts(folder: Path, record: ledger.SeriesRecord) -> list[Run]:
    """Return the attempts of the series `record` of the ledger in `folder`, in their order."""
    alive = bool(record.open_starts) and ledger.launcher_is_alive(folder, record.id)
    runs = []
    for number, start in sorted(record.starts.items()):
        path = folder / start["run"] / ledger.LOG
        runs.append(read_attempt(path, number, start, record.ends.get(number), alive))
    return runs


def _filled(run: Run) -> Run:
    """Fill in the fields of `run` from its log and the other files of its directory; return it."""
    config = run.folder / "config.toml"
    batch = run.log.last("global_batch_size")
    run.config = config.read_text(errors="replace") if config.is_file() else ""
    run.versions = _object(run, "versions.json")
    run.failure = _object(run, "failure.json")
    if not isinstance(run.versions.get("packages", {}), dict):
        run.notes.append("versions.json: packages is not an object")
        run.versions["packages"] = {}
    run.shown_round = rounds.round_of(run.log)
    run.ruleset = rounds.ruleset_of([run.shown_round])
    run.benchmark = str(run.log.last("submission_benchmark") or "")
    run.org = str(run.log.value("submission_org") or "")
    run.division = str(run.log.value("submission_division") or "")
    run.batch = int(batch) if is_number(batch) and batch >= 1 else None
    run.notes += [f"line {bad.line}: {bad.reason}" for bad in run.log.bad[:3]]
    _read_result(run)
    run.evaluations = intervals.pairs(run.log.events, "eval", run.batch or 1)
    run.blocks = intervals.training(run.log.events, run.evaluations)
    if run.blocks and run.samples is not None and run.trained != run.samples:
        run.notes.append(
            f"the last evaluation is logged at {run.samples:,} sequences,"
            f" the blocks end at {run.trained:,}"
        )
    _find_gpus(run)
    return run


def _object(run: Run, name: str) -> dict:
    """Return the JSON object in the file `name` of the run's directory, {} if it has none.

    If the file is not a JSON object, return {} and add a note.
    """
    path = run.folder / name
    if not path.exists() and not path.is_symlink():
        return {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(errors="replace")) if path.is_file() else None
        if isinstance(value, dict):
            return value
    run.notes.append(f"{name} is truncated or damaged")
    return {}


def _read_result(run: Run) -> None:
    """Set the status, minutes and samples of `run`, and whether it reached the target."""
    evaluated = [event for event in run.log.events if event.key in ("eval_accuracy", "eval_error")]
    if run.rules is not None:
        target = run.target or math.inf
        for event in evaluated:
            if is_number(event.value) and 0 < event.value <= target:
                run.reached = True
    stops = run.log.all("run_stop")
    if not stops:
        minutes = run.end.get("minutes")
        run.minutes = minutes if is_number(minutes) else None
        if evaluated:
            run.samples = intervals.samples_of(evaluated[-1])
        if run.log.events:
            run.notes.append("no run_stop: the run did not end")
        return
    run.status = str(stops[-1].metadata.get("status", ""))
    before_stop = [event for event in evaluated if event.line < stops[-1].line]
    if before_stop:
        run.samples = intervals.samples_of(before_stop[-1])
    starts = [event for event in run.log.all("run_start") if event.line < stops[0].line]
    if starts:
        # Divided in this order, as in the summarizer.
        run.minutes = (stops[0].time_ms - starts[-1].time_ms) / 60 / 1000
    else:
        run.notes.append("run_stop is before run_start, or there is no run_start")


# Finding the machine.


def _find_gpus(run: Run) -> None:
    """Set the kind and number of GPUs of `run`.

    The sources are config.toml in the run's directory, otherwise systems/<system>.json of a
    submission, otherwise submission_platform, which gives only the kind.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        config = tomllib.loads(run.config)
        sizes = (config["nodes"], config["gpus_per_node"])
        if isinstance(config["gpu"], str) and all(type(size) is int and size > 0 for size in sizes):
            run.gpu = config["gpu"]
            run.nodes, run.gpus_per_node = sizes
            run.gpus = run.nodes * run.gpus_per_node
            return
    # The log is <org>/results/<system>/<benchmark>/result_0.txt.
    model = ""
    system = run.path.resolve().parent.parent
    file = system.parent.parent / "systems" / f"{system.name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        description = json.loads(file.read_text(encoding="utf-8-sig"))
        nodes = int(description["number_of_nodes"])
        gpus = nodes * int(description["accelerators_per_node"])
        run.gpus = gpus if 1 <= gpus <= MAX_GPUS else None
        model = str(description["accelerator_model_name"])
    platform = str(run.log.value("submission_platform") or "")
    # An unknown name is kept unchanged.
    run.gpu = _kind_in(model or platform) or model or None


def _kind_in(name: str) -> str:
    """Return the GPU kind in a name such as `4xXE9712x4GB200` or `NVIDIA H200-SXM5-141GB`, or "".

    Published names put letters before the kind, so the first match counts: GB200, not B200.
    """
    kinds = sorted((*KINDS, *DERIVED_SPEEDS), key=len, reverse=True)
    found = re.search(rf"({'|'.join(kinds)})(?!\d)", name, re.IGNORECASE)
    return next((kind for kind in kinds if found and kind.upper() == found[1].upper()), "")
