"""Arguments of one rank of a timed run (outputs: reports.py, stages: timed_run.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
