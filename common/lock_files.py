"""Locks that are held for minutes or days, with the name of their owner in a file.

flock alone is not enough. Some file systems refuse it, and on some mounts it is local to a machine
(`local_lock=flock` of NFS). Each owner therefore has a file of its own, `<name>.<random>.lock`. Its
one line says which process owns it, and is renewed every RENEW_S.

- An owner that can be examined, and has ended, owns nothing. Its file is ignored.
- An owner on another machine or in another container counts as alive until it has been silent for
  SILENT_S. Then a person decides: `take_over`.

A process removes a file only if it owns the lock. It owns the lock only if it sees no other owner
after it has written its own file. So two processes cannot both own it, with or without flock.
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import NO_LOCKS, StorageError
from common.process_identity import (
    ProcessIdentity,
    is_gone,
    parse,
    same_machine,
    this_process,
)

RENEW_S = 30.0
SILENT_S = RENEW_S + 600.0
SETTLE_S = 1.0  # longest wait for processes that asked for the lock at the same time


@dataclass(frozen=True)
class Owner:
    """A process that owns a lock, as far as can be seen from here."""

    process: ProcessIdentity | None  # None: its file cannot be read
    silent_s: float = 0.0  # since it renewed its file; 0 if it is known to be alive

    @property
    def is_silent(self) -> bool:
        """Return whether nothing has been heard of the owner for longer than SILENT_S."""
        return self.silent_s > SILENT_S

    def __str__(self) -> str:
        if self.process is None:
            return "an unknown process"
        return f"process {self.process.pid} on {self.process.host}"


def flock(descriptor: int, operation: int) -> bool | None:
    """Lock an open file until it is closed. Return False if another process has locked it.

    Return None if the file system has no locks. `operation`: of fcntl.flock. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


@contextlib.contextmanager
def owned(folder: Path, name: str, take_over: bool = False) -> Iterator[Owner | None]:
    """Own the lock `name` of `folder` in the block, and yield None, unless another process does.

    Then yield that owner. `take_over`: ignore owners that are silent. Raises StorageError if the
    lock's file cannot be written.
    """
    path = folder / f"{name}.{secrets.token_hex(6)}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise _not_written(path, error) from None
    try:
        try:
            has_flock = flock(descriptor, fcntl.LOCK_EX) is not None
            record = {"process": str(this_process()), "flock": has_flock}
            _write(descriptor, record)
        except OSError as error:
            raise _not_written(path, error) from None
        other = _other_owner(path, folder, name, take_over)
        if other:
            yield other
            return
        for left_behind in _files(folder, name):
            if left_behind != path:
                _remove(left_behind)
        with _renewing(descriptor, record):
            yield None
    finally:
        _remove(path)
        os.close(descriptor)


def owner(folder: Path, name: str) -> Owner | None:
    """Return the owner of the lock `name` of `folder`, or None. Nothing is written."""
    owners = [_owner_in(path) for path in _files(folder, name)]
    # One that is silent may not have been removed by the next one yet.
    return min(filter(None, owners), key=lambda each: each.silent_s, default=None)


def _other_owner(own: Path, folder: Path, name: str, take_over: bool) -> Owner | None:
    """Return the owner of the lock other than the file `own`, or None.

    If several processes ask for the lock at once, the one whose file has the first name gets it.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        others = {}
        for path in _files(folder, name):
            found = _owner_in(path) if path != own else None
            if found and not (take_over and found.is_silent):
                others[path] = found
        if not others:
            return None
        first = min(others)
        if first < own or time.monotonic() > deadline:
            return others[first]
        time.sleep(0.05)


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files of all processes that own the lock, owned it, or ask for it.

    Earlier versions locked `<name>.lock`.
    """
    return sorted(folder.glob(f"{name}.*lock"))


def _owner_in(path: Path) -> Owner | None:
    """Return the process that owns the file at `path`, or None if it owns nothing anymore."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError:
        return Owner(None)
    try:
        # A shared lock: two readers do not take each other for the owner.
        locked = flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        record = json.loads(os.pread(descriptor, 4096, 0) or "{}")
        process = parse(str(record.get("process")))
        renewed = float(record.get("renewed", 0.0))
        had_flock = record.get("flock") is True
    except OSError:
        return Owner(None)
    except (ValueError, TypeError, AttributeError):
        process = None
    finally:
        os.close(descriptor)
    if locked is False:
        return Owner(process)
    if process is None:
        return None  # it has not asked for the lock yet: it will, and then see who owns it
    gone = is_gone(process)
    if gone is None and locked and had_flock and same_machine(process):
        gone = True  # also in another container, since one kernel keeps the locks
    if gone is None:
        return Owner(process, max(0.0, time.time() - renewed))
    return None if gone else Owner(process)


def _write(descriptor: int, record: dict) -> None:
    """Write `record` with the time, as a line of the same length each time. Raises OSError."""
    line = json.dumps(record | {"renewed": int(time.time())}) + "\n"
    os.pwrite(descriptor, line.encode(), 0)
    os.fsync(descriptor)  # other machines see it


@contextlib.contextmanager
def _renewing(descriptor: int, record: dict) -> Iterator[None]:
    """Write `record` again every RENEW_S during the block."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a full disk keeps the line of before
                _write(descriptor, record)

    thread = threading.Thread(target=renew, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # its owner is gone, or soon will be
        path.unlink()


def _not_written(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror}",
        "two processes must not do the same work",
        "use a writable directory with free space: set LOGDIR",
    )
