"""One rank of a timed run: what it was asked to do. Its output is in reports.py, its stages are in timed_run.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """The config and the arguments of one rank of a timed run."""

    benchmark: str
    config: RunConfig
    config_name: str  # of the TOML, as it goes into the log
    seed: int
    rank: int
    device: str  # "cpu" or "cuda"
    run_dir: Path  # results go here
    data_dir: Path
    checkpoint: str | None = None  # --checkpoint: when to save the state of training
    continues: Path | None = (
        None  # --continue: the run directory with the checkpoint to continue from
    )
    save: bool = False  # --save: write the trained model after the clock
