"""One run, read from its MLPerf log, ours or anyone's, and from what lies beside it.

What decides a score is read as the official tools read it (mlcommons/logging: result_summarizer takes the last run_start before the
first run_stop; rcp_checker the last eval_accuracy before run_stop); the rest as well as it can be: other people's logs print the
rank before the token, print every line eight times, know epochs instead of blocks, log the size of a block where others log the
count so far, or count one optimizer step short. Standard library only; mlperf-logging is asked whether it accepts the log.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from common import benchmarks
from common.benchmarks import Rules
from common.errors import ConfigError
from common.records import json_lines, mlperf_log
from common.records.json_lines import is_number
from common.records.mlperf_log import Log
from submission import intervals, official_tools, rcp
from submission.check import round_of
from submission.intervals import Interval

GPU_NAME = re.compile(r"MI3\d\dX|G[BH][23]00|[BH][123]00", re.IGNORECASE)
INTERVALS = tuple(
    f"{name}_{end}"
    for name in ("init", "run", "block", "epoch", "eval")
    for end in ("start", "stop")
)
REPEATED = frozenset(
    {*INTERVALS, "eval_accuracy", "eval_error", "submission_benchmark", "global_batch_size", "seed"}
)

# How a run ended, as docs/submission.md says it.
GOOD, FAILED, LOST, NOT_STARTED = "good", "did not converge", "lost", "never started its clock"


@dataclass(eq=False)
class Run:
    """One run, equal to itself only. Minutes are wall time from run_start to run_stop; samples are training sequences."""

    path: Path  # of its log
    log: Log = field(
        default_factory=Log
    )  # all records of the keys in REPEATED, the first one of any other
    number: int = 0  # in its series, from 1
    start: dict = field(default_factory=dict)  # the ledger's line, if the run is an attempt in one
    end: dict = field(
        default_factory=dict
    )  # the same; empty while it runs, or if its launcher was killed
    ruleset: str = ""
    benchmark: str = ""
    org: str = ""
    division: str = ""
    batch: int | None = None
    status: str = ""  # success, aborted, or "" without a run_stop; what the log claims
    minutes: float | None = None
    reached: bool = False  # an evaluation was at the target or below
    samples: int | None = None  # at the last evaluation, as logged; what the RCP test counts
    blocks: list[Interval] = field(default_factory=list)  # training only
    evaluations: list[Interval] = field(default_factory=list)
    gpu: str | None = None  # H200
    gpus: int | None = None  # in all nodes
    nodes: int = 0  # as our config says; 0 without one
    gpus_per_node: int = 0
    notes: list[str] = field(default_factory=list)  # what was odd
    # What a run of ours left beside its log; each may be missing, or cut off.
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
        """The rules of its benchmark and division; None if no benchmark here has them."""
        if self.benchmark not in benchmarks.names():
            return None
        return benchmarks.divisions(self.benchmark).get(
            "miniature" if self.is_miniature else "closed"
        )

    @property
    def target(self) -> float | None:
        return self.rules.target_loss if self.rules else None

    @property
    def point(self) -> rcp.Point | None:
        """The reference convergence point of its batch; None for a miniature, and where there is none."""
        known = (
            not self.is_miniature
            and self.benchmark in benchmarks.names()
            and self.batch is not None
        )
        return rcp.point_at(self.benchmark, self.batch, self.ruleset) if known else None  # type: ignore[arg-type]

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """Why the official compliance checker refuses the log; it has nothing to say about a miniature."""
        return (
            ()
            if self.is_miniature
            else official_tools.closed_verdict(self.path, self.ruleset).messages
        )

    @cached_property
    def state(self) -> str:
        """GOOD, FAILED, LOST or NOT_STARTED, by the log: the ledger knows only what its launcher lived to see."""
        if not self.log.events and (not self.end or self.end.get("kind") == "lost") and self.start:
            return LOST  # no log, and nobody who says that it never got so far
        if not self.log.first("run_start"):
            return NOT_STARTED
        if not self.log.first("run_stop"):
            return (
                LOST if self.path.name == "result.txt" else FAILED
            )  # chosen by its submitter: docs/submission.md
        claims = (
            self.status == "success"
            and self.reached
            and self.samples is not None
            and (self.minutes or 0) > 0
        )
        return GOOD if claims and not self.refused else FAILED

    @property
    def converged(self) -> bool:
        return self.state == GOOD

    @property
    def trained(self) -> int | None:
        """Training sequences by the blocks, after the last optimizer step; as logged where no block says it."""
        return max((block.stop_samples or 0 for block in self.blocks), default=0) or self.samples

    @property
    def z(self) -> float | None:
        """Distance of its samples from the reference's mean, in the reference's standard deviations."""
        return self.point.z_score(self.samples) if self.point and self.samples else None

    @property
    def samples_per_s(self) -> float | None:
        """Over all training blocks, evaluation excluded."""
        return intervals.rate(self.blocks)

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        rate = self.samples_per_s
        return (
            None
            if rate is None or not self.gpus or not self.rules
            else rate * self.rules.sequence_length / self.gpus
        )

    @property
    def evaluation_s(self) -> float | None:
        """All evaluations together; None if the log does not time them."""
        return sum(interval.seconds for interval in self.evaluations) if self.evaluations else None

    def describe(self) -> str:
        result = (
            f"{self.minutes:.2f} min, {self.samples:,} samples"
            if self.state == GOOD
            else self.reason
        )
        return f"attempt {self.number:>2}  {self.state}{', ' if result else ''}{result}"

    @property
    def reason(self) -> str:
        """Why it is not good, in one line; "" if there is nothing to add."""
        if self.state == FAILED and self.status == "success":
            refused = self.refused[:1]
            return (
                f"the official checker refuses its log: {refused[0]}"
                if refused
                else "its log claims success and does not show it"
            )
        return str(
            self.end.get("reason")
            or ("" if self.end or not self.start else "its launcher left no end of it")
        )

    @cached_property
    def records(self) -> list[dict]:
        """The lines of events.jsonl."""
        records, notes = json_lines.read(self.folder / "events.jsonl")
        self.notes += notes
        return records


# --- one log ----------------------------------------------------------------------------------------------------------


def read_run(path: Path, ruleset: str = "") -> Run:
    """The run in the log at `path`. Raises ConfigError if that is no MLPerf log of one of our benchmarks."""
    run = _filled(Run(path, mlperf_log.read(path, REPEATED), ruleset=ruleset))
    if run.benchmark not in benchmarks.names():
        what = f"{path} is no log of {' or '.join(benchmarks.names())}"
        raise ConfigError(
            what,
            f"its submission_benchmark is {run.benchmark or 'missing'}",
            "name MLPerf result logs",
        )
    return run


def read_attempt(
    path: Path, number: int = 0, start: dict | None = None, end: dict | None = None
) -> Run:
    """The same for an attempt of ours, whose log may be missing, empty or cut off: that is a note then."""
    run = Run(path, number=number, start=start or {}, end=end or {})
    try:
        run.log = mlperf_log.read(path, REPEATED)
    except ConfigError as error:
        run.notes.append(error.what)
    return _filled(run)


def _filled(run: Run) -> Run:
    config, batch = run.folder / "config.toml", run.log.last("global_batch_size")
    run.config = config.read_text(errors="replace") if config.is_file() else ""
    run.versions = _object(run, "versions.json")
    run.failure = _object(run, "failure.json")
    if not isinstance(run.versions.get("packages", {}), dict):
        run.notes.append("versions.json: packages is no object")
        run.versions["packages"] = {}
    run.ruleset = run.ruleset or round_of(run.log, ours=False)
    run.benchmark = str(run.log.last("submission_benchmark") or "")
    run.org, run.division = (
        str(run.log.value(f"submission_{part}") or "") for part in ("org", "division")
    )
    run.batch = int(batch) if is_number(batch) and batch >= 1 else None
    run.notes += [f"line {bad.line}: {bad.reason}" for bad in run.log.bad[:3]]
    _read_result(run)
    run.evaluations = intervals.pairs(run.log.events, "eval", run.batch or 1)
    run.blocks = intervals.training(run.log.events, run.evaluations)
    if run.blocks and run.samples is not None and run.trained != run.samples:
        run.notes.append(
            f"the last evaluation is logged at {run.samples:,} sequences, the blocks end at {run.trained:,}"
        )
    _find_gpus(run)
    return run


def _object(run: Run, name: str) -> dict:
    path = run.folder / name
    if not path.exists() and not path.is_symlink():
        return {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(errors="replace")) if path.is_file() else None
        if isinstance(value, dict):
            return value
    run.notes.append(f"{name} is cut off or spoilt")
    return {}


def _read_result(run: Run) -> None:
    """Minutes, samples, and whether the target was reached."""
    evaluated = [event for event in run.log.events if event.key in ("eval_accuracy", "eval_error")]
    run.reached = any(
        is_number(e.value) and run.target is not None and 0 < e.value <= run.target
        for e in evaluated
    )
    stops = run.log.all("run_stop")
    run.status = str(stops[-1].metadata.get("status", "")) if stops else ""
    if counted := [event for event in evaluated if not stops or event.line < stops[-1].line]:
        run.samples = intervals.samples_of(counted[-1])
    if stops and (
        started := [event for event in run.log.all("run_start") if event.line < stops[0].line]
    ):
        run.minutes = (
            (stops[0].time_ms - started[-1].time_ms) / 60 / 1000
        )  # in this order, as the summarizer does
    if run.log.events and not stops:
        run.notes.append("no run_stop: it was cut short")
    elif stops and run.minutes is None:
        run.notes.append("run_stop stands before run_start, or there is no run_start")


# --- the machine ------------------------------------------------------------------------------------------------------


def _find_gpus(run: Run) -> None:
    """Kind and number of GPUs: from our config.toml beside the log, a submission's systems/<system>.json, or the platform's name."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        config = tomllib.loads(run.config)
        run.gpu, run.nodes, run.gpus_per_node = (
            config["gpu"],
            config["nodes"],
            config["gpus_per_node"],
        )
        run.gpus = run.nodes * run.gpus_per_node
        return
    model, system = (
        "",
        run.path.resolve().parent.parent,
    )  # <org>/results/<system>/<benchmark>/result_0.txt
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        text = json.loads(
            (system.parent.parent / "systems" / f"{system.name}.json").read_text(
                encoding="utf-8-sig"
            )
        )
        run.gpus = int(text["number_of_nodes"]) * int(text["accelerators_per_node"])
        model = str(text["accelerator_model_name"])
    named = GPU_NAME.search(model or str(run.log.value("submission_platform") or ""))
    run.gpu = (
        named[0].upper() if named else model or None
    )  # `NVIDIA H200-SXM5-141GB` -> H200; an unknown name stays as it is
