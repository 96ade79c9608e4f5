"""The outputs of one rank: MLPerf log, events, progress lines and heartbeat."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.training.heartbeat import Heartbeat
from common.training.metrics import Events, Meter, ProgressLog
from common.training.mllog import RunLog
from common.training.rank_comparison import RankComparison
from common.variables import Use, select


@dataclass
class Reports:
    """The outputs of one rank. Only rank 0 writes the log, the events and the progress lines."""

    log: RunLog
    events: Events
    progress: ProgressLog
    heartbeat: Heartbeat
    meter: Meter | None = None  # set at the end of the warm-up
    rank_comparison: RankComparison | None = None  # set before training on several GPUs
    # As this process got them. Modules of engines add defaults, also those that are not used.
    variables: dict[str, str] = field(default_factory=lambda: select(Use.RECORDED, os.environ))
    over: bool = False  # whether run_stop was written, or the run failed before it
    phase_began: float = field(default_factory=time.monotonic)

    @staticmethod
    def open(run_dir: Path, rank: int) -> Reports:
        """Create the files of this rank in `run_dir`. Raises StorageError if the log exists."""
        writes = rank == 0
        return Reports(
            log=RunLog(run_dir / "result.txt" if writes else None),
            events=Events(run_dir / "events.jsonl" if writes else None),
            progress=ProgressLog(enabled=writes),
            heartbeat=Heartbeat(run_dir, rank),
        )

    @property
    def samples(self) -> int:
        """Training sequences consumed."""
        return self.meter.samples if self.meter else 0

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.meter.samples // self.meter.samples_per_step if self.meter else 0

    def phase_done(self, name: str, **facts) -> None:
        """Write an event for a phase before run_start: its seconds, and `facts`.

        The phase began at the end of the phase before it.
        """
        now = time.monotonic()
        self.events.write("phase", name=name, seconds=now - self.phase_began, time_s=0.0, **facts)
        self.phase_began = now

    def saving(self) -> None:
        """Write a heartbeat while the trained weights are saved, after the last step."""
        self.heartbeat.write(self.step, "save")

    def succeed(self, samples: int, loss: float) -> None:
        """Stop the clock of a run that reached its goal, and close its log.

        Raises StorageError if run_stop cannot be written, or if the log cannot be synced after it.
        """
        minutes = self.log.run_stop(samples, "success")
        self.over = True
        self.events.write("verdict", status="success", samples=samples, loss=loss, minutes=minutes)
        self.log.close()

    def abort(self) -> None:
        """Log that the run failed. Does nothing if the failure came after the end of the run."""
        if self.over:
            return
        self.over = True
        self.log.abort(self.samples)
        self.events.write(
            "verdict", status="aborted", samples=self.samples, loss=None, minutes=None
        )
