"""Heartbeat file of a rank, which tells the launcher that the rank is alive, and its phase."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

RECORD_BYTES = 256
PHASE_CHARACTERS = 80  # of a longer phase, e.g. an op of the self-test, the rest is cut off


class Heartbeat:
    """The file `ranks/rank_<k>.heartbeat`, rewritten at every micro-batch.

    It shows the launcher which rank hangs, and in which phase. An update is one small write to an
    open file and takes some 10 µs.
    """

    def __init__(self, run_dir: Path, rank: int):
        self.rank = rank
        folder = run_dir / "ranks"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = os.open(folder / f"rank_{rank}.heartbeat", os.O_WRONLY | os.O_CREAT, 0o644)

    def write(self, step: int, phase: str, done: int = 0, total: int = 0) -> None:
        """Record that this rank has done `step` steps and is now in `phase`.

        `done` of `total` parts of the phase are done; 0 if it has no parts.

        A failed write is ignored, because it must not end a healthy run. If all writes fail, the
        launcher sees a hang.
        """
        record = {
            "rank": self.rank,
            "pid": os.getpid(),
            "step": step,
            "phase": phase[:PHASE_CHARACTERS],
            "time": time.time(),
            "done": done,
            "total": total,
        }
        text = json.dumps(record).ljust(RECORD_BYTES)
        # Otherwise the end of a longer record would remain behind a shorter one.
        assert len(text) == RECORD_BYTES
        with contextlib.suppress(OSError):
            os.pwrite(self.file, text.encode(), 0)
