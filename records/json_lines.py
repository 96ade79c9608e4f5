"""Files of JSON lines that are only ever appended to: a line is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os


def append_line(descriptor: int, value: dict, sync: bool = False) -> None:
    """Append `value` to an open file, with `sync` to the disk. Raises OSError, and then leaves the file as it was."""
    end, data = os.fstat(descriptor).st_size, json.dumps(value).encode() + b"\n"
    try:
        while data:
            data = data[os.write(descriptor, data) :]  # after a short write the next one raises the reason
        if sync:
            os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise
