"""Changes of settings: apply them, revert them by the journal, and describe them.

Old values are in the journal before the first file is written, so `revert` works even if `apply`
was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from system_tuning.journal import read, write
from system_tuning.settings import File, Setting, value_of

# `hold` prints this line when every file has its value.
HELD = "held until the end of the input"


@dataclasses.dataclass(frozen=True)
class Change(File):
    """A file and the result of changing it.

    `now`: the value before the change. `want`: the value that the change should write.
    """

    # "" before the change; then "set", "put back", "unchanged", "failed" or "changed since". The
    # last two lead to exit code 18.
    status: str = ""

    def with_status(self, status: str, note: str = "") -> Change:
        return dataclasses.replace(self, status=status, note=note or self.note)


def files_to_change(settings: Sequence[Setting], root: Path) -> list[File]:
    """Return the files of the settings that do not have the wanted value."""
    files = []
    for setting in settings:
        files += [file for file in setting.files(root) if file.now != file.want]
    return files


def apply(settings: Sequence[Setting], root: Path, journal: Path) -> list[Change]:
    """Save the old values in the journal, then write the new ones.

    Raises OSError or ValueError if the journal cannot be used. No file has been written then.
    """
    files = files_to_change(settings, root)
    entries = read(journal)
    for file in files:
        entries.setdefault(str(file.path), [file.now, file.want])
    write(journal, entries)
    return [_write(Change(**vars(file)), "set") for file in files]


def revert(journal: Path) -> list[Change]:
    """Restore every old value in the journal, in the reverse order of writing.

    Entries that could not be restored stay in the journal, so `revert` may be repeated. Raises
    OSError or ValueError if the journal cannot be used.
    """
    entries = read(journal)
    changes = []
    for path, (old, applied) in reversed(entries.items()):
        changes.append(_put_back(Path(path), old, applied))
    restored = ("put back", "unchanged")
    left = {str(change.path) for change in changes if change.status not in restored}
    write(journal, {path: entry for path, entry in entries.items() if path in left})
    return changes


def hold(changes: list[Change], journal: Path) -> list[Change]:
    """Print the `changes` of `apply`, wait until standard input ends, and revert.

    If a file did not accept its value, revert at once. The same holds if the output cannot be
    written or the input cannot be read, for example because the caller was killed.
    """
    failed = [change for change in changes if change.status == "failed"]
    with contextlib.suppress(OSError, ValueError):
        print(*grouped(changes), sep="\n")
        if not failed:
            print(HELD, flush=True)
            if sys.stdin is not None:  # None if standard input is closed
                sys.stdin.read()
    return [*failed, *revert(journal)]


def _put_back(path: Path, old: str, applied: str) -> Change:
    """Restore the value `old`, unless the file no longer has the value that `apply` wrote."""
    change = Change(path, value_of(path), old)
    if change.now == old:
        return change.with_status("unchanged")
    if change.now != applied:
        note = f"by another program, or it is gone: apply wrote {applied}"
        return change.with_status("changed since", note)
    return _write(change, "put back")


def _write(change: Change, done: str) -> Change:
    """Write the wanted value and read it back. Return the change with status `done` or "failed"."""
    try:
        change.path.write_text(f"{change.want}\n")
    except OSError as error:
        return change.with_status("failed", str(error.strerror))
    now = value_of(change.path)
    if now != change.want:
        return change.with_status("failed", f"reads back as {now}")
    return change.with_status(done)


def grouped(changes: Sequence[Change]) -> list[str]:
    """Return the lines of output, one for all changes that differ only in the CPU's number."""
    groups: Counter[Change] = Counter()
    for change in changes:
        pattern = re.sub(r"(cpu|policy)[0-9]+", r"\1*", str(change.path))
        groups[dataclasses.replace(change, path=Path(pattern))] += 1
    lines = []
    for change, count in groups.items():
        values = f"{change.now or '-'} -> {change.want}"
        if change.now == change.want:
            values = change.want
        line = f"{change.status:<14} {change.path}: {values}".lstrip()
        if count > 1:
            line += f" ({count} files)"
        if change.note:
            line += f"  [{change.note}]"
        lines.append(line)
    return lines
