"""Arguments of one rank of a timed run (outputs: reports.py, stages: timed_run.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from common.benchmarks import rules_of
from common.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """The config and the arguments of one rank of a timed run."""

    benchmark: str  # name of its folder
    config: RunConfig
    config_name: str  # name of the TOML, for the log
    seed: int
    rank: int
    device: str  # "cpu" or "cuda"
    run_dir: Path  # directory of the results
    data_dir: Path
    checkpoint: str | None = None  # --checkpoint: when to save the training state
    continues: Path | None = None  # --continue: directory of the run whose checkpoint is loaded
    save: bool = False  # --save: write the trained model after run_stop
    # Record of a frozen base, made before the base is loaded. Empty in runs without checkpoints.
    base_files: dict[str, list] = field(default_factory=dict)


def frozen_weights_folder(run: Run) -> Path | None:
    """Return the folder of the weights that stay frozen in this run, if there are any."""
    rules = rules_of(run.benchmark, run.config)
    return rules.frozen_weights_folder(run.config, run.data_dir, os.environ)
