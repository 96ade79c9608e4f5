"""Append-only files of JSON lines. A failed write leaves no partial line. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard


def append_line(descriptor: int, value: dict, sync: bool = False) -> None:
    """Append `value` as one line. See `append`."""
    append(descriptor, json.dumps(value).encode() + b"\n", sync)


def append(descriptor: int, data: bytes, sync: bool = False) -> None:
    """Append whole lines to an open file. With `sync`, wait until they are on the disk.

    Raises OSError. The file is then unchanged.
    """
    end = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError."""
    while data:
        # A write may be short, on a full disk for example. The next one then raises the reason.
        written = os.write(descriptor, data)
        data = data[written:]


def read(path: Path) -> tuple[list[dict], list[str]]:
    """Return (JSON objects of `path`, one per line; notes about lines that cannot be read).

    A missing file has no objects. JSON values that are not objects are skipped. Raises OSError.
    """
    records = []
    notes = []
    if not path.exists():
        return [], [f"{path.name} is missing"]
    if not path.is_file():
        return [], [f"{path.name} is not a regular file"]
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                notes.append(f"{path.name} line {number} is cut off or damaged")
                continue
            if isinstance(record, dict):
                records.append(record)
    return records, notes


class Tail:
    """A reader that returns the lines appended to a file since its last call."""

    def __init__(self, path: Path | int):
        """Start at the beginning of `path`, which may be a file descriptor."""
        self.path = path
        self.offset = 0

    def lines(self, to_the_end: bool = False) -> list[str]:
        """Return the new lines. `to_the_end`: include a last line without a line feed.

        Returns none if the file does not exist (yet).
        """
        with (
            contextlib.suppress(OSError),
            open(self.path, "rb", closefd=isinstance(self.path, Path)) as file,
        ):
            text = os.pread(file.fileno(), 2**24, self.offset)
            whole = text if to_the_end else text[: text.rfind(b"\n") + 1]
            self.offset += len(whole)
            return whole.decode(errors="replace").splitlines()
        return []

    def records(self) -> Iterator[dict]:
        """Yield the JSON objects in the new lines, and skip other lines."""
        while lines := self.lines():
            for line in lines:
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float. True and False are not."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
