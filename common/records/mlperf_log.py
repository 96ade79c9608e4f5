"""Reader of MLPerf log files, whose records are lines with the token `:::MLLOG`.

A record is the JSON object after the last token of a line. Text before the token, such as the `0: `
of `srun -l`, does not belong to it. The official parser strips it too (mlcommons/logging,
compliance_checker/mlp_parser/ruleset_610.py). Lines end at LF, CRLF or CR.

`events` yields one record at a time, so that `check` of a log of 190 MB takes 34 MB of memory. With
all records in memory, 233 MB took 2,865 MB. `read` returns the records that the caller needs.
Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.records.json_lines import is_number

TOKEN = ":::MLLOG"
BOM = "\xef\xbb\xbf"  # the byte order mark of UTF-8, read as latin-1
STRUCTURE = re.compile(r"_start$|_stop$|^eval_")  # keys that mark the parts of a run
MAX_KEPT = 10_000  # records that are kept in memory of any other key, about 10 MB
HEAD_BYTES = 4096  # bytes read to detect the type of a file
NAME_LOGS = "name MLPerf result logs, as text"
MAGIC = {  # first bytes of compressed files
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}


@dataclass(frozen=True, slots=True)
class Event:
    """A record of the log."""

    line: int  # from 1
    time_ms: float  # milliseconds since 1970
    key: str
    value: object
    metadata: dict
    namespace: str
    event_type: str
    prefix: str  # the text before the token

    @property
    def samples(self):
        """Unchecked samples_count of the metadata, or None."""
        return self.metadata.get("samples_count")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line with the token but without a valid record. The official parser may stop at it."""

    line: int
    reason: str


@dataclass
class Log:
    """The records of a log in order, and by key."""

    events: list[Event] = field(default_factory=list)  # the records kept in memory
    bad: list[BadLine] = field(default_factory=list)
    path: Path | None = None  # the file, if it has more records than `events`; else None
    folder: Path | None = None  # the file's folder; None if the records are not from a file
    by_key: dict[str, list[Event]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for event in self.events:
            self.by_key.setdefault(event.key, []).append(event)

    def every(self) -> Iterator[Event]:
        """Yield each record of the log. Reads the file again if not all are in memory."""
        if self.path is None:
            yield from self.events
            return
        for record in events(self.path):
            if isinstance(record, Event):
                yield record

    def all(self, key: str) -> list[Event]:
        """Return the records of `key`. If it is not in STRUCTURE, at most the first MAX_KEPT."""
        return self.by_key.get(key, [])

    def first(self, key: str) -> Event | None:
        """Return the first record of `key`, or None."""
        return next(iter(self.all(key)), None)

    def value(self, key: str):
        """Return the first value of `key`, or None."""
        return next((event.value for event in self.all(key)), None)

    def last(self, key: str):
        """Return the last value of `key`, or None."""
        return next((event.value for event in reversed(self.all(key))), None)


def read(path: Path, repeated: Collection[str] | None = None) -> Log:
    """Return a log with all records of the keys in STRUCTURE, and the first MAX_KEPT of any other.

    `Log.every` yields the remaining records too.

    `repeated`: keep all records of these keys instead, and the first one of any other key.
    `Log.every` then yields only these.

    Raises ConfigError as `events` does.
    """
    kept: list[Event] = []
    bad: list[BadLine] = []
    counts: dict[str, int] = {}
    complete = True
    for record in events(path):
        if isinstance(record, BadLine):
            bad.append(record)
            continue
        count = counts.get(record.key, 0) + 1
        counts[record.key] = count
        if repeated is None:
            keep = count <= MAX_KEPT or STRUCTURE.search(record.key) is not None
            complete = complete and keep
        else:
            keep = count == 1 or record.key in repeated
        if keep:
            kept.append(record)
    return Log(kept, bad, None if complete else path, path.parent)


def events(path: Path) -> Iterator[Event | BadLine]:
    """Yield the records of `path`.

    Raises ConfigError if it cannot be read or is not text.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(
            f"{path} is not a regular file", "a pipe or a device may never end", NAME_LOGS
        )
    try:
        with path.open("rb") as binary:
            head = binary.read(HEAD_BYTES)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot read {path}", why, NAME_LOGS) from error
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            raise ConfigError(
                f"{path} is compressed ({kind})",
                "the official tools read logs as text only",
                "decompress it first",
            )
    if not head:
        raise ConfigError(
            f"{path} is empty", "a run writes its first line when it starts", NAME_LOGS
        )
    line_feeds = 0
    returns = 0
    # latin-1, as in the official parser: every byte is a valid character. newline="" splits lines
    # at CR, LF and CRLF, and keeps these characters.
    with path.open(encoding="latin-1", newline="") as file:
        for text in file:
            if TOKEN in text:
                yield parse((line_feeds or returns) + 1, text)
            if text.endswith("\n"):
                line_feeds += 1
            else:
                # Progress bars print CR within a line, so it ends a line only in a file without
                # line feeds.
                returns += 1


def parse(line: int, text: str) -> Event | BadLine:
    """Return the record of one line with the token. `line`: its number."""
    prefix, _, rest = text.rpartition(TOKEN)
    prefix = prefix.removeprefix(BOM)
    if not rest.startswith(" "):
        return BadLine(line, "no blank after the token: the official parser does not see the line")
    try:
        record = json.loads(rest)
    except (ValueError, RecursionError) as error:
        return BadLine(line, f"not one JSON object and nothing else: {error}")
    if not isinstance(record, dict):
        return BadLine(line, f"not one JSON object but {type(record).__name__}")
    missing = [key for key in ("time_ms", "key", "value", "metadata") if key not in record]
    if missing:
        return BadLine(line, f"a record without {', '.join(missing)}")
    # The official parser accepts metadata of any type.
    metadata = record["metadata"] if isinstance(record["metadata"], dict) else {}
    if not is_number(record["time_ms"]) or type(record["key"]) is not str:
        return BadLine(line, "time_ms or key has the wrong type")
    if json.dumps(record["key"]) not in rest:
        return BadLine(line, "the key has escapes: some official tools search the text of the line")
    namespace = str(record.get("namespace") or "")
    event_type = str(record.get("event_type") or "")
    return Event(
        line,
        record["time_ms"],
        record["key"],
        record["value"],
        metadata,
        namespace,
        event_type,
        prefix,
    )
