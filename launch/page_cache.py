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
    """Clear `files` from the page cache. Returns how: `fadvise`, `drop_caches`, or `no` if any page of them is still in memory.

    Per file and without root: fsync, since dirty pages stay, then POSIX_FADV_DONTNEED. Opens the files, reads nothing.
    A file that another user owns and this one can only read counts as cleared: the kernel does not tell.
    """
    paths = list(files)
    with contextlib.suppress(OSError, AttributeError):
        for path in paths:
            _advise(path)
        if not any(map(resident, paths)):
            return "fadvise"
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        if not any(map(resident, paths)):
            return "drop_caches"
    return "no"


def _advise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: Path) -> int:
    """Pages of `path` that are in memory; 0 also where the kernel does not tell (mm/mincore.c: it tells owners and writers only)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if not (os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)):
            return 0
        return sum(_resident(descriptor, start, min(CHUNK, status.st_size - start)) for start in range(0, status.st_size, CHUNK))
    finally:
        os.close(descriptor)


def _resident(descriptor: int, start: int, length: int) -> int:
    """Through the C library, since mmap.mmap gives no address for mincore. Maps the pages without touching them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    area = (ctypes.c_void_p(address), ctypes.c_size_t(length))
    try:
        pages = -(-length // mmap.PAGESIZE)
        answer = ctypes.create_string_buffer(pages)
        if libc.mincore(*area, answer):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(byte & 1 for byte in answer.raw[:pages]) if any(answer.raw[:pages]) else 0
    finally:
        libc.munmap(*area)
