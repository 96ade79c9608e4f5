"""A job of Slurm that is preempted, requeued and continued, and what MLflow is told of each run.

`run.sub` and everything that it starts are real. Stand-ins replace Slurm's commands and the package
mlflow.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy import wait_until

from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.paths import ROOT
from common.training.continuation import STOP_REQUEST, newest
from tests.tools.inject_faults import CONFIG, MODEL

pytestmark = pytest.mark.slow

VOCABULARY = MODEL["vocab_size"]
SLURM = {
    "scontrol": "echo localhost",
    "srun": 'while [ "$1" != ./run_and_time.sh ]; do shift; done\nexec "$@"',
}
MLFLOW = """
import os
from types import SimpleNamespace

entities = SimpleNamespace(Metric=lambda *values: values)

class MlflowClient:
    def __init__(self, tracking_uri):
        pass
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name):
        return "1"
    def create_run(self, experiment_id, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))
    def log_param(self, run_id, key, value):
        pass
    def log_batch(self, run_id, metrics):
        pass
    def set_tag(self, run_id, key, value):
        pass
    def set_terminated(self, run_id, status):
        with open(os.environ["STATUS_FILE"], "a") as file:
            file.write(status + "\\n")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data, config and stand-ins."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "config.toml").write_text(CONFIG.format(folder=folder, samples=800, interval=200))
    for name, text in SLURM.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (folder / "packages").mkdir()
    (folder / "packages" / "mlflow.py").write_text(MLFLOW)
    (folder / "data").mkdir()
    generator = np.random.default_rng(1)
    for split in ("train", "validation"):
        writer = IndexedDatasetWriter(folder / "data" / split, VOCABULARY)
        for _ in range(64):
            writer.add(generator.integers(3, 40, 500, np.uint16))
        writer.finish()
    return folder


class JobOfSlurm:
    """run.sub in a job, in the background, with the results in `log_dir`."""

    def __init__(self, folder: Path, log_dir: Path, *arguments: str):
        self.log_dir = log_dir
        log_dir.mkdir(exist_ok=True)
        hidden = ("NEXP", "DGXSYSTEM", "DGXNGPU", "GPU_KIND", "MODEL", "CONT")
        environment = {name: text for name, text in os.environ.items() if name not in hidden}
        path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        environment |= {
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(folder / "packages"),
            "STATUS_FILE": str(log_dir / "statuses"),
            "CUDA_VISIBLE_DEVICES": "",
            "DATADIR": str(folder / "data"),
            "LOGDIR": str(log_dir),
            "SEED": "2814749767",
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        command = ["bash", str(ROOT / "run.sub"), "open_llama", "--track", "mlflow"]
        command += ["--config", str(folder / "config.toml"), *arguments]
        with (log_dir / "slurm.out").open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def end(self) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(600)
        finally:
            self.process.kill()  # the ranks end with the launcher

    @property
    def said(self) -> str:
        return (self.log_dir / "slurm.out").read_text()

    @property
    def statuses(self) -> list[str]:
        """What MLflow was told, run by run."""
        return (self.log_dir / "statuses").read_text().split()

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in (self.log_dir / "open_llama").glob("*_seed*"))


def events(run: Path, kind: str) -> dict[int, float]:
    """Return step -> loss of the events `step` or `eval` of a run."""
    records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {each["step"]: each["loss"] for each in records if each["event"] == kind}


def heartbeat(run: Path) -> dict:
    try:
        return json.loads((run / "ranks" / "rank_0.heartbeat").read_text())
    except (OSError, ValueError):
        return {"step": 0}


def preempt(job: JobOfSlurm) -> int:
    """Send SIGUSR1 in the middle of a step, and return the step."""
    wait_until(lambda: job.runs or job.process.poll() is not None, 300)
    (run,) = job.runs
    wait_until(lambda: heartbeat(run)["step"] > 5 or job.process.poll() is not None, 300)
    rank = heartbeat(run)["pid"]
    os.kill(rank, signal.SIGSTOP)
    step = heartbeat(run)["step"]
    time.sleep(2.0)  # the launcher reads the heartbeat
    job.process.send_signal(signal.SIGUSR1)
    wait_until((run / STOP_REQUEST).exists, 120)
    os.kill(rank, signal.SIGCONT)
    return step


def test_a_preempted_job_is_continued_with_the_losses_of_an_uninterrupted_one(folder, tmp_path):
    arguments = ("--checkpoint", "9999s", "--grace", "200", "--continue", "auto")
    whole = JobOfSlurm(folder, tmp_path / "whole", *arguments)
    assert whole.end() == 0, whole.said

    job = JobOfSlurm(folder, tmp_path / "results", *arguments)
    step = preempt(job)
    assert job.end() == 128 + signal.SIGUSR1, job.said
    (first,) = job.runs
    saved = newest(first).facts["step"]
    assert step <= saved <= step + 2 and max(events(first, "step")) <= saved < 200
    assert json.loads((first / "failure.json").read_text())["kind"] == "interrupted"

    job = JobOfSlurm(folder, tmp_path / "results", *arguments)
    assert job.end() == 0, job.said
    _, second = job.runs
    (reference,) = whole.runs
    assert min(events(second, "step")) > saved and max(events(second, "step")) == 200
    for kind in ("step", "eval"):
        expected = events(reference, kind)
        found = events(first, kind) | events(second, kind)
        assert found and all(loss == expected[at] for at, loss in found.items() if at in expected)
        assert max(found) == max(expected)
    for path in (reference / "model").iterdir():
        assert path.read_bytes() == (second / "model" / path.name).read_bytes()
    assert job.statuses == ["KILLED", "FINISHED"] and whole.statuses == ["FINISHED"]


SHORT = ("max_samples=64", "eval_interval_samples=32")


@pytest.mark.parametrize(
    ("settings", "code", "status"),
    [
        (("target_loss=20.0",), 0, "FINISHED"),
        (("target_loss=0.1",), 10, "FAILED"),
        (("opt_base_learning_rate=2e9", "opt_learning_rate_warmup_steps=0"), 11, "FAILED"),
    ],
    ids=["target reached", "not reached", "failed"],
)
def test_mlflow_is_told_how_a_job_ended(folder, tmp_path, settings, code, status):
    arguments = [word for setting in (*SHORT, *settings) for word in ("--set", setting)]
    job = JobOfSlurm(folder, tmp_path / "results", *arguments)
    assert job.end() == code, job.said
    assert job.statuses == [status]
