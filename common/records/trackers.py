"""Trackers: TensorBoard, Weights & Biases, MLflow and Trackio behind one interface.

Each package is optional. Its server and its keys come from its own environment variables or
configuration (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...), never from a command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common.errors import PreflightError
from common.records import run_states

PROJECT = "mlperf-llama-training"
# The axes of plots: optimizer steps, or seconds since sampling began.
STEP = "step"
SECONDS = "seconds"


# State of a run -> its status in MLflow, FAILED for all others.
MLFLOW_STATUS = {
    run_states.GOOD: "FINISHED",
    run_states.RUNNING: "RUNNING",
    run_states.INTERRUPTED: "KILLED",
    run_states.LOST: "KILLED",
}


class Tracker(Protocol):
    """A run in one tracking package. Each method may raise any error of that package."""

    def log(self, axis: str, position: int, values: Mapping[str, float]) -> None:
        """Record `values` at `position` of `axis`, STEP or SECONDS."""

    def finish(self, state: str, outcome: str) -> None:
        """Write or send everything that was recorded, and how the run ended.

        `state`: a key of run_states.WORDS. `outcome`: the state and its cause in words.
        """


class TensorBoard:
    """TensorBoard's event files, in RUN/tensorboard."""

    def __init__(self, run_dir: Path, facts: Mapping[str, str]):
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(run_dir / "tensorboard"))
        self.Summary = Summary
        rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
        self._add_text("run", f"| | |\n|-|-|\n{rows}", "config and versions")

    def log(self, axis: str, position: int, values: Mapping[str, float]) -> None:
        scalars = [
            self.Summary.Value(tag=name, simple_value=value) for name, value in values.items()
        ]
        self._add(scalars, position)

    def _add_text(self, tag: str, text: str, description: str) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(tag, description)
        value = self.Summary.Value(tag=tag, tensor=make_tensor_proto([text]), metadata=metadata)
        self._add([value], 0)

    def _add(self, values: list[Any], position: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        summary = self.Summary(value=values)
        self.writer.add_event(Event(wall_time=time.time(), step=position, summary=summary))

    def finish(self, state: str, outcome: str) -> None:
        self._add_text("outcome", outcome, "how the run ended")
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. With WANDB_MODE=offline, it is only written to RUN/wandb."""

    def __init__(self, run_dir: Path, facts: Mapping[str, str]):
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        # The GPU samples of the run are logged instead of wandb's own.
        settings = wandb.Settings(x_disable_stats=True, console="off")
        self._start(wandb, run_dir, facts, project=project, dir=str(run_dir), settings=settings)
        self.run.define_metric("*", step_metric=STEP)
        self.run.define_metric("gpu*", step_metric=SECONDS)

    def _start(self, package: Any, run_dir: Path, facts: Mapping[str, str], **options: Any) -> None:
        """Start the run. `options`: other arguments of the package's `init`."""
        group = run_dir.parent.name
        self.run = package.init(name=run_dir.name, group=group, config=dict(facts), **options)

    def log(self, axis: str, position: int, values: Mapping[str, float]) -> None:
        self.run.log({axis: position, **values})

    def finish(self, state: str, outcome: str) -> None:
        self.run.summary["outcome"] = outcome
        # wandb calls a run finished or, with another exit code than 0, failed.
        self.run.finish(exit_code=0 if state == run_states.GOOD else 1)


class Trackio(WeightsAndBiases):
    """A run of Trackio, whose API is that of wandb, in TRACKIO_DIR or Trackio's own directory."""

    def __init__(self, run_dir: Path, facts: Mapping[str, str]):
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # The GPU samples of the run are logged instead of Trackio's own.
        own_samples = {"auto_log_gpu": False, "auto_log_cpu": False}
        self._start(trackio, run_dir, facts, project=project, embed=False, **own_samples)

    def log(self, axis: str, position: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=position)

    def finish(self, state: str, outcome: str) -> None:
        self.run.finish()  # Trackio's runs have no status


class MLflow:
    """A run of MLflow, on the server that MLFLOW_TRACKING_URI names or in RUN/mlflow.db."""

    def __init__(self, run_dir: Path, facts: Mapping[str, str]):
        import mlflow

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir}/mlflow.db"
        self.Metric = mlflow.entities.Metric
        self.client = mlflow.MlflowClient(tracking_uri=address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(name)
        self.id = self.client.create_run(experiment_id, run_name=run_dir.name).info.run_id
        for key, value in facts.items():
            self.client.log_param(self.id, key, value)

    def log(self, axis: str, position: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.Metric(name, value, now, position) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def finish(self, state: str, outcome: str) -> None:
        self.client.set_tag(self.id, "outcome", outcome)
        self.client.set_terminated(self.id, MLFLOW_STATUS.get(state, "FAILED"))


TRACKERS: dict[str, type[Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def require_installed(name: str) -> None:
    """Raise PreflightError if the package of tracker `name` is not installed."""
    if importlib.util.find_spec(name) is None:
        raise PreflightError(
            f"{name} is not installed",
            f"{sys.executable} has no module {name}",
            shlex.join([sys.executable, "-m", "pip", "install", name]),
        )
