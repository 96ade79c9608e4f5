"""--checkpoint and --continue before any rank starts: what the ranks get, and what is refused."""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from common.errors import ConfigError, WeightsError
from common.paths import ROOT
from common.training.continuation import CHECKPOINTS_FOLDER, FACTS
from launch import series
from launch.job import AUTO, job_from, trainer_command
from launch.series import SeriesRequest, request_from

pytestmark = pytest.mark.quick


def continued(found, request):
    return series.continued(request, found.continues, found.benchmark, found.config)


def job(benchmark="llama31_8b", **options):
    given = {
        "device": "cpu",
        "config": None,
        "set": [],
        "checkpoint": None,
        "continues": None,
    } | options
    return job_from(benchmark, argparse.Namespace(**given), measurement=False)


@pytest.fixture
def before(tmp_path):
    """A run of seed 77 with a checkpoint."""
    folder = tmp_path / "a run" / CHECKPOINTS_FOLDER / "step_00000012"
    folder.mkdir(parents=True)
    facts = {
        "benchmark": "llama31_8b",
        "seed": 77,
        "config": asdict(job().config),
        "step": 12,
        "samples": 192,
        "ranks": 1,
        "digest": "x",
    }
    (folder / FACTS).write_text(json.dumps(facts))
    (folder / "rank_0.safetensors").touch()
    return tmp_path / "a run"


def test_the_seed_is_that_of_the_run_before_and_the_ranks_get_both_options(before, capsys):
    found = job(checkpoint="600s", continues=before)
    request = continued(found, request_from({}, None, False))
    assert (
        request
        == SeriesRequest(1, 0, 77)
        == continued(found, request_from({"SEED": "77"}, None, False))
    )
    command = trainer_command(found, Path("DIR"), 77)
    assert (
        command[-4:] == ["--checkpoint", "600s", "--continue", str(before)]
        and command[command.index("--seed") + 1] == "77"
    )
    assert "192 samples" in capsys.readouterr().err
    assert not {"--checkpoint", "--continue"} & set(trainer_command(job(), Path("DIR"), 1))


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({"NEXP": "2"}, {}, "for a single run"),
        ({}, {"max_failures": 1}, "for a single run"),
        ({}, {"resume": True}, "for a single run"),
        ({"SEED": "78"}, {}, "seed was 77, now 78"),
    ],
)
def test_a_series_or_another_seed_is_refused(before, environment, options, said):
    request = request_from(environment, options.get("max_failures"), options.get("resume", False))
    with pytest.raises(ConfigError, match=said):
        continued(job(continues=before), request)


def test_another_config_or_benchmark_and_a_run_without_checkpoint_are_refused(before, tmp_path):
    request = request_from({}, None, False)
    with pytest.raises(ConfigError, match="opt_base_learning_rate"):
        continued(job(continues=before, set=["opt_base_learning_rate=0.5"]), request)
    with pytest.raises(ConfigError, match="benchmark"):
        continued(job("llama2_70b_lora", continues=before), request)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        continued(job(continues=tmp_path), request)
    (before / CHECKPOINTS_FOLDER / "step_00000012" / FACTS).write_text("{")
    with pytest.raises(WeightsError, match="is damaged"):
        continued(job(continues=before), request)


def test_options_that_cannot_be_are_refused_before_that():
    with pytest.raises(ConfigError, match="--checkpoint"):
        job(checkpoint="often")
    with pytest.raises(ConfigError, match="one node"):
        job(checkpoint="1", set=["nodes=2", "micro_batch_size=8"])


def test_the_command_line(before):
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "--device",
        "cpu",
        "--print",
        "--checkpoint",
        "1",
        "--continue",
    ]
    done = subprocess.run([*command, str(before)], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 0
        and f"--checkpoint 1 --continue {shlex.quote(str(before))}\n" in done.stdout
        and "continues" in done.stderr
    )
    done = subprocess.run([*command, "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and not done.stdout
        and len(done.stderr.splitlines()) == 3
        and f"{ROOT}/nowhere" in done.stderr
    )


# --continue auto


def move(before: Path, log_dir: Path, name: str) -> Path:
    """Move the run into LOGDIR/llama31_8b, as the launcher would have named it."""
    run = log_dir / "llama31_8b" / name
    run.parent.mkdir(parents=True, exist_ok=True)
    return before.rename(run)


@pytest.fixture
def log_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


def test_auto_continues_the_last_unfinished_run(before, log_dir):
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    (run.parent / "20261123-110000_CPU_1x1_seed78").mkdir()  # ended before its first checkpoint
    found = job(checkpoint="600s", continues=AUTO)
    assert found.continues == run
    assert continued(found, request_from({}, None, False)).seed == 77


def test_auto_starts_a_new_run_where_there_is_none_to_continue(before, log_dir):
    assert job(checkpoint="600s", continues=AUTO).continues is None
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    other = job(checkpoint="600s", continues=AUTO, set=["opt_base_learning_rate=0.5"])
    assert other.continues is None, "the checkpoint is of another config"
    line = {
        "namespace": "",
        "time_ms": 1,
        "event_type": "INTERVAL_END",
        "key": "run_stop",
        "value": None,
        "metadata": {"status": "success"},
    }
    (run / "result.txt").write_text(f":::MLLOG {json.dumps(line)}\n")
    assert job(checkpoint="600s", continues=AUTO).continues is None, "it reached its target"


def test_auto_needs_checkpoints_and_refuses_a_damaged_one(before, log_dir):
    with pytest.raises(ConfigError, match="--checkpoint"):
        job(continues=AUTO)
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    (run / CHECKPOINTS_FOLDER / "step_00000012" / FACTS).write_text("{")
    with pytest.raises(WeightsError):
        job(checkpoint="600s", continues=AUTO)
