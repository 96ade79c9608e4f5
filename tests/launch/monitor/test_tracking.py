"""Tracking: what a run wrote arrives in each package, and a bad server costs the run nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from synthetic_run import start, write_good

from common.errors import ConfigError, Interrupted, PreflightError, RankLost, TargetMissed
from common.paths import ROOT
from common.records import run_states, trackers
from common.records import tracking as run_points
from common.records.trackers import STEP, TRACKERS
from launch import diagnosis
from launch.monitor import tracking
from submission import report

EVENTS = [
    {"event": "phase", "name": "init", "seconds": 2.5, "time_s": 1.0},
    {"event": "step", "step": 1, "samples": 16, "loss": 7.5, "grad_norm": 1.25, "mfu": None},
    {"event": "step", "step": 2, "samples": 32, "loss": 6.5, "grad_norm": 1.5, "mfu": 0.4},
    {"event": "ranks", "step": 2, "block_ms": [10.0, 12.0], "slow": []},
    {"event": "eval", "step": 2, "samples": 32, "loss": 6.25, "seconds": 3.0},
]
SAMPLES = [
    {"event": "start", "time": 1.0},
    {"event": "sample", "time_s": 1.2, "gpus": [{"power_w": 650.5, "throttle": []}]},
]
STEP_LOSS = [(1, 7.5), (2, 6.5)]
STANDIN = """
import json, os, sys, time
from pathlib import Path

def _write(run_dir, value):
    with open(Path(run_dir) / "standin.jsonl", "a") as file:
        file.write(json.dumps(value) + "\\n")

class StandIn:
    def __init__(self, run_dir, facts):
        self.run_dir = run_dir
        _write(run_dir, ["facts", facts])
    def log(self, axis, position, values):
        if os.environ.get("STANDIN") == "hangs":
            time.sleep(3600)
        if os.environ.get("STANDIN") == "refuses":
            raise ConnectionRefusedError("no server")
        _write(self.run_dir, [axis, position, values])
    def finish(self, state, outcome):
        _write(self.run_dir, ["finished", state, outcome])

from common.records import trackers
trackers.TRACKERS["trackio"] = StandIn
"""


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "llama31_8b" / "run_1"
    folder.mkdir(parents=True)
    (folder / run_points.EVENTS).write_text(lines(*EVENTS))
    (folder / run_points.GPU_SAMPLES).write_text(lines(*SAMPLES))
    (folder / "config.toml").write_text('gpu = "H200"\nglobal_batch_size = 16\n')
    (folder / "versions.json").write_text('{"packages": {"torch": "2.13.0"}}')
    return folder


@pytest.fixture
def standin(tmp_path, monkeypatch) -> None:
    """Replace Trackio by the stand-in, in the tracking process too."""
    (tmp_path / "sitecustomize.py").write_text(STANDIN)
    paths = [str(tmp_path), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def written(run_dir: Path) -> list:
    return [json.loads(line) for line in (run_dir / "standin.jsonl").read_text().splitlines()]


def test_points_have_the_numbers_of_the_files(run_dir):
    points = list(run_points.Follower(run_dir).points())
    losses = [
        (each.position, each.values["step/loss"])
        for each in points
        if "step/loss" in each.values and each.axis == STEP
    ]
    assert losses == STEP_LOSS
    values = {name: value for point in points for name, value in point.values.items()}
    assert values["phase/init/seconds"] == 2.5
    assert values["ranks/block_ms/1"] == 12.0
    assert values["gpu0/power_w"] == 650.5
    assert values["step/mfu"] == 0.4
    assert sum("step/mfu" in point.values for point in points) == 1, "null is no number"


def test_facts_are_config_and_versions(run_dir):
    assert run_points.facts(run_dir) == {
        "config.gpu": "H200",
        "config.global_batch_size": "16",
        "versions.packages.torch": "2.13.0",
    }


def test_a_run_is_followed_while_it_writes(run_dir, standin, capsys):
    with tracking.tracked(run_dir, ["trackio"]):
        while not (run_dir / "standin.jsonl").exists():
            time.sleep(0.05)
        with (run_dir / run_points.EVENTS).open("a") as file:
            file.write(lines({"event": "step", "step": 3, "loss": 5.5}))
    records = written(run_dir)
    assert records[0][1]["config.gpu"] == "H200"
    assert [STEP, 3, {"step/loss": 5.5}] in records
    assert records[-1][0] == "finished"
    assert capsys.readouterr().err == ""


FAILURES = [
    (TargetMissed("loss 7.5", "", ""), "FAILED"),
    (Interrupted(signal.SIGUSR1), "KILLED"),
    (RankLost("rank 1 died", "", ""), "FAILED"),
    (None, "FINISHED"),
]


@pytest.mark.parametrize(("failure", "status"), FAILURES)
def test_the_outcome_is_known_when_tracking_ends(run_dir, standin, failure, status):
    if failure:
        start(run_dir / "result.txt").abort(0)
    else:
        write_good(run_dir / "result.txt")
    with tracking.tracked(run_dir, ["trackio"]):
        if failure:
            diagnosis.write_failure(run_dir, failure, {})
    _, state, outcome = written(run_dir)[-1]
    assert state == (failure.kind if failure else run_states.GOOD)
    assert failure is None or failure.what in outcome
    client = mock.Mock()
    mlflow = trackers.MLflow.__new__(trackers.MLflow)
    mlflow.client, mlflow.id = client, "7"
    mlflow.finish(state, outcome)
    client.set_terminated.assert_called_once_with("7", status)


def test_a_tracker_that_refuses_costs_a_note(run_dir, standin, monkeypatch, capsys):
    monkeypatch.setenv("STANDIN", "refuses")
    with tracking.tracked(run_dir, ["trackio"]):
        pass
    assert "not affected" in capsys.readouterr().err
    assert "ConnectionRefusedError: no server" in (run_dir / tracking.OUTPUT).read_text()


def test_a_tracker_that_hangs_is_killed_after_the_run(run_dir, standin, monkeypatch, capsys):
    monkeypatch.setenv("STANDIN", "hangs")
    monkeypatch.setattr(tracking, "END_S", 4.0)
    began = time.monotonic()
    with tracking.tracked(run_dir, ["trackio"]):
        inside_s = time.monotonic() - began
    assert inside_s < 2.0, "the run does not wait for the tracker"
    assert time.monotonic() - began < 30.0
    assert "killed" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_before_the_run(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        run_points.require_installed("wandb")
    assert caught.value.do == f"{sys.executable} -m pip install wandb"
    assert report.main([str(run_dir), "--export", "wandb"]) == 18


def test_a_directory_without_events_is_not_exported(run_dir, monkeypatch):
    monkeypatch.setattr(run_points, "require_installed", lambda name: None)
    (run_dir / run_points.EVENTS).unlink()
    (run_dir / run_points.GPU_SAMPLES).unlink()
    with pytest.raises(ConfigError):
        run_points.export(run_dir, "tensorboard")


# The real packages, each read back by its own reader. They are optional: `pip install tensorboard
# wandb mlflow trackio` into the Python of the tests.


def read_tensorboard(run_dir: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(each.step, each.value) for each in events.Scalars("step/loss")]


def read_wandb(run_dir: Path) -> list[tuple[int, float]]:
    """Read the log of an offline run: LevelDB's log format, with wandb's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    assert len(data) < 32768, "one block: no record is split"
    losses = []
    offset = 7  # the file's header
    while offset < len(data):
        _checksum, length, _kind = struct.unpack_from("<IHB", data, offset)
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[offset + 7 : offset + 7 + length])
        offset += 7 + length
        values = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        if "step/loss" in values:
            losses.append((int(values[STEP]), float(values["step/loss"])))
    return losses


def read_mlflow(run_dir: Path) -> list[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    numbers = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(numbers)
    history = client.get_metric_history(run.info.run_id, "step/loss")
    return [(each.step, each.value) for each in history]


def read_trackio(run_dir: Path) -> list[tuple[int, float]]:
    (path,) = run_dir.glob("trackio/*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    return [
        (step, json.loads(metrics)["step/loss"])
        for step, metrics in rows
        if "step/loss" in json.loads(metrics)
    ]


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_each_package_reads_back_the_losses_of_the_run(run_dir, name, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir / "trackio"))  # read when it is imported
    pytest.importorskip(name)
    # In a process of its own: wandb writes its file when its service ends.
    command = [sys.executable, "-m", "submission.report", str(run_dir), "--export", name]
    subprocess.run(command, cwd=ROOT, check=True)
    single = [(step, struct.unpack("f", struct.pack("f", loss))[0]) for step, loss in STEP_LOSS]
    assert READERS[name](run_dir) in (STEP_LOSS, single)
