"""Invented series and system description for `package --rehearse`.

A rehearsal makes a submission from invented logs of the closed division and runs the official tools
on it. This tests every step except the runs, before a series is started. The attempts have the
outcomes and the seeds of a given series, such as one of miniatures, or are ten good runs.

Nobody can submit the result. The names of the organization and of the system begin with MARK. Every
log has the record REHEARSAL_KEY, which `check` and `package` refuse. The submission has the file
NOTICE. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common import benchmarks, engines
from common import config as configs
from common.benchmarks import LogValue, Rules
from common.errors import ConfigError
from common.gpu_kinds import KINDS
from common.machine.hardware import config_path
from common.packages import version_of
from common.records import ledger
from common.records.rcp import SUBMISSION_RUNS, mean_samples
from common.training.log_keys import hyperparameters
from common.training.mllog import RunLog
from common.variables import Use, select
from submission import describe
from submission.log_rules import REHEARSAL_KEY
from submission.prerequisites import MARK
from submission.run import FAILED, GOOD, LOST, NOT_STARTED, Run
from submission.series import Series, started_runs

NOTICE = "NOT_A_SUBMISSION.txt"
NOTICE_TEXT = """This is a rehearsal of a submission, made by `package --rehearse`.
All logs in it are invented. It contains no measurement and must not be submitted.
"""
DEFAULT_KIND = "H200"  # GPU kind of the invented system description
DAY_MS = 86_400_000  # between two invented runs
MINUTES = 60.0  # from run_start to run_stop of an invented run

# State of an attempt -> exit code, kind and reason of its end in the ledger.
ENDINGS = {
    GOOD: (0, "success", ""),
    FAILED: (10, "target_missed", "the target was not reached"),
    LOST: (14, "rank_lost", "a rank died without a message"),
    NOT_STARTED: (18, "preflight", "the run failed before its clock started"),
}


@dataclass(frozen=True)
class RehearsedRun:
    """An attempt whose log is to be invented."""

    state: str  # one of the states of submission/run.py
    seed: int
    minutes: float  # from run_start to run_stop


def attempts_like(series: Series | None) -> list[RehearsedRun]:
    """Return the attempts of `series`, then good ones until ten have started their clock."""
    attempts = []
    started = 0
    if series is not None:
        attempts = [_attempt_like(run) for run in series.runs]
        started = len(started_runs(series))
    missing = max(0, SUBMISSION_RUNS - started)
    return attempts + [RehearsedRun(GOOD, secrets.randbits(32), MINUTES) for _ in range(missing)]


def _attempt_like(run: Run) -> RehearsedRun:
    """Return an attempt with state, seed and minutes of `run`, which are invented if unknown."""
    seed = run.start.get("seed", run.log.value("seed"))
    if type(seed) is not int:
        seed = secrets.randbits(32)
    return RehearsedRun(run.counts_as, seed, run.minutes or MINUTES)


# System description.


def write_description(folder: Path, source: Path | None, org: str) -> Path:
    """Write a system description with marked names into `folder`; return its path.

    `source`: description to copy, or None to invent one of a system with 8 GPUs. Raises ConfigError
    if it cannot be read.
    """
    if source is None:
        description = _invented_description()
        name = f"{DEFAULT_KIND}_1x8"
    else:
        description = describe.read(source)
        name = source.stem
    description["submitter"] = org
    description["system_name"] = f"{MARK}{description.get('system_name') or name}"
    description["hw_notes"] = description["sw_notes"] = "rehearsal with invented logs, not a result"
    path = folder / f"{MARK}{name}.json"
    path.write_text(json.dumps(description, indent=4) + "\n")
    return path


def _invented_description() -> dict[str, str]:
    """Return a complete description of one node with 8 GPUs of DEFAULT_KIND."""
    description = dict.fromkeys(describe.KEYS, "rehearsal")
    description.update(
        division="closed",
        status=describe.STATUS["onprem"],
        number_of_nodes="1",
        host_processors_per_node="2",
        accelerators_per_node="8",
        accelerator_model_name=f"NVIDIA {DEFAULT_KIND}",
        framework=f"PyTorch {_installed_torch()}",
    )
    return description


def _installed_torch() -> str:
    return (version_of("torch") or "2.10.0").split("+")[0]


def config_file(root: Path, benchmark: str, description: dict[str, str]) -> Path:
    """Return the path of the config for the system of `description`.

    Raises ConfigError if its GPU kind is unknown, or if the repository has no config for it.
    """
    model = description["accelerator_model_name"]
    kinds = []
    for kind in KINDS:
        if re.search(rf"(?<![A-Za-z0-9]){kind}(?![A-Za-z0-9])", model):
            kinds.append(kind)
    if not kinds:
        raise ConfigError(
            f"accelerator_model_name {model!r} names no known GPU kind",
            f"known kinds: {', '.join(KINDS)}",
            "correct the system description",
        )
    nodes = description["number_of_nodes"]
    gpus = description["accelerators_per_node"]
    return config_path(root, benchmark, f"{kinds[0]}_{nodes}x{gpus}")


# Series.


def write_series(
    folder: Path,
    benchmark: str,
    attempts: Iterable[RehearsedRun],
    *,
    config: Path,
    org: str,
    system: Path,
    commit: str,
) -> None:
    """Write a ledger and a series of invented runs into the new directory `folder`.

    `config`: path of the config file. `org`: organization. `system`: path of the system
    description, which is complete. `commit`: commit whose code is packaged. Raises ConfigError if
    the reference has no runs at the global batch of the config.
    """
    rules = benchmarks.divisions(benchmark)["closed"]
    loaded = configs.load(config, benchmarks.config_class(benchmark))
    description = describe.read(system)
    status = describe.LOGGED_STATUS[description["status"]][0]
    framework = re.search(r"\d+(\.\d+)+", description.get("framework", ""))
    torch = framework[0] if framework else _installed_torch()
    operations = engines.operations(loaded.linear_format.in_fp8)
    versions = {
        "commit": commit,
        "dirty": False,
        "packages": {"torch": torch},
        "engines": {operation: str(engines.ENGINES[operation][-1]) for operation in operations},
        "variables": select(Use.RECORDED, loaded.env),
        "system_tuning": {"rehearsal": "good"},
    }
    samples = rules.fixed_log_values().get("train_samples", loaded.max_samples)
    keys = hyperparameters(loaded, rules, int(samples), config.name)
    series = f"rehearsal-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    path = folder / ledger.NAME
    facts = {"config": config.name}
    ledger.append(
        path, {"event": "series", "series": series, "goal": SUBMISSION_RUNS, "facts": facts}
    )
    submission = {
        "benchmark": benchmark,
        "org": org,
        "division": "closed",
        "status": status,
        "platform": system.stem,
    }
    now_ms = time.time() * 1000
    for number, attempt in enumerate(attempts, start=1):
        run_dir = folder / f"run{number:02}_{config.stem}_seed{attempt.seed}"
        run_dir.mkdir()
        (run_dir / "config.toml").write_text(loaded.as_toml())
        (run_dir / "versions.json").write_text(json.dumps(versions))
        clock = Clock(now_ms + number * DAY_MS)
        with contextlib.closing(RunLog(run_dir / "result.txt", clock)) as log:
            _initialize(log, clock, attempt, submission, keys)
            if attempt.state != NOT_STARTED:
                _train(log, clock, attempt, rules, loaded.global_batch_size)
        start = {
            "series": series,
            "attempt": number,
            "run": run_dir.name,
            "seed": attempt.seed,
            "config": config.name,
            "modified": False,
            "commit": commit,
        }
        _enter(path, start, attempt.state)


@dataclass
class Clock:
    """The clock of an invented log, in milliseconds since the epoch. It advances only by hand."""

    ms: float

    def __call__(self) -> int:
        return round(self.ms)


def _initialize(
    log: RunLog,
    clock: Clock,
    attempt: RehearsedRun,
    submission: dict[str, str],
    keys: Iterable[tuple[str, LogValue]],
) -> None:
    """Log what precedes run_start. A run that never started its clock ends at init_start."""
    log.cache_clear(True)
    log.init_start()
    if attempt.state == NOT_STARTED:
        return
    log.submission(**submission)
    log.seed(attempt.seed)
    log.hyperparameters([*keys, (REHEARSAL_KEY, True)])
    clock.ms += 60_000
    log.init_stop()


def _train(log: RunLog, clock: Clock, attempt: RehearsedRun, rules: Rules, batch: int) -> None:
    """Log what follows init_stop. A good run reaches the target at its last evaluation.

    The log of a lost run ends in its last evaluation.
    """
    evaluations = passing_evaluations(rules, batch)
    good = attempt.state == GOOD
    before = 0
    log.run_start()
    for index in range(evaluations):
        last = index == evaluations - 1
        samples = rules.first_evaluation(batch) + index * rules.eval_interval(batch)
        above_target = -0.001 if good and last else 0.1
        log.block_start(before)
        clock.ms += attempt.minutes * 60_000 / evaluations
        log.block_stop(samples)
        log.eval_start(samples)
        log.eval_accuracy(samples, rules.target_loss + above_target)
        if last and attempt.state == LOST:
            return
        log.eval_stop(samples)
        before = samples
    log.run_stop(before, "success" if good else "aborted")


def _enter(path: Path, start: dict, state: str) -> None:
    """Enter an attempt that ended in `state` in the ledger at `path`. `start`: its line `start`."""
    ledger.append(path, {"event": "start", **start})
    code, kind, reason = ENDINGS[state]
    end = {"exit_code": code, "kind": kind, "reason": reason, "clock": state != NOT_STARTED}
    ledger.append(path, {"event": "end", **start, **end})


def passing_evaluations(rules: Rules, batch: int) -> int:
    """Return the number of evaluations with which runs pass the RCP test.

    It is the reference's mean number, rounded up. Raises ConfigError if the reference has no runs
    at this global batch.
    """
    mean = mean_samples(rules, batch)
    if mean is None:
        known = ", ".join(map(str, rules.reference_runs))
        raise ConfigError(
            f"no reference runs at global batch {batch}",
            f"the reference has runs at {known}",
            "rehearse with a system whose config has one of these batches",
        )
    return math.ceil((mean - rules.first_evaluation(batch)) / rules.eval_interval(batch)) + 1


def marked(org: str) -> str:
    """Return the name of the organization in a rehearsal."""
    return f"{MARK}{org}"
