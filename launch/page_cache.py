"""Clear data files from the page cache before a run, as the rules ask (Data State), and verify that they are gone.

Linux keeps pages that are dirty or mapped by a process in spite of the advice, so mincore is asked afterwards. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

CHUNK = 2**30  # bytes mapped at once: mincore answers one byte per page


def clear(files: Iterable[Path]) -> str:
    """Clear `files` from the page cache. Returns how: `fadvise`, or `no` if any page of them is still in memory.

    Per file and without root: fsync, since dirty pages stay, then POSIX_FADV_DONTNEED. Opens the files, reads nothing.
    A file that another user owns and this one can only read counts as cleared: the kernel does not tell.
    """
    paths = list(files)
    with contextlib.suppress(OSError):
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "no" if any(map(resident, paths)) else "fadvise"
    return "no"


def resident(path: Path) -> int:
    """Pages of `path` that are in memory; 0 also where the kernel does not tell (mm/mincore.c: it tells owners and writers only)."""
    status = path.stat()
    if not (os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)):
        return 0
    with path.open("rb") as file:
        return sum(
            _resident(file.fileno(), start, min(CHUNK, status.st_size - start))
            for start in range(0, status.st_size, CHUNK)
        )


def _resident(descriptor: int, start: int, length: int) -> int:
    """Maps the pages without touching them. A private mapping, because ctypes gives the address of a writable buffer only."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start) as area:
        first = ctypes.c_char.from_buffer(area)
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(length), answer)
        del first  # a mapping with a pointer into it cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in answer.raw) if any(answer.raw) else 0
