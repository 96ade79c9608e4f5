"""The journal: it holds the old values of all files before the first one is written, so that `revert` works after a kill.

One JSON file, replaced as a whole: {"boot": BOOT_ID, "files": {PATH: {"old": "1", "ours": ["0"]}}}. The first old value of a path
stays, however often `apply` runs. A reboot resets every setting: entries of another boot are dropped, and no fsync is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping

from system_tuning.files import Host, Refused, check_writable

FOLDER = "/var/lib/system_tuning"


class JournalError(Exception):
    """The journal cannot be read or written. Nothing was written to the system since."""


class Journal:
    """`files`: path -> {"old": value before the first apply, "ours": values that apply has written}."""

    def __init__(self, host: Host):
        self.folder = os.path.join(host.root, FOLDER.lstrip("/"))
        self.path = os.path.join(self.folder, "journal.json")
        has_boot_id = host.names("/proc/sys/kernel/random", "boot_id")
        self.boot = host.read("/proc/sys/kernel/random/boot_id").strip() if has_boot_id else ""
        self.files: dict[str, dict] = {}
        self.is_stale = False  # it was written before the last boot
        self.read()

    def read(self) -> None:
        """Raises JournalError for a journal that cannot be read, is damaged, or names a file that is not on the allow-list."""
        self.files, self.is_stale = {}, False
        try:
            with open(self.path, encoding="utf-8") as file:
                content = json.load(file)
            self.is_stale = content["boot"] != self.boot
            for path, entry in content["files"].items():
                for value in (entry["old"], *entry["ours"]):
                    check_writable(path, value)
            self.files = {} if self.is_stale else content["files"]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError, Refused) as error:
            raise JournalError(f"the journal {self.path} cannot be used: {error}") from None

    def add(self, changes: Mapping[str, tuple[str, str]]) -> None:
        """Note old and new value of each path, in the file when this returns. Raises JournalError."""
        for path, (old, new) in changes.items():
            entry = self.files.setdefault(path, {"old": old, "ours": []})
            entry["ours"] = sorted({*entry["ours"], new})
        self._write()

    def remove(self, paths: list[str]) -> None:
        """Forget paths whose old value is back. Raises JournalError."""
        for path in paths:
            self.files.pop(path, None)
        self._write()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the journal for writing, read afresh. Raises JournalError, also if another process holds it."""
        try:
            os.makedirs(self.folder, mode=0o755, exist_ok=True)
            lock = open(os.path.join(self.folder, "lock"), "w")  # noqa: SIM115 (closed by the `with` below)
        except OSError as error:
            raise JournalError(f"cannot write to {self.folder}: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise JournalError(f"another apply or revert is running ({self.folder} is locked)") from None
            self.read()
            yield

    def _write(self) -> None:
        temporary = self.path + ".new"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"boot": self.boot, "files": self.files}, file, indent=1)
            os.rename(temporary, self.path)
        except OSError as error:
            raise JournalError(f"cannot write {self.path}: {error.strerror}") from None
