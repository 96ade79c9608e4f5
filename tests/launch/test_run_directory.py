"""The directory of a run: never reused, with the facts about what ran."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from unittest import mock

import pytest
from jobs import job_of
from probes import H200X4

from common import repository
from common.config import load
from common.engines import ENGINES
from common.errors import Hang, StorageError
from common.paths import ROOT
from common.records.run_record import RunRecord
from launch import run, run_directory
from launch.job import Job
from llama31_8b.rules import CLOSED, Config
from submission import prerequisites
from throughput import result

pytestmark = pytest.mark.quick


def test_run_directories_are_never_reused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "date", lambda: "20261122-120000")
    folders = [run_directory.create(tmp_path / "toy", "CPU_1x1", 7) for _ in range(3)]
    assert all((folder / "ranks").is_dir() for folder in folders)
    assert len(set(folders)) == 3 and folders[2].name == "20261122-120000_CPU_1x1_seed7-3"
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    assert result.default_directory("gemm") != result.default_directory("gemm")


def test_unwritable_results_are_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        run_directory.create(tmp_path / "file/toy", "CPU_1x1", 7)
    assert caught.value.exit_code == 17


def test_facts(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    installed = {"torch": "2.13.0", "nvidia-cutlass-dsl": "4.8.1"}
    for operation in ENGINES.values():
        installed |= {engine.package: engine.oldest for engine in operation if engine.package}
    monkeypatch.setattr(run_directory, "version_of", installed.get)
    config = load(ROOT / "configs/llama31_8b/H200_1x4.toml", Config)
    run_directory.write_config_and_versions(tmp_path, config, run_directory.versions(ROOT, H200X4))
    assert load(tmp_path / "config.toml", Config) == config
    facts = json.loads((tmp_path / "versions.json").read_text())
    assert (
        facts["driver"] == "580.95.05"
        and len(facts["gpus"]) == 4
        and facts["packages"] == installed
        and "dirty" in facts
    )
    assert "hf_secret" not in (tmp_path / "versions.json").read_text()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git repository with one commit."""
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    (tmp_path / "code.py").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "code"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return tmp_path


NAMED = {"MLPERF_SUBMISSION_ORG": "Us"}


def test_a_clean_commit_and_a_name_can_be_submitted(checkout):
    assert prerequisites.refusal_reasons(checkout, NAMED) == []
    (missing,) = prerequisites.refusal_reasons(checkout, {})
    assert "MLPERF_SUBMISSION_ORG" in missing


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://me:secret@github.com/Us/code.git", "github.com/Us/code"),
        ("git@github.com:Us/code.git", "github.com/Us/code"),
        ("ssh://git@git.us.example:2222/team/code/", "git.us.example/team/code"),
        ("/home/me/code.git", None),
        ("../code", None),
        ("file:///home/me/code", None),
    ],
)
def test_a_remote_is_named_without_user_and_password(checkout, address, name):
    assert repository.remote_name(checkout) is None
    command = ["git", "-C", str(checkout), "remote", "add", "origin", address]
    subprocess.run(command, check=True)
    assert repository.remote_name(checkout) == name


def test_what_runs_leave_in_the_checkout_makes_it_no_other_code(checkout):
    shutil.copy(ROOT / ".gitignore", checkout / ".git/info/exclude")
    for name in ("nohup.out", "slurm-17.out", ".venv.lock", "report.html"):
        (checkout / name).write_text("")
    assert prerequisites.refusal_reasons(checkout, NAMED) == []
    (checkout / "notes.txt").write_text("")
    (untracked,) = prerequisites.refusal_reasons(checkout, NAMED)
    assert "notes.txt" in untracked


def test_a_commit_that_git_does_not_tell_is_a_doubt(checkout, monkeypatch, tmp_path_factory):
    (none,) = prerequisites.refusal_reasons(tmp_path_factory.mktemp("no repository"), NAMED)
    inside = checkout / "copy"
    inside.mkdir()
    (outer,) = prerequisites.refusal_reasons(inside, NAMED)
    monkeypatch.setenv("PATH", "")
    (no_git,) = prerequisites.refusal_reasons(checkout, NAMED)
    assert all("commit" in text and "unknown" in text for text in (none, outer, no_git))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_checkout_of_another_user_is_a_doubt(checkout, monkeypatch):
    monkeypatch.setenv("HOME", str(checkout))  # without a setting safe.directory
    os.chown(checkout, 65534, 65534)
    (foreign,) = prerequisites.refusal_reasons(checkout, NAMED)
    assert "commit" in foreign and "another user" in foreign


def test_a_run_whose_clock_does_not_start_in_time_is_ended(tmp_path, monkeypatch):
    """The initialization writes init_start and then takes too long."""
    job = job_of("llama31_8b", ROOT / "configs/llama31_8b/H200_1x4.toml", tmp_path)
    run_dir = run_directory.fill(tmp_path / "run")
    log = run_dir / "result.txt"
    wait = f"echo '\"init_start\"' > {log}; exec sleep 60"
    monkeypatch.setattr(run, "trainer_command", lambda *_: ["bash", "-c", wait])
    monkeypatch.setattr(run, "trainer_environment", lambda *_: {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(Job, "rules", replace(CLOSED, init_limit_s=0.6))
    nodes = mock.Mock(lost={}, failed=False)
    nodes.poll.return_value = False
    ending, error = run._train(job, nodes, run_dir, 1, "no")
    assert ending.stopped and isinstance(error, Hang) and "initialization" in error.what
    judged, _ = run.judge(job, nodes, run_dir, ending, error, RunRecord(log))
    assert judged is error and json.loads((run_dir / "failure.json").read_text())["exit_code"] == 13


@pytest.mark.parametrize(("keys", "late"), [("", False), ("init", True), ("init run", False)])
def test_the_clock_is_late_only_between_init_start_and_run_start(tmp_path, keys, late):
    now = mock.Mock(return_value=0.0)
    log = tmp_path / "result.txt"
    watch = run_directory.ClockWatch(log, 1800.0, now)
    assert watch.late() is None, "there is no log yet"
    log.write_text("".join(f'"{key}_start"' for key in keys.split()))
    assert watch.late() is None
    now.return_value = 1800.0
    assert watch.late() is None
    now.return_value = 1801.0
    assert (watch.late() is not None) == late
