"""The failures a user can cause or meet: what happened, why we think so, what to do, and an exit code per family.

The launcher ends with `exit_code`; `failure.json` holds the same fields. torchrun itself only ever returns 1, so the
code travels through the rank records that `write_rank_record` leaves in the run directory.
Standard library only: the launcher imports this before torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class RunError(Exception):
    """A failure with a message for the user. Subclasses name the family and its exit code."""

    kind = "internal"
    exit_code = 1

    def __init__(self, what: str, why: str = "", do: str = ""):
        super().__init__(what)
        self.what, self.why, self.do = what, why, do

    def as_dict(self) -> dict:
        return {"kind": self.kind, "exit_code": self.exit_code, "what": self.what, "why": self.why, "do": self.do}

    def lines(self) -> str:
        labelled = (("error: ", self.what), ("  why: ", self.why), ("  do:  ", self.do))
        return "\n".join(label + text for label, text in labelled if text)


class ConfigError(RunError):
    kind, exit_code = "config", 2


class TargetMissed(RunError):
    kind, exit_code = "target_missed", 10


class NonFinite(RunError):
    kind, exit_code = "non_finite", 11


class OutOfMemory(RunError):
    kind, exit_code = "out_of_memory", 12


class Hang(RunError):
    kind, exit_code = "hang", 13


class RankLost(RunError):
    kind, exit_code = "rank_lost", 14


class DataError(RunError):
    kind, exit_code = "data", 15


class WeightsError(RunError):
    kind, exit_code = "weights", 16


class StorageError(RunError):
    kind, exit_code = "storage", 17


class PreflightError(RunError):
    kind, exit_code = "preflight", 18


class CheckFailed(RunError):
    kind, exit_code = "check_failed", 20


class Interrupted(RunError):
    """SIGINT or SIGTERM reached this process."""

    kind = "interrupted"

    def __init__(self, signal_number: int):
        why = "someone, or the batch system, asked the run to stop"
        super().__init__(f"stopped by signal {signal_number}", why, "start it again when ready")
        self.exit_code = 128 + signal_number


def write_rank_record(run_dir: Path, rank: int, outcome: str, error: RunError | None = None, **facts) -> None:
    """Leave `ranks/rank_<rank>.json`: how this rank ended. `outcome` is `done`, `failed` or `interrupted`.

    Written to a temporary name and renamed, so that a reader sees all of it or nothing.
    """
    folder = Path(run_dir) / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"rank": rank, "pid": os.getpid(), "outcome": outcome, "time": time.time(), **facts}
    if error is not None:
        record.update(error.as_dict())
    temporary = folder / f".rank_{rank}.tmp"
    temporary.write_text(json.dumps(record))
    temporary.rename(folder / f"rank_{rank}.json")
