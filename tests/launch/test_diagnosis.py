"""Which rank failed first, and why, from the records and exit codes of all."""

import errno
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.benchmarks import load_all
from common.errors import (
    CheckFailed,
    Hang,
    OutOfMemory,
    RankLost,
    RunError,
    StorageError,
    TargetMissed,
    write_rank_record,
)
from common.paths import ROOT
from common.records import mlperf_log
from common.records.run_record import RunRecord
from common.training import guard
from launch import diagnosis, job, run, series
from launch.processes.supervise import Ending

pytestmark = pytest.mark.quick


def mllog(key, time_ms, **metadata):
    return (
        ":::MLLOG "
        + json.dumps({"key": key, "time_ms": time_ms, "value": None, "metadata": metadata})
        + "\n"
    )


def test_result_is_read_from_the_log(tmp_path):
    log = tmp_path / "result.txt"
    assert diagnosis.read_result(log).status == ""
    log.write_text(mllog("run_start", 1000) + "noise\n:::MLLOG {broken\n")
    assert diagnosis.read_result(log).minutes is None
    log.write_text(
        mllog("run_start", 1000) + mllog("run_stop", 61000, status="success", samples_count=48)
    )
    result = diagnosis.read_result(log)
    assert (result.minutes, result.status, result.trained) == (1.0, "success", 48)
    log.write_text(mllog("run_stop", 61000, status=["success"], samples_count="48"))
    damaged = diagnosis.read_result(log)
    log.write_bytes(b"\0" * 100)
    for result in (damaged, diagnosis.read_result(log)):
        assert not (result.stands or result.clock_started or result.trained or result.minutes)


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "ranks").mkdir()


def exits(run_dir, *entries):
    listed = [
        {"rank": rank, "pid": 100 + rank, "exit_code": code, "time": 10} for rank, code in entries
    ]
    (run_dir / "torchrun.json").write_text(json.dumps(listed))


def test_the_earliest_failure_counts_and_not_its_victims(tmp_path):
    write_rank_record(tmp_path, 0, "failed", RankLost("peer is gone"), secondary=True, time=1.0)
    write_rank_record(
        tmp_path, 2, "failed", TargetMissed("too slow", "why", "do"), step=5, time=3.0
    )
    write_rank_record(tmp_path, 1, "failed", RunError("boom"), step=4, time=2.0)
    error, failed_rank = diagnosis.diagnose(tmp_path, 4)
    assert (error.what, error.exit_code, failed_rank["step"]) == ("rank 1: boom", 1, 4)
    diagnosis.write_failure(tmp_path, error, failed_rank)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (
        set(failure) == {"kind", "exit_code", "what", "why", "do", "rank", "step", "time"}
        and failure["rank"] == 1
    )


def test_a_missed_target_is_no_single_ranks_failure(tmp_path):
    for rank in (0, 1):
        write_rank_record(
            tmp_path,
            rank,
            "failed",
            TargetMissed("target 0.925 not reached", "why", "do"),
            step=5,
            time=3.0 - rank,
        )
    assert diagnosis.diagnose(tmp_path, 2)[0].what == "target 0.925 not reached"


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (-9, 14, "SIGKILL"),
        (-40, 14, "signal 40"),  # a real-time signal, which has no name
        (-11, 14, "SIGSEGV"),
        (0, 14, "exit code 0"),
        (1, 1, "exit code 1"),
        (12, 12, "12"),
    ],
)
def test_a_rank_without_a_record_is_the_failed_one(tmp_path, code, exit_code, words):
    write_rank_record(tmp_path, 0, "failed", RankLost("peer is gone"), secondary=True)
    exits(tmp_path, (2, -15), (1, code), (0, 14))
    error, failed_rank = diagnosis.diagnose(tmp_path, 3)
    assert error.exit_code == exit_code and failed_rank["rank"] == 1
    assert error.kind == {14: "rank_lost", 1: "internal", 12: "out_of_memory"}[exit_code]
    assert "rank 1 (process 101)" in error.what and words in error.what + error.why


def test_nothing_known_is_said_so(tmp_path):
    for rank in (0, 1):
        write_rank_record(tmp_path, rank, "done")
    error, _ = diagnosis.diagnose(tmp_path, 2)
    assert (error.kind, error.exit_code) == ("internal", 1)


UNREADABLE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize(("patience_s", "status"), [(60.0, "success"), (0.0, "")])
def test_a_log_that_cannot_be_read_now_is_read_again(tmp_path, monkeypatch, patience_s, status):
    (tmp_path / "result.txt").write_text(mllog("run_stop", 61000, status="success"))
    read = mlperf_log.read
    answers = iter([UNREADABLE, UNREADABLE])

    def failing(path, repeated):
        if error := next(answers, None):
            raise error
        return read(path, repeated)

    monkeypatch.setattr(diagnosis, "PATIENCE_S", patience_s)
    monkeypatch.setattr(diagnosis, "RETRY_S", 0.0)
    monkeypatch.setattr(mlperf_log, "read", failing)
    result = diagnosis.read_result(tmp_path / "result.txt")
    assert (result.status, result.stands) == (status, bool(status))
    assert (diagnosis.disk_error(result) == "") == result.stands


NO_RESULT = RunRecord(Path("result.txt"))
GOOD_RESULT = RunRecord(Path("result.txt"), status="success", minutes=1.0)
ONE_NODE = mock.Mock(lost={}, failed=False)
JOB = mock.Mock(config=mock.Mock(nodes=1, world_size=2), continues=None, checkpoint="")


def judged(run_dir, ending, result, verdict=None, gone=None, monkeypatch=None):
    """Return the outcome of a run on two ranks whose check ends with `verdict`."""
    monkeypatch.setattr(run, "_check", lambda run_dir: verdict)
    error, late_errors = run.judge(JOB, ONE_NODE, run_dir, ending, gone, result)
    return series.RunOutcome(error, result, "", tuple(late_errors))


# The records of rank 0 and 1 ("": none), and the exit code of the command.
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("failed", "done", StorageError.exit_code),  # its model was not saved
        ("", "interrupted", StorageError.exit_code),  # killed while it saved
        ("failed", "failed", StorageError.exit_code),  # the last checkpoint was not saved
        ("interrupted", "interrupted", StorageError.exit_code),
        ("done", "failed", 0),  # nothing is missing: rank 0 writes all files
        ("done", "", 0),
    ],
)
def test_a_result_that_stands_is_left_by_what_fails_later(
    tmp_path, monkeypatch, first, second, code
):
    for rank, outcome in enumerate((first, second)):
        if outcome:
            write_rank_record(tmp_path, rank, outcome, RunError("boom"))
    outcome = judged(tmp_path, Ending(1), GOOD_RESULT, monkeypatch=monkeypatch)
    assert outcome.error is None and len(outcome.late_errors) == 1
    assert outcome.exit_code == code
    assert not (tmp_path / "failure.json").exists()
    aborted = RunRecord(tmp_path / "result.txt", status="aborted", minutes=1.0)
    assert judged(tmp_path, Ending(1), aborted, monkeypatch=monkeypatch).error
    assert (tmp_path / "failure.json").exists()


@pytest.mark.parametrize(
    ("ending", "gone", "code"),
    [
        (Ending(143, signal_number=15), None, 143),
        (Ending(-9), StorageError("ranks is gone"), 17),
        (Ending(-9, hang=Hang("no rank made progress")), None, 17),
        (Ending(-9), None, 17),  # torchrun was killed
    ],
)
def test_an_end_of_the_processes_after_run_stop_leaves_the_result(
    tmp_path, monkeypatch, ending, gone, code
):
    outcome = judged(tmp_path, ending, GOOD_RESULT, gone=gone, monkeypatch=monkeypatch)
    assert outcome.error is None and outcome.exit_code == code
    assert "--continue" not in outcome.late_errors[0].do


def test_a_check_that_failed_takes_a_result_back(tmp_path, monkeypatch):
    """The checker's, or that of the frozen weights, which is a rank's own."""
    found = CheckFailed("a finding")
    assert judged(tmp_path, Ending(0), GOOD_RESULT, found, monkeypatch=monkeypatch).error is found
    for rank in (0, 1):
        write_rank_record(tmp_path, rank, "failed", CheckFailed("the frozen base changed"))
    outcome = judged(tmp_path, Ending(1), GOOD_RESULT, monkeypatch=monkeypatch)
    assert outcome.exit_code == 20 and outcome.late_errors == ()


def test_a_log_that_cannot_be_read_is_a_storage_error(tmp_path, monkeypatch):
    result = RunRecord(tmp_path / "result.txt", unreadable=UNREADABLE)
    outcome = judged(tmp_path, Ending(0), result, monkeypatch=monkeypatch)
    assert outcome.exit_code == 17 and "Stale file handle" in outcome.error.what


@pytest.mark.parametrize(
    ("name", "raised", "said"),
    [
        ("H200_1x8", torch.OutOfMemoryError("CUDA out of memory."), True),
        ("H200_1x8", MemoryError(), False),
        ("H200_1x8", OutOfMemory("the host cannot pin memory for GPU 0", "why", "do"), False),
        ("CPU_1x1", torch.OutOfMemoryError("CUDA out of memory."), False),
    ],
)
def test_a_full_gpu_is_told_what_plan_expects(tmp_path, monkeypatch, name, raised, said):
    monkeypatch.setattr(guard.os, "_exit", lambda code: None)
    guard.exit_with_failure(tmp_path, 0, raised, lambda: None, lambda: 5)
    job = mock.Mock(benchmark="llama31_8b", config=load_all(ROOT, "llama31_8b")[name])
    error, _ = run.judge(job, ONE_NODE, tmp_path, Ending(1), None, NO_RESULT)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert error.exit_code == 12 and failure["do"] == error.do and failure["rank"] == 0
    assert ("plan expects a peak of " in error.do) == said
    assert ("usable on H200" in error.do) == said


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_an_interrupted_run_is_continued_from_its_checkpoint(tmp_path, has_checkpoint):
    run_dir = tmp_path / "a run"
    (run_dir / "ranks").mkdir(parents=True)
    if has_checkpoint:
        before = run_dir / "checkpoints/step_00000012"
        before.mkdir(parents=True)
        facts = {
            "benchmark": "x",
            "seed": 7,
            "config": {"global_batch_size": 16},
            "step": 12,
            "samples": 192,
            "ranks": 1,
            "digest": "x",
            "sampled_data_files": {},
            "base_files": {},
            "engines": {},
            "device": "cpu",
        }
        (before / "rank_0.safetensors").touch()
        (before / "facts.json").write_text(json.dumps(facts))
    error, _ = run.judge(JOB, mock.Mock(), run_dir, Ending(0, signal_number=15), None, NO_RESULT)
    assert (f"--continue '{run_dir}'" in error.do) is has_checkpoint
    assert ("192 sequences" in error.why) is has_checkpoint
    assert ("--checkpoint 600s" in error.do) is not has_checkpoint
    assert json.loads((run_dir / "failure.json").read_text())["do"] == error.do


def test_an_estimate_that_fails_does_not_hide_that_the_memory_is_full(tmp_path, monkeypatch):
    def failing(benchmark, config):
        raise ValueError("no estimate")

    monkeypatch.setattr(run, "expected_memory", failing)
    monkeypatch.setattr(guard.os, "_exit", lambda code: None)
    full = torch.OutOfMemoryError("CUDA out of memory.")
    guard.exit_with_failure(tmp_path, 0, full, lambda: None, lambda: 5)
    given = mock.Mock(benchmark="llama31_8b", config=load_all(ROOT, "llama31_8b")["H200_1x8"])
    error, _ = run.judge(given, ONE_NODE, tmp_path, Ending(1), None, NO_RESULT)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert error.exit_code == failure["exit_code"] == 12 and "no estimate" in failure["do"]


@pytest.mark.parametrize(
    ("device", "user", "size"),
    [("cuda", {}, "2000"), ("cuda", {"TORCH_FR_BUFFER_SIZE": "0"}, "0"), ("cpu", {}, None)],
)
def test_collectives_on_gpus_are_recorded_unless_the_user_says_no(device, user, size):
    given = mock.Mock(config=load_all(ROOT, "llama31_8b")["H200_1x8"], environment=user)
    given.selection.device = device
    assert job.trainer_environment(given, "no").get("TORCH_FR_BUFFER_SIZE") == size


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe:::MLLOG {",
        b':::MLLOG {"key": "run_stop", "time_ms": 3, "metadata": []}',
        b':::MLLOG {"key": "run_start", "time_ms": "1"}\n'
        b':::MLLOG {"key": "run_stop", "time_ms": 3, "metadata": {"samples_count": []}}',
        b':::MLLOG {"key": ["run_stop"]}\n:::MLLOG ' + b"[" * 100_000,
        b':::MLLOG {"key": "run_stop", "metadata": {"status": 7}}',
    ],
)
def test_a_damaged_log_of_a_lost_attempt_is_read_as_far_as_it_goes(tmp_path, content):
    (tmp_path / "result.txt").write_bytes(content)
    found = diagnosis.read_result(tmp_path / "result.txt")
    assert not (found.stands or found.minutes or found.trained)
