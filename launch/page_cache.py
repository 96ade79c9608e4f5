"""Clear data files from the page cache before a run, and verify that they are gone.

The MLPerf rules require it (section Data State). Linux may ignore the advice for pages that are
dirty or mapped by a process, so mincore is called afterwards. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

CHUNK = 2**30  # bytes mapped at once; mincore writes one byte per page


def clear(files: Iterable[Path]) -> str:
    """Clear `files` from the page cache. Return `fadvise`, or `no` if that fails.

    It fails if a page is still in memory, or a file cannot be opened. Each file gets fsync, since
    dirty pages would stay, and then POSIX_FADV_DONTNEED. Neither needs root. The files are opened
    but not read. A file of another user that this user cannot write counts as cleared, since the
    kernel does not report its pages.
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
    """Return the number of pages of `path` that are in memory.

    Return 0 if the kernel does not report them, which it does only to owners and writers of a file
    (mm/mincore.c).
    """
    status = path.stat()
    if not (os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)):
        return 0
    with path.open("rb") as file:
        return sum(
            _resident(file.fileno(), start, min(CHUNK, status.st_size - start))
            for start in range(0, status.st_size, CHUNK)
        )


def _resident(descriptor: int, start: int, length: int) -> int:
    """Return the number of resident pages, without touching them.

    The mapping is private and writable, because ctypes gives only the address of a writable buffer.
    Raise OSError if mincore fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-length // mmap.PAGESIZE)
    answer = ctypes.create_string_buffer(pages)  # one byte for each page
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start) as area:
        first = ctypes.c_char.from_buffer(area)
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(length), answer)
        del first  # a mapping cannot be closed while a pointer into it exists
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    if not any(answer.raw):  # the usual case, which this test makes fast
        return 0
    return sum(byte & 1 for byte in answer.raw)  # the other bits are undefined
