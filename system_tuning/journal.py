"""The journal: the old value of a file is on disk before the file is written, so that a kill at any point can be reverted.

`journal.jsonl` holds one JSON object a line, appended and fsynced:

    {"op": "begin", "root": "/", "boot": "...", "time": ..., "verb": "apply"}     what follows belongs to this tree and boot
    {"op": "save", "knob": "...", "path": "...", "old": "1\\n", "new": "0"}        before the write
    {"op": "closed", "path": "...", "how": "..."}                                  the old value is back and was read back
    {"op": "done", "knob": "page_cache"}                                           one shot, for the record

The state is a fold over the lines: the first `old` of a path stands until it is closed, however often apply runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator

from system_tuning.files import Refused, Tree, check_writable

NAME, PREVIOUS, LOCK = "journal.jsonl", "journal.previous.jsonl", "lock"
MAX_BYTES = 4 << 20  # beyond this, and with nothing open, a new journal is begun; an apply on 384 CPUs writes some 0.2 MB


class JournalError(Exception):
    """The journal cannot be read or written. Nothing was written to the system since. `do` says what the user can do."""

    def __init__(self, what: str, do: str = ""):
        super().__init__(what)
        self.do = do


@dataclasses.dataclass
class Entry:
    """A file that we may have changed: its text before (`old`), and every value that was ours since."""

    path: str
    knob: str
    old: str
    boot: str
    ours: set[str] = dataclasses.field(default_factory=set)


class Journal:
    """The journal in `directory`, for the tree `root`. Reading creates nothing; use `locked()` around anything that writes."""

    def __init__(self, directory: str, root: str, boot: str):
        self.directory, self.root, self.boot = directory, root, boot
        self.path = os.path.join(directory, NAME)
        self.entries: dict[str, Entry] = {}
        self.cut = False  # the last line was being written when the process died; its write to the system had not begun
        self.num_lines = 0
        self._file, self._verb, self._begun = -1, "", False
        self._line_boot = ""  # of the lines being read

    def read(self) -> Journal:
        """Fold the lines into `entries`. Raises JournalError."""
        self._check_directory()
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fold(b"")
            return self
        except OSError as error:
            raise self._trouble("read", error) from None
        with os.fdopen(descriptor, "rb") as file:
            _check_owner(os.fstat(descriptor), self.path, stat.S_ISREG)
            self._fold(file.read())
        return self

    @contextlib.contextmanager
    def locked(self, verb: str) -> Iterator[Journal]:
        """Hold the lock and a descriptor to append to, with a fresh reading. Raises JournalError, also when another holds it."""
        try:
            os.makedirs(self.directory, mode=0o755, exist_ok=True)
            self._check_directory()
            lock = os.open(os.path.join(self.directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._trouble("write", error) from None
        try:
            self._take(lock)
            self.read()
            try:
                self._open_to_append()
            except OSError as error:
                raise self._trouble("write", error) from None
            self._begun, self._verb = False, verb
            yield self
        finally:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            os.close(lock)  # releases it, as the end of the process does

    def append(self, records: list[dict]) -> None:
        """Append and fsync; after the return the records are on disk. Raises JournalError."""
        if not records:
            return
        if not self._begun:
            records = [{"op": "begin", "root": self.root, "boot": self.boot, "time": time.time(), "verb": self._verb}, *records]
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise self._trouble("write", error) from None
        self._begun = True
        for record in records:
            self._take_in(record)

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise JournalError(f"another apply or revert holds {self.directory}", "wait for it to end, then run this again") from None
            raise self._trouble("lock", error) from None

    def _open_to_append(self) -> None:
        """Open, mend a cut last line, and put the file's own name on disk. A long journal with nothing open makes room first."""
        if not self.entries and os.path.exists(self.path) and os.path.getsize(self.path) > MAX_BYTES:
            os.rename(self.path, os.path.join(self.directory, PREVIOUS))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o644)
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if data and not data.endswith(b"\n"):
            last = data[data.rfind(b"\n") + 1 :]
            if _parse(last) is None:
                os.ftruncate(self._file, len(data) - len(last))
            else:
                os.write(self._file, b"\n")
        os.fsync(self._file)
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _fold(self, data: bytes) -> None:
        self.entries, self.cut, self.num_lines, self._line_boot = {}, False, 0, ""
        lines = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            is_unfinished = number == len(lines)  # nothing after the last newline, if all is well
            if is_unfinished and not line:
                break
            record = _parse(line)
            if record is None and is_unfinished:
                self.cut = True
                break
            try:
                if record is None:
                    raise ValueError("not a record")
                self._take_in(record)
            except (KeyError, TypeError, ValueError, Refused) as error:
                raise JournalError(
                    f"{self.path}, line {number} is damaged ({error})", "read the line, mend or remove it by hand, and run this again"
                ) from None
            self.num_lines += 1

    def _take_in(self, record: dict) -> None:
        match record["op"]:
            case "begin":
                if record["root"] != self.root:
                    raise JournalError(f"{self.path} belongs to the tree {record['root']!r}, not {self.root!r}", "give another --journal")
                self._line_boot = str(record["boot"])
            case "save":
                texts = [record[key] for key in ("path", "knob", "old", "new")]
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError("a field is no text")
                path, knob, old, new = texts
                check_writable(path, new)
                self.entries.setdefault(path, Entry(path, knob, old, self._line_boot)).ours.add(new)
            case "closed":
                self.entries.pop(record["path"], None)
            case "done":
                pass
            case other:
                raise ValueError(f"unknown op {other!r}")

    def _check_directory(self) -> None:
        try:
            _check_owner(os.stat(self.directory), self.directory, stat.S_ISDIR)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._trouble("read", error) from None

    def _trouble(self, verb: str, error: OSError) -> JournalError:
        return JournalError(f"cannot {verb} the journal in {self.directory}: {error.strerror}", "give a directory with --journal DIR")


def _parse(line: bytes) -> dict | None:
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None


def _check_owner(found: os.stat_result, path: str, is_kind: Callable[[int], bool]) -> None:
    """Old values go from here to the kernel: nobody else may have written them. Raises JournalError."""
    if not is_kind(found.st_mode):
        raise JournalError(f"{path} is not what it should be", "give another directory with --journal DIR")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise JournalError(f"others can write to {path}, and what it holds is written to the kernel", f"chown and chmod go-w {path}")


def boot_id(tree: Tree) -> str:
    """This boot's id; empty where the kernel has none. None of our settings outlives a boot, so entries of another one are history."""
    try:
        return tree.read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return ""
