"""Which rank failed first, and why, from the records and exit codes of all."""

import json
from unittest import mock

import pytest
import torch

from common.benchmarks import load_all
from common.errors import OutOfMemory, RankLost, RunError, TargetMissed, write_rank_record
from common.paths import ROOT
from common.training import guard
from launch import diagnosis, job, run
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
    assert diagnosis.read_result(log).seconds is None
    log.write_text(
        mllog("run_start", 1000) + mllog("run_stop", 61000, status="success", samples_count=48)
    )
    result = diagnosis.read_result(log)
    assert (result.seconds, result.status, result.samples) == (60.0, "success", 48)
    log.write_text(mllog("run_stop", 61000, status=["success"], samples_count="48"))
    assert diagnosis.read_result(log) == diagnosis.RunResult()
    log.write_bytes(b"\0" * 100)
    assert diagnosis.read_result(log) == diagnosis.RunResult()


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
    assert "rank 1 (process 101)" in error.what and words in error.what + error.why


def test_nothing_known_is_said_so(tmp_path):
    for rank in (0, 1):
        write_rank_record(tmp_path, rank, "done")
    error, _ = diagnosis.diagnose(tmp_path, 2)
    assert (error.kind, error.exit_code) == ("internal", 1)


@pytest.mark.parametrize(
    ("first", "second", "phases", "stands"),
    [
        ("done", "done", "done done", True),
        ("failed", "done", "save done", True),  # its model was not saved
        (
            "",
            "interrupted",
            "save done",
            True,
        ),  # killed while it saved, upon which torchrun ended the other one
        (
            "failed",
            "failed",
            "checkpoint checkpoint",
            True,
        ),  # the last checkpoint was not saved: all ranks are told
        (
            "failed",
            "",
            "checkpoint checkpoint",
            True,
        ),  # the other one was killed while both saved it
        (
            "failed",
            "done",
            "done done",
            False,
        ),  # after its log said success: what it did for the run was not over
        ("done", "failed", "save done", False),
        ("done", "", "save done", False),
        ("failed", "failed", "checkpoint evaluation", False),
        ("interrupted", "interrupted", "done done", False),
    ],
)
def test_what_comes_after_a_run_leaves_it_as_it_is(tmp_path, first, second, phases, stands):
    for rank, (outcome, phase) in enumerate(zip((first, second), phases.split(), strict=True)):
        (tmp_path / f"ranks/rank_{rank}.heartbeat").write_text(json.dumps({"phase": phase}))
        if outcome:
            write_rank_record(tmp_path, rank, outcome)
    assert diagnosis.finished(tmp_path, 2) == stands


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
    error, _ = run.judge(
        job, mock.Mock(lost={}, failed=False), tmp_path, Ending(1), diagnosis.RunResult()
    )
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
        }
        (before / "rank_0.safetensors").touch()
        (before / "facts.json").write_text(json.dumps({**facts, "ranks": 1, "digest": "x"}))
    error, _ = run.judge(
        mock.Mock(), mock.Mock(), run_dir, Ending(0, signal_number=15), diagnosis.RunResult()
    )
    assert (f"--continue '{run_dir}'" in error.do) is has_checkpoint
    assert json.loads((run_dir / "failure.json").read_text())["do"] == error.do


def test_an_estimate_that_fails_does_not_hide_that_the_memory_is_full(tmp_path, monkeypatch):
    def failing(benchmark, config):
        raise ValueError("no estimate")

    monkeypatch.setattr(run, "expected_memory", failing)
    monkeypatch.setattr(guard.os, "_exit", lambda code: None)
    full = torch.OutOfMemoryError("CUDA out of memory.")
    guard.exit_with_failure(tmp_path, 0, full, lambda: None, lambda: 5)
    given = mock.Mock(benchmark="llama31_8b", config=load_all(ROOT, "llama31_8b")["H200_1x8"])
    nodes = mock.Mock(lost={}, failed=False)
    error, _ = run.judge(given, nodes, tmp_path, Ending(1), diagnosis.RunResult())
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
    assert (found.seconds, found.status, found.samples) == (None, "", 0)
