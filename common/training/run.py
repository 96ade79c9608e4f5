"""Arguments of one rank of a timed run. Outputs: reports.py. Stages: timed_run.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """The config and the arguments of one rank of a timed run."""

    benchmark: str
    config: RunConfig
    config_name: str  # name of the TOML in the log
    seed: int
    rank: int
    device: str  # "cpu" or "cuda"
    run_dir: Path  # results go here
    data_dir: Path
    checkpoint: str | None = None  # --checkpoint: when to save the state of training
    # --continue: the run directory with the checkpoint to continue from
    continues: Path | None = None
    save: bool = False  # --save: write the trained model after the clock
