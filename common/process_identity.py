"""Identity of a process that others can examine later: is the writer of this file gone?

A process ID alone is not enough: it is used again by another process, and it means something else
on another machine or in another container. Containers of one machine have host names of their own,
and a container may change its name. Therefore the boot ID identifies the machine. Standard library
only.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TEXT = re.compile(r"([0-9a-f-]*)_(\d*)_(\d+)_(\d*)_([\w.-]*)", re.ASCII)


@dataclass(frozen=True)
class ProcessIdentity:
    """The values that identify a process. Empty or 0: this system does not say."""

    host: str  # for messages only
    boot: str  # random ID of the kernel's boot
    pid_namespace: str  # inode number of the namespace that `pid` belongs to
    pid: int
    start: int  # clock ticks from boot to the start of the process

    def __str__(self) -> str:
        """Return the identity as text that can be part of a file name. `parse` reads it."""
        host = re.sub(r"[^\w.-]", "-", self.host, flags=re.ASCII)[:63]
        return f"{self.boot}_{self.pid_namespace}_{self.pid}_{self.start}_{host}"


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    pid = os.getpid()
    _, start = _state_and_start(pid)
    return ProcessIdentity(socket.gethostname(), _boot(), _pid_namespace(), pid, start)


def parse(text: str) -> ProcessIdentity | None:
    """Return the identity that `str` wrote, or None if `text` is not one."""
    match = TEXT.fullmatch(text)
    if not match:
        return None
    boot, namespace, pid, start, host = match.groups()
    return ProcessIdentity(host, boot, namespace, int(pid), int(start or 0))


def same_machine(process: ProcessIdentity) -> bool:
    """Return whether the process belongs to this boot of this machine, in any container."""
    return bool(process.boot) and process.boot == _boot()


def is_gone(process: ProcessIdentity) -> bool | None:
    """Return whether the process has ended. None: it cannot be examined from here.

    A process of another machine, boot or PID namespace cannot be examined.
    """
    if not same_machine(process) or process.pid_namespace != _pid_namespace():
        return None
    try:
        os.kill(process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # it is another user's, whose /proc entries may be hidden
    state, start = _state_and_start(process.pid)
    if not start or not process.start:
        return None
    return start != process.start or state in "ZX"  # a zombie has ended


def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return str((PROC / "self/ns/pid").stat().st_ino)
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state of a process (one letter) and its start in clock ticks, or ("", 0)."""
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses.
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0
