"""Timed runs: the series and its checks on node 0, and the ranks of each run on all nodes."""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path

from common import engines
from common.atomic_write import write_whole
from common.benchmarks import names_mlperf
from common.errors import (
    CheckFailed,
    Interrupted,
    OutOfMemory,
    PreflightError,
    RankLost,
    RunError,
    StorageError,
    TargetMissed,
)
from common.estimate.verdict import expected_memory
from common.paths import ROOT
from common.records.run_record import RunRecord
from common.terminal import inform, print_stderr, shown
from common.training.continuation import STOP_REQUEST, newest
from common.variables import Use, select
from launch import diagnosis, page_cache, run_directory, series
from launch.console import closing, mlperf_line
from launch.job import Job, ensure_data, trainer_command, trainer_environment
from launch.limits import require_interfaces, require_limits, require_loopback
from launch.monitor import gpu_sampler as sampler
from launch.monitor.screen import Screen
from launch.monitor.tracking import tracked
from launch.multi_node import LeaderEnded, Nodes
from launch.node_facts import node_facts
from launch.processes.supervise import (
    BEFORE_COLLECTIVES,
    Ending,
    Grace,
    HangWatch,
    signals_noted,
    supervise,
)
from launch.torch_build import broken_torch

DATE = "%Y-%m-%d %I:%M:%S %p"
STARTUP_S = 300.0  # until every rank has finished a step; kernels compile before the first one
NOT_CHECKED = "not_checked"  # kind of the late error of a log that the checker could not judge


def run_all(job: Job, request: series.SeriesRequest) -> int:
    """Make the requested number of good runs, and record them in a ledger.

    Return the exit code of series.run. Nodes other than 0 return node 0's exit code.
    """
    require_limits(job.config.gpus_per_node)
    require_loopback()
    require_interfaces({**job.environment, **job.config.env})
    by_order = job.engines
    versions = run_directory.versions(ROOT, job.gpus) | {
        "rank_cpus": job.cpus,
        "engines": by_order.versions,
        "faster_engines": [str(engine) for engine in by_order.faster],
        "variables": select(Use.RECORDED, {**job.environment, **job.config.env}),
    }
    series_identity = series.identity_of(
        job.selection, job.data_dir, versions["commit"], ROOT, job.benchmark
    )
    series_identity["engines"] = by_order.versions
    series_identity["variables"] = select(Use.PACKAGED, versions["variables"])
    folder = job.log_dir / job.benchmark

    try:
        with Nodes(job.node, job.config.gpus_per_node) as nodes:
            nodes.compare(functools.partial(ensure_data, job), functools.partial(node_facts, job))
            while job.node.rank:  # until LeaderEnded is raised
                _follow_next_run(job, versions, nodes)
            execute = functools.partial(run_once, job, versions, nodes)
            nodes.exit_code = series.run(
                folder, job.selection, series_identity, request, execute, write_report
            )
    except LeaderEnded as end:
        print_stderr(end.what, *filter(None, [end.why]))
        return end.exit_code
    if request.goal > 1 or request.resume:
        # Report of the whole series, in the folder of the ledger.
        write_report(folder)
    return nodes.exit_code


def _follow_next_run(job: Job, versions: dict, nodes: Nodes) -> None:
    """Run this node's ranks in the next run, on a node other than 0.

    They write to node_<n> in the run's directory, which the nodes may or may not share.
    """
    name, seed, pins = nodes.next_run()
    job = job.pinning(pins)
    run_dir = job.log_dir / job.benchmark / name / f"node_{job.node.rank}"
    run_directory.fill(run_dir)
    cleared = _prepare(job, versions, nodes, run_dir, seed)
    ending, gone = _train(job, nodes, run_dir, seed, cleared)
    if gone:
        raise gone
    code = 128 + ending.signal_number if ending.signal_number else ending.returncode
    # If node 0 stopped the ranks, this node did not fail.
    nodes.publish(run_dir, 0 if ending.stopped else code)
    if ending.signal_number:
        raise Interrupted(ending.signal_number)


def run_once(job: Job, versions: dict, nodes: Nodes, run_dir: Path, seed: int) -> series.RunOutcome:
    """Make one timed run in `run_dir`.

    It is good if it reached the target and its log did not fail the checks. A failure after
    run_stop is a late error of a good run.
    """
    pins = {}
    if job.selection.device == "cuda" and (names := engines_of_series(run_dir)):
        # All runs of a series use the same engines. If one fails its self-test, the run stops.
        pins = engines.pins(names)
        listed = ", ".join(f"{operation} {name}" for operation, name in names.items())
        inform(f"engines    {listed}, as in the first run of the series")
    job = job.pinning(pins)
    nodes.announce(run_dir.name, seed, pins)
    cleared = _prepare(job, versions, nodes, run_dir, seed)
    if cleared == "no" and names_mlperf(job.benchmark, job.config):
        print_stderr(
            "NOTE       the page cache was not cleared, as the log will state: not for submission"
        )
    # A signal that arrives while the log is judged does not change the run's outcome.
    with signals_noted() as received:
        return _train_and_judge(job, nodes, run_dir, seed, cleared, received)


def engines_of_series(run_dir: Path) -> dict[str, str]:
    """Return operation -> engine, as chosen by the first run of the series that chose, or {}.

    `run_dir`: of any run of the series.
    """
    series_record = RunRecord.in_directory(run_dir).series
    for run in RunRecord.in_series(run_dir.parent, series_record):
        if run.engine_choices:
            return {name: choice["engine"] for name, choice in run.engine_choices.items()}
    return {}


def _train_and_judge(
    job: Job, nodes: Nodes, run_dir: Path, seed: int, cleared: str, received: list[int]
) -> series.RunOutcome:
    """Run the ranks of all nodes, judge the run, and report it.

    `received`: signals that the launcher receives in the meantime.
    """
    start_date = time.strftime(DATE)
    announce = functools.partial(mlperf_line, job.benchmark, job.config)
    with tracked(run_dir, job.trackers):  # until the outcome is decided
        announce(f"STARTING TIMING RUN AT {start_date}")
        ending, gone = _train(job, nodes, run_dir, seed, cleared)
        nodes.finish(run_dir, stop=ending.returncode != 0 or ending.signal_number != 0)
        announce(f"ENDING TIMING RUN AT {time.strftime(DATE)}")
        result = diagnosis.read_result(run_dir / "result.txt")
        if result.minutes is not None:
            seconds = f"{result.minutes * 60:.0f}"
            org = job.environment.get("MLPERF_SUBMISSION_ORG", "")
            announce(f"RESULT,{job.benchmark.upper()},,{seconds},{org},{start_date}")
        error, late_errors = judge(job, nodes, run_dir, ending, gone, result)
    nodes.failure = f"{error.what}: {error.why}" if error else ""
    lines = error.lines() if error else ""
    checked = not error and all(late.kind != NOT_CHECKED for late in late_errors)
    print_stderr(*closing(result, lines, checked))
    if received:
        late_errors.append(Interrupted(received[0]))
    if late_errors:
        note = "" if error else " (its result is valid)"
        late_lines = [late.lines() for late in late_errors]
        print_stderr(f"After the end of the timed run{note}:", *late_lines)
    return series.RunOutcome(error, result, cleared, tuple(late_errors))


def _prepare(job: Job, versions: dict, nodes: Nodes, run_dir: Path, seed: int) -> str:
    """Write config and versions, clear the page cache, and wait for the other nodes.

    Return how the cache was cleared.
    """
    run_directory.write_config_and_versions(run_dir, job.config, versions)
    inform(f"run        {shown(run_dir)}, seed {seed}")
    return nodes.ready(page_cache.clear(job.data_files))


def _train(
    job: Job, nodes: Nodes, run_dir: Path, seed: int, cleared: str
) -> tuple[Ending, RunError | None]:
    """Run this node's ranks until they end.

    Return also an error if files of the run are gone, or if its clock did not start in time.

    Only node 0 decides whether the ranks of all nodes hang.
    """
    config = job.config
    node = job.node
    local_ranks = range(node.rank * config.gpus_per_node, (node.rank + 1) * config.gpus_per_node)
    step_s = config.hang_timeout_s * BEFORE_COLLECTIVES if node.rank == 0 else math.inf
    ranks = range(config.world_size) if node.rank == 0 else local_ranks
    watch = HangWatch(run_dir / "ranks", ranks, local_ranks, max(step_s, STARTUP_S), step_s)
    command = trainer_command(job, run_dir, seed)
    environment = trainer_environment(job, cleared)
    directory = run_directory.DirectoryWatch(run_dir)
    limit_s = job.rules.init_limit_s if job.rules.division == "closed" else math.inf
    clock = run_directory.ClockWatch(run_dir / "result.txt", limit_s)
    with (
        sampler.sampling(run_dir, job.run_gpus),
        Screen(
            run_dir,
            job.benchmark,
            job.selection.log_name,
            config,
            job.rules,
            on_gpus=job.selection.device == "cuda",
            leads=node.rank == 0,
        ) as screen,
    ):

        def stop() -> bool:
            screen.update()
            failed = directory.missing() or clock.late()
            return failed is not None or nodes.poll(run_dir)

        ending = supervise(
            command,
            environment,
            run_dir,
            watch,
            stop,
            Grace(job.grace_s, lambda: job.checkpoint != "" and _request_save(run_dir, watch)),
            stdout=screen.stdout,
            stderr=screen.stderr,
        )
    return ending, directory.missing() or (clock.late() if ending.stopped else None)


def _request_save(run_dir: Path, watch: HangWatch) -> bool:
    """Ask the ranks to save a checkpoint and end. Return False if there is nothing to save yet."""
    if not watch.started:
        return False
    try:
        (run_dir / STOP_REQUEST).touch()
    except OSError:  # such a disk holds no checkpoint either
        return False
    print_stderr("NOTE       saves a checkpoint, then ends; a second signal ends at once")
    return True


def judge(
    job: Job,
    nodes: Nodes,
    run_dir: Path,
    ending: Ending,
    gone: RunError | None,
    result: RunRecord,
) -> tuple[RunError | None, list[RunError]]:
    """Return (error, late errors).

    `error`: why the run is not good. None if it reached the target and its log did not fail the
        checks. It is also written to failure.json.
    `late errors`: failures after the clock of a run that reached the target had stopped, such as
        while saving the model.
    """
    error, failed_rank = _failure_of_processes(job, nodes, run_dir, ending, gone, result)
    if error and error.kind != TargetMissed.kind and job.config.nodes > 1 and failed_rank:
        error.what += f", on node {failed_rank['rank'] // job.config.gpus_per_node}"
    late_errors: list[RunError] = []
    if result.stands and not (error and error.kind == CheckFailed.kind):
        if error:
            late_errors.append(diagnosis.after_the_run(error, run_dir))
        verdict = _check(run_dir)
        error = verdict if isinstance(verdict, CheckFailed) else None
        if verdict and not error:
            late_errors.append(verdict)
    if error and error.kind == OutOfMemory.kind and failed_rank.get("gpu_memory_full"):
        try:
            expected = expected_memory(job.benchmark, job.config)
        except Exception as problem:  # whatever it is, it must not hide the run's failure
            expected = f"plan cannot say more: {problem}"
        if expected:
            error.do += f"; {expected}"
    if error:
        diagnosis.write_failure(run_dir, error, failed_rank)
    return error, late_errors


def _failure_of_processes(
    job: Job,
    nodes: Nodes,
    run_dir: Path,
    ending: Ending,
    gone: RunError | None,
    result: RunRecord,
) -> tuple[RunError | None, dict]:
    """Return why the processes did not end normally, and the record of the rank that failed.

    The error is never None if the result does not stand. The record has rank, step and time, as far
    as they are known.
    """
    if ending.signal_number:
        return _interrupted(job, run_dir, ending.signal_number), {}
    if gone:
        return gone, {}
    if nodes.lost:
        return next(iter(nodes.lost.values())), {}
    if ending.hang and not nodes.failed:
        return ending.hang, ending.failed_rank or {}
    if ending.returncode < 0 and not (ending.stopped or ending.hang):
        name = diagnosis.signal_name(-ending.returncode)
        killed = RankLost(
            "torchrun, which starts the ranks, was killed",
            f"{name}: a user killed it, or the kernel did because the host, container or job ran "
            "out of memory (see dmesg)",
            "free host memory, or raise the limit of the container or job; then start again",
        )
        return killed, {}
    if ending.returncode == StorageError.exit_code:
        unopened = StorageError(
            f"cannot write {run_dir / 'torchrun.log'}",
            "the message above says why; no rank was started",
            "free space, or check the mount and the permissions of LOGDIR",
        )
        return unopened, {}
    if ending.returncode == PreflightError.exit_code:
        return broken_torch(), {}
    if ending.returncode or nodes.failed:
        return diagnosis.diagnose(run_dir, job.config.world_size)
    if unreadable := diagnosis.disk_error(result):
        unknown = StorageError(
            f"cannot read {run_dir / 'result.txt'}: {unreadable}",
            "so it is not known whether the run reached its target",
            "check the mount and the kernel log; then ./run_and_time.sh check shows the result",
        )
        return unknown, {}
    if not result.stands:
        return diagnosis.diagnose(run_dir, job.config.world_size)
    return None, {}


def _interrupted(job: Job, run_dir: Path, signal_number: int) -> Interrupted:
    """Return the error of a run that a signal ended: what is saved, and how to go on."""
    error = Interrupted(signal_number)
    saved = job.continues
    with contextlib.suppress(RunError, OSError):
        saved = newest(run_dir)
    if saved:
        error.why = (
            f"{saved.facts['samples']:,} sequences are saved, after step {saved.facts['step']}"
        )
        error.do = f"./run_and_time.sh {job.benchmark} --continue {shlex.quote(str(saved.run))}"
    elif job.checkpoint:
        error.why = "nothing is saved: it ended before its first checkpoint"
    else:
        error.why = "nothing is saved: the run has no --checkpoint"
        error.do = "start again; --checkpoint 600s saves the training state every ten minutes"
    return error


def _check(run_dir: Path) -> RunError | None:
    """Check the log and write check.txt.

    Return CheckFailed if the log does not pass, or another error if the checker could not run.
    """
    answer = _captured("submission.check", str(run_dir / "result.txt"))
    try:
        write_whole(run_dir / "check.txt", answer.stdout.encode())
    except OSError as error:  # the verdict is valid without the file
        print_stderr(
            f"note: check.txt could not be written: {error}; ./run_and_time.sh check prints its "
            "content"
        )
    if answer.returncode == 0:
        return None
    print_stderr(answer.stdout.rstrip())
    if answer.returncode == CheckFailed.exit_code:
        return CheckFailed(
            "the target was reached, but the log failed the checks",
            "the findings are listed above",
            f"see {run_dir / 'check.txt'}",
        )
    end = f"exit code {answer.returncode}"
    if answer.returncode < 0:
        end = diagnosis.signal_name(-answer.returncode)
    unchecked = RunError(
        "the log was not checked",
        f"the checker ended with {end}, without a verdict",
        f"./run_and_time.sh check {shlex.quote(str(run_dir))}",
    )
    unchecked.kind = NOT_CHECKED
    return unchecked


def write_report(folder: Path) -> None:
    """Write the report of a run or a series. A run stays valid if that fails."""
    answer = _captured("submission.report", str(folder))
    if answer.returncode:
        print_stderr("note: no report was written:", *answer.stdout.splitlines()[-1:])
    else:
        inform(f"report: {shown(folder / 'report.html')}", *answer.stdout.splitlines()[1:])


def _captured(module: str, argument: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m module argument`, and return its output and exit code.

    The exit code is 1 if the process cannot be started. A new session keeps Ctrl-C away from it.
    """
    command = [sys.executable, "-m", module, argument]
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError as error:  # no memory or processes are left
        return subprocess.CompletedProcess(command, 1, f"{module} did not start: {error}\n")
