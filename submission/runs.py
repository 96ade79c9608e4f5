"""Runs read from MLPerf result logs, ours or anyone's: minutes, sequences to the target, time in training and in evaluation.

Other people's logs print the rank before the token, print every line eight times, know epochs instead of blocks, or count one
optimizer step short. What decides a score is read as the official tools read it (mlcommons/logging: result_summarizer takes the
last run_start before the first run_stop; rcp_checker the last eval_accuracy before run_stop); the rest as well as it can be.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.training.mllog import TOKEN
from llama2_70b_lora import rules as llama2_70b_lora_rules
from llama31_8b import rules as llama31_8b_rules

CLOSED = {rules.BENCHMARK: rules.CLOSED for rules in (llama31_8b_rules, llama2_70b_lora_rules)}
MINIATURE = {rules.BENCHMARK: rules.MINIATURE for rules in (llama31_8b_rules, llama2_70b_lora_rules)}
LEDGER = "attempts.jsonl"
GPU_NAME = re.compile(r"MI3\d\dX|GB[23]00|[BH][123]00", re.IGNORECASE)


@dataclass(frozen=True)
class Interval:
    """From a start line to its stop line."""

    start_ms: int
    stop_ms: int
    start_samples: int | None
    stop_samples: int | None

    @property
    def seconds(self) -> float:
        return (self.stop_ms - self.start_ms) / 1000

    @property
    def samples(self) -> int:
        return (self.stop_samples or 0) - (self.start_samples or 0)


@dataclass
class Run:
    """One run. Minutes are wall time from run_start to run_stop; samples are training sequences."""

    path: Path
    benchmark: str = ""
    division: str = ""
    batch: int | None = None
    started: bool = False  # its clock
    status: str = ""  # of the last run_stop: success, aborted, or none
    minutes: float | None = None
    converged: bool = False
    samples: int | None = None  # at the last evaluation, as logged; what the RCP test counts
    loss: float | None = None  # there
    blocks: list[Interval] = field(default_factory=list)  # training only
    evaluations: list[Interval] = field(default_factory=list)
    gpu: str | None = None  # H200
    gpus: int | None = None
    notes: list[str] = field(default_factory=list)  # what was odd

    @property
    def name(self) -> str:
        return self.path.parent.name if self.path.name == "result.txt" else self.path.name

    @property
    def trained(self) -> int | None:
        """Training sequences by the blocks, after the last optimizer step; as logged where no block says it."""
        return max((block.stop_samples or 0 for block in self.blocks), default=0) or self.samples

    @property
    def samples_per_s(self) -> float | None:
        """Over all training blocks, evaluation excluded."""
        return _rate(self.blocks)

    @property
    def evaluation_s(self) -> float | None:
        """All evaluations together; None if the log does not time them."""
        return sum(interval.seconds for interval in self.evaluations) if self.evaluations else None


def steady_samples_per_s(runs: Iterable[Run]) -> float | None:
    """Sequences per second without each run's first block, which starts cold; with it where there is no other."""
    steady = [run.blocks[1:] or run.blocks for run in runs]
    return _rate([block for blocks in steady for block in blocks])


def _rate(blocks: list[Interval]) -> float | None:
    seconds, samples = sum(block.seconds for block in blocks), sum(block.samples for block in blocks)
    return samples / seconds if seconds > 0 and samples > 0 else None


# --- one log ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Event:
    key: str
    time_ms: int
    value: object
    metadata: dict

    @property
    def samples(self) -> int | None:
        for key in ("samples_count", "epoch_num"):  # both benchmarks give sequences under either name
            count = self.metadata.get(key)
            if isinstance(count, int | float) and not isinstance(count, bool):
                return round(count)
        return None


def read_run(path: Path) -> Run:
    """The run in the log at `path`. Raises ConfigError if that is no MLPerf log of one of our benchmarks."""
    run = Run(path)
    events = list(_events(path, run))
    values = {event.key: event.value for event in events}  # the last of each key, as the RCP checker takes it
    run.benchmark, run.division = str(values.get("submission_benchmark", "")), str(values.get("submission_division", ""))
    if run.benchmark not in CLOSED:
        what = f"{path} is no log of {' or '.join(CLOSED)}"
        raise ConfigError(what, f"its submission_benchmark is {run.benchmark or 'missing'}", "name MLPerf result logs")
    batch = values.get("global_batch_size")
    run.batch = int(batch) if isinstance(batch, int | float) and batch >= 1 else None
    _read_result(run, events)
    blocks = "block" if "block_start" in values else "epoch"
    run.evaluations = _intervals(events, "eval", run.batch or 1)
    run.blocks = [_without(block, run.evaluations) for block in _intervals(events, blocks, 0)]
    if run.blocks and run.samples is not None and run.trained != run.samples:
        run.notes.append(f"the last evaluation is logged at {run.samples:,} sequences, the blocks end at {run.trained:,}")
    _find_gpus(run, values)
    return run


def _events(path: Path, run: Run) -> Iterable[_Event]:
    try:
        text = path.read_bytes().decode("latin-1")  # as the official parser reads
    except OSError as error:
        raise ConfigError(f"cannot read {path}", error.strerror or str(error), "name MLPerf result logs") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if ":::SYSJSON {" in line and run.gpu is None:
            _take_system(run, line.partition(":::SYSJSON ")[2].strip(" '"))
        if TOKEN not in line:
            continue
        try:
            record = json.loads(line.rpartition(TOKEN)[2])
            yield _Event(record["key"], int(record["time_ms"]), record.get("value"), record.get("metadata") or {})
        except (ValueError, KeyError, TypeError):
            run.notes.append(f"line {number} is not one event and nothing else: the official checker refuses the log")


def _read_result(run: Run, events: list[_Event]) -> None:
    """Minutes, samples, loss, and whether the target was reached."""
    start_ms, stopped, last, counted = None, None, None, None
    reached = False
    target = (MINIATURE if run.division == "miniature" else CLOSED)[run.benchmark].target_loss
    for event in events:
        if event.key == "run_start":
            start_ms = event.time_ms
        elif event.key in ("eval_accuracy", "eval_error"):
            last = event
            reached |= isinstance(event.value, int | float) and 0 < event.value <= target
        elif event.key == "run_stop":
            if stopped is None and start_ms is not None:
                run.minutes = (event.time_ms - start_ms) / 60 / 1000  # in this order, as the summarizer does
            stopped, counted = event, last
    run.started, run.status = start_ms is not None, str(stopped.metadata.get("status", "")) if stopped else ""
    counted = counted if stopped else last
    if counted:
        run.samples, run.loss = counted.samples, counted.value if isinstance(counted.value, int | float) else None
    success = run.status == "success"
    run.converged = success and reached and run.samples is not None and run.minutes is not None
    if stopped is None:
        run.notes.append("no run_stop: it was cut short")
    elif success and not reached:
        run.notes.append(f"says success, but no evaluation is at {target} or below: the compliance checker refuses it")


def _intervals(events: list[_Event], name: str, batch: int) -> list[Interval]:
    """Pairs of <name>_start and <name>_stop. Eight ranks may log each line, some of them late: what falls behind is left out.

    `batch` 0: training intervals, which end beyond where they start; else evaluations, which may end up to one batch before.
    """
    found: list[Interval] = []
    opened: _Event | None = None
    for event in events:
        samples = event.samples
        if event.key == f"{name}_start" and opened is None:
            done = found[-1].stop_samples if found else None
            late = None not in (samples, done) and (samples < done if batch == 0 else samples <= done)  # type: ignore[operator]
            opened = None if late else event
        elif event.key == f"{name}_stop" and opened is not None:
            late = None not in (samples, opened.samples) and samples <= opened.samples - batch  # type: ignore[operator]
            if not late and event.time_ms >= opened.time_ms:
                found.append(Interval(opened.time_ms, event.time_ms, opened.samples, samples))
                opened = None
    return found


def _without(block: Interval, evaluations: list[Interval]) -> Interval:
    """`block` less the evaluations in it: some log one epoch around everything."""
    inside = sum(e.stop_ms - e.start_ms for e in evaluations if block.start_ms <= e.start_ms and e.stop_ms <= block.stop_ms)
    return Interval(block.start_ms, block.stop_ms - inside, block.start_samples, block.stop_samples)


# --- the machine ------------------------------------------------------------------------------------------------------


def _find_gpus(run: Run, values: dict) -> None:
    """Kind and number of GPUs: from our config.toml beside the log, a system description in or near it, or the platform's name."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = tomllib.loads((run.path.parent / "config.toml").read_text())
        run.gpu, run.gpus = config["gpu"], config["nodes"] * config["gpus_per_node"]
    if run.gpu is None:  # <org>/results/<system>/<benchmark>/result_0.txt and <org>/systems/<system>.json
        system = run.path.resolve().parent.parent
        with contextlib.suppress(OSError):
            _take_system(run, (system.parent.parent / "systems" / f"{system.name}.json").read_text())
    if run.gpu is None and (named := GPU_NAME.search(str(values.get("submission_platform", "")))):
        run.gpu = named[0].upper()


def _take_system(run: Run, text: str) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        system = json.loads(text)
        run.gpus = int(system["number_of_nodes"]) * int(system["accelerators_per_node"])
        named = GPU_NAME.search(system["accelerator_model_name"])
        run.gpu = named[0].upper() if named else None


# --- many logs --------------------------------------------------------------------------------------------------------


def read_runs(paths: list[Path], series: str | None = None) -> tuple[list[Run], list[str]]:
    """The runs at `paths` in the order they ran in, and what was left out and why.

    A path is a log, a folder of result_*.txt as in a submission, the directory of one of our runs, or our LOGDIR/<benchmark>, where
    the ledger says what counts: of `series` (an id or how it begins), or of the newest series of more than one run. Raises ConfigError.
    """
    runs: list[Run] = []
    notes: list[str] = []
    for path in paths:
        runs += [read_run(path)] if path.is_file() else _runs_in(path, series, notes)
    if not runs:
        raise ConfigError("there is no run to score", "; ".join(notes), "let at least one run finish")
    for what in ("benchmark", "division", "batch", "gpu", "gpus"):
        if len(found := {getattr(run, what) for run in runs}) > 1:
            why = "the runs of a series are of one benchmark, one global batch and one system"
            raise ConfigError(f"the logs differ in {what}: {', '.join(map(str, found))}", why, "name the logs of one series")
    if runs[0].batch is None:
        raise ConfigError(f"{runs[0].path} has no global_batch_size", "the RCP test goes by it", "name complete logs")
    return runs, notes


def _runs_in(folder: Path, series: str | None, notes: list[str]) -> list[Run]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such file or directory", "there is nothing to score", "name logs or a directory that has some")
    if results := sorted(folder.glob("result_*.txt"), key=_number):
        return [read_run(path) for path in results]
    if (folder / "result.txt").is_file():
        return [read_run(folder / "result.txt")]
    if (folder / LEDGER).is_file() and (attempts := _attempts(folder / LEDGER, series, notes)):
        return [run for attempt in attempts if (run := _attempted(folder, attempt, notes))]
    if results := sorted(folder.glob("*/result.txt")):  # run directories begin with the date
        notes.append(f"{folder} has no ledger: all runs in it, in the order of their names")
        return [read_run(path) for path in results]
    inside = ", ".join(path.name for path in sorted(folder.iterdir()) if path.is_dir()) or "nothing"
    raise ConfigError(f"{folder} has no logs", f"there is {inside} in it", "name LOGDIR/<benchmark>, a run, or a folder of result_*.txt")


def _number(path: Path) -> tuple[int, str]:
    digits = re.search(r"\d+", path.stem)
    return int(digits[0]) if digits else 0, path.name


def _attempts(ledger: Path, series: str | None, notes: list[str]) -> list[dict]:
    """The attempts of a series that ended, in their order."""
    lines = []
    for text in ledger.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    lines = [line for line in lines if isinstance(line, dict)]
    many = [line["series"] for line in lines if line.get("event") == "series" and line.get("goal", 0) > 1]
    chosen = series or (many[-1] if many else "")
    ended = [line for line in lines if line.get("event") == "end" and str(line.get("series")).startswith(chosen)]
    if series and not ended:
        raise ConfigError(f"{ledger} has no runs of series {series}", f"its series: {', '.join(many) or 'none'}", "name one of those")
    if chosen:
        notes.append(f"series {chosen} of {ledger}")
    return ended


def _attempted(folder: Path, attempt: dict, notes: list[str]) -> Run | None:
    """The run of a line of the ledger, if it counts: it is good, or it ended properly without reaching the target."""
    run = Run(folder / str(attempt["run"]) / "result.txt")
    with contextlib.suppress(ConfigError):  # died before it said what it is
        run = read_run(run.path)
    if attempt["exit_code"] == 0 or run.status == "aborted":
        return run
    note = f"left out, as it is no run to score: {attempt['run']}, {attempt.get('kind')}, {attempt.get('reason')}"
    if run.started:
        note += "; its clock had started, so that ten runs on both sides of it are not consecutive, and not for submission"
    notes.append(note)
    return None
