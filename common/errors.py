"""Errors that a user can cause or encounter: what happened, the probable reason, what to do, and an
exit code per kind.

The launcher ends with `exit_code`, and `failure.json` holds the same fields. torchrun itself only
ever returns 1, so the code travels in the rank records that `write_rank_record` leaves in the run
directory. Standard library only: the launcher imports this module before torch.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

# Environment variable of all processes of a run. The launcher finds them by it, and reports their
# failures to the user.
LAUNCHED = "LAUNCH_RUN_DIR"
# Removed from a run's directory when the disk is full, so that the records of that failure fit.
RESERVE_FILE = ".reserve"
TRIES = 20  # with a tenth of a second in between
NO_MEMORY = (errno.ENOMEM, errno.EAGAIN)
DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_NO_MEMORY = (
    "can't start new thread",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "bad_alloc",
)


class RunError(Exception):
    """A failure with a message for the user. A subclass defines its kind and exit code."""

    kind = "internal"
    exit_code = 1

    def __init__(self, what: str, why: str = "", do: str = ""):
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do

    def as_dict(self) -> dict:
        return {
            "kind": self.kind,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "do": self.do,
        }

    def lines(self) -> str:
        labelled = (("error: ", self.what), ("  why: ", self.why), ("  do:  ", self.do))
        return "\n".join(label + text for label, text in labelled if text)


class ConfigError(RunError):
    kind = "config"
    exit_code = 2


class TargetMissed(RunError):
    kind = "target_missed"
    exit_code = 10


class NonFinite(RunError):
    kind = "non_finite"
    exit_code = 11


class OutOfMemory(RunError):
    kind = "out_of_memory"
    exit_code = 12


class Hang(RunError):
    kind = "hang"
    exit_code = 13


class RankLost(RunError):
    kind = "rank_lost"
    exit_code = 14


class DataError(RunError):
    kind = "data"
    exit_code = 15


class WeightsError(RunError):
    kind = "weights"
    exit_code = 16


class StorageError(RunError):
    kind = "storage"
    exit_code = 17


class PreflightError(RunError):
    kind = "preflight"
    exit_code = 18


class CheckFailed(RunError):
    kind = "check_failed"
    exit_code = 20


class Interrupted(RunError):
    """An interruption of this process by SIGINT or SIGTERM."""

    kind = "interrupted"

    def __init__(self, signal_number: int):
        why = "someone, or the batch system, asked the run to stop"
        super().__init__(f"stopped by signal {signal_number}", why, "start it again when ready")
        self.exit_code = 128 + signal_number


def failure_of(error: BaseException) -> RunError | None:
    """Return the RunError that explains an exception of Python or of the system, or None if its
    meaning is unknown.
    """
    if isinstance(error, RunError):
        return error
    number = getattr(error, "errno", None)
    text = str(error).partition("\n")[0]
    if number == errno.ELOOP or text.startswith("Symlink loop"):
        path = getattr(error, "filename", None) or text.removeprefix("Symlink loop from ")
        return ConfigError(
            f"{path} is a link that leads to itself",
            "no file can be reached through it",
            "remove the link, or name the file itself",
        )
    if (
        isinstance(error, MemoryError)
        or number in NO_MEMORY
        or any(words in text for words in _NO_MEMORY)
    ):
        return OutOfMemory(
            "the host has no more memory, processes or threads",
            text or "MemoryError",
            "end other programs; check ulimit -u and -v, "
            "and the container's limits of memory and processes",
        )
    if isinstance(error, OSError) and number in DISK:
        return StorageError(
            f"{error.filename or 'a file of the run'}: {error.strerror}",
            "the disk is full, read-only or failing",
            "free space, or check the mount and the kernel log; then start again",
        )
    return None


def with_reserve(run_dir: Path, write: Callable[[], object]) -> None:
    """Call `write`. If the disk is full, remove RESERVE_FILE and try again, because some disks free
    the space a little later.
    """
    for attempt in range(TRIES):
        try:
            write()
            return
        except (OSError, StorageError):
            if attempt == TRIES - 1:
                raise
            (Path(run_dir) / RESERVE_FILE).unlink(missing_ok=True)
            time.sleep(0.1)


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` under a temporary name and rename it: a reader sees all of it or nothing. Raises
    OSError.
    """
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_record(run_dir: Path, name: str, text: str) -> None:
    """Write `name` in `run_dir`, even if the disk is full. Raises OSError."""
    with_reserve(run_dir, lambda: write_whole(Path(run_dir) / name, text.encode()))


def write_rank_record(
    run_dir: Path, rank: int, outcome: str, error: RunError | None = None, **facts
) -> None:
    """Write `ranks/rank_<rank>.json`, the record of how this rank ended. Raises OSError.

    `outcome`: `done`, `failed` or `interrupted`.
    """
    record = {"rank": rank, "pid": os.getpid(), "outcome": outcome, "time": time.time(), **facts}
    if error is not None:
        record.update(error.as_dict())
    write_record(run_dir, f"ranks/rank_{rank}.json", json.dumps(record))
