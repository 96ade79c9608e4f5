"""Errors for the user: what happened, why, what to do, and an exit code for each kind.

The launcher exits with the error's code, and `failure.json` has the error's fields. torchrun itself
only ever returns 1. Therefore each rank writes its error to a rank record in the run directory
(`write_rank_record`), where the launcher reads it. Standard library only: the launcher imports this
module before torch.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from common.atomic_write import write_whole

# Environment variable that marks the processes of a run: its directory. The launcher finds the
# processes by it, and reports their failures.
LAUNCHED = "LAUNCH_RUN_DIR"
# A file in the run directory that is removed when the disk is full, to make space for the records
# of that failure.
RESERVE_FILE = ".reserve"
TRIES = 20  # of a write, 0.1 s apart
# Signs that the host has no more memory, processes or threads: errno, or words in a message.
MEMORY_ERRNOS = (errno.ENOMEM, errno.EAGAIN)
MEMORY_MESSAGES = (
    "can't start new thread",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "bad_alloc",
)
# Errnos of a disk that is full, read-only or failing.
DISK_ERRNOS = (
    errno.ENOSPC,
    errno.EFBIG,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    # Remote file systems (NFS, Lustre, FUSE, CIFS) whose server or device is away.
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EREMOTEIO,
)

# Errnos of flock on file systems without locks, such as some mounts of Lustre and NFS.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def listed(names: Collection[str], most: int = 3) -> str:
    """Return the first `most` names and the number of the others, as text for an error."""
    text = ", ".join(list(names)[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class RunError(Exception):
    """A failure with a message for the user: what happened, why, and what to do.

    Subclasses define its kind and exit code.
    """

    kind = "internal"
    exit_code = 1

    def __init__(self, what: str, why: str = "", do: str = ""):
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do

    def as_dict(self) -> dict:
        """Return the fields of failure.json."""
        return {
            "kind": self.kind,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "do": self.do,
        }

    def lines(self) -> str:
        """Return the error as up to three lines for the screen."""
        labelled = (("error: ", self.what), ("  why: ", self.why), ("  do:  ", self.do))
        return "\n".join(label + text for label, text in labelled if text)


class ConfigError(RunError):
    """An invalid config, command line, environment variable or combination of them."""

    kind = "config"
    exit_code = 2


class TargetMissed(RunError):
    """The run used up max_samples before it reached the target."""

    kind = "target_missed"
    exit_code = 10


class NonFinite(RunError):
    """A loss, gradient norm or logged value that is NaN or infinite."""

    kind = "non_finite"
    exit_code = 11


class OutOfMemory(RunError):
    """The memory of a GPU or of the host is full."""

    kind = "out_of_memory"
    exit_code = 12


class Hang(RunError):
    """A rank, a collective or the initialization made no progress within its limit."""

    kind = "hang"
    exit_code = 13


class RankLost(RunError):
    """A rank that exited or was killed, or a collective that failed because of that."""

    kind = "rank_lost"
    exit_code = 14


class DataError(RunError):
    """Missing, damaged or unsuitable training data or manifests."""

    kind = "data"
    exit_code = 15


class WeightsError(RunError):
    """Missing, damaged or unsuitable weights, adapters or checkpoints."""

    kind = "weights"
    exit_code = 16


class StorageError(RunError):
    """A file that cannot be written or read, as on a full disk, or that must not be replaced."""

    kind = "storage"
    exit_code = 17


class PreflightError(RunError):
    """A machine that is not ready: hardware, drivers or packages."""

    kind = "preflight"
    exit_code = 18


class CheckFailed(RunError):
    """A run that reached the target but did not pass the checks of its log or of its weights."""

    kind = "check_failed"
    exit_code = 20


# Signals that end a command with words and exit code 128 + n. Batch systems send the last three
# before a time limit or a preemption.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)


class Interrupted(RunError):
    """An interruption of this process by one of STOP_SIGNALS."""

    kind = "interrupted"

    def __init__(self, signal_number: int):
        what = f"stopped by signal {signal_number} ({signal.Signals(signal_number).name})"
        why = "someone, or the batch system, asked the command to stop"
        if signal_number == signal.SIGINT:
            what = "interrupted (Ctrl-C)"
            why = ""
        super().__init__(what, why)
        self.exit_code = 128 + signal_number


def failure_of(error: BaseException) -> RunError | None:
    """Return the RunError that explains an exception, or None if none is known.

    Explained are links that lead to themselves, missing memory, and failures of the disk.
    """
    reason = disk_reason(error)
    if isinstance(error, RunError):
        if not reason:
            return error
        return _disk_error(error.what if reason in error.what else f"{error.what}: {reason}")
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
        or number in MEMORY_ERRNOS
        or any(words in text for words in MEMORY_MESSAGES)
    ):
        return OutOfMemory(
            "the host has no more memory, processes or threads",
            text or "MemoryError",
            "end other programs; check ulimit -u and -v, "
            "and the container's limits of memory and processes",
        )
    if not reason:
        return None
    if isinstance(error, OSError):
        return _disk_error(f"{file_of(error) or 'a file'}: {reason}")
    return _disk_error(text)


def disk_reason(error: BaseException | None) -> str:
    """Return why a disk failed, or "" if `error` is of something else.

    An error of an input that was raised while one of the disk was handled, and not `from None`, is
    the disk's.
    """
    if isinstance(error, RunError):
        if not isinstance(error, ConfigError | DataError | WeightsError):
            return ""
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    text = str(error)
    for number in DISK_ERRNOS:
        reason = os.strerror(number)
        # Libraries in C++ and Rust have it in their text.
        in_text = (f"{reason} ({number})", f"{reason} (os error {number})")
        if getattr(error, "errno", None) == number or any(each in text for each in in_text):
            return reason
    return ""


def file_of(error: OSError) -> str:
    """Return the file that an error names. A read or write names none, but its caller has it."""
    if error.filename:
        return str(error.filename)
    names: list[str] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        files = [each for each in frame.f_locals.values() if isinstance(each, io.IOBase)]
        found = [getattr(file, "name", None) for file in files]  # a number without a path
        names = [name for name in found if isinstance(name, str)] or names
    return " or ".join(names)


def _disk_error(what: str) -> StorageError:
    return StorageError(
        what,
        "the disk is full, read-only or failing",
        "free space, or check the mount and the kernel log; then start again",
    )


def with_reserve(run_dir: Path, write: Callable[[], object]) -> None:
    """Call `write`. If it fails, as on a full disk, remove RESERVE_FILE and try again.

    Tries several times, because some disks free the space a little later.
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


def write_text(path: Path, text: str) -> None:
    """Write `path` atomically, for the user. Raises StorageError."""
    try:
        write_whole(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}",
            error.strerror or str(error),
            "free space, or name another existing directory",
        ) from error


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
