"""Command line: python3 -m system_tuning check|apply|revert|hold.

`apply` saves the old values of all files in a journal before it writes the first file, so that
`revert` works even if `apply` was killed. The journal is a JSON object, path -> [old value, value
that `apply` writes]. It is in /run, because a reboot empties /run and resets the settings as well.
If `apply` runs several times, the journal keeps the oldest value of each path.

The settings are those of the whole host. In a container, `apply` and `hold` therefore change them
only with --in-container. `revert` is always allowed.

Exit codes, as in the whole project: 0 success, 2 wrong usage, 17 the journal cannot be read or
written, 18 a file does not have the wanted value, or the command is refused in a container.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from system_tuning.settings import SETTINGS, File, Setting, value_of

# Exit codes.
DONE = 0
JOURNAL = 17
NOT_DONE = 18
JOURNAL_PATH = "run/system_tuning.json"
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


def main(arguments: list[str] | None = None, root: Path = Path("/")) -> int:
    """Run the command and return its exit code.

    `root`: the root of the file system; tests pass a copy of a host's /proc and /sys.
    """
    options = _parse(arguments)
    settings = [setting for setting in SETTINGS if setting.name in options.only]
    journal = root / JOURNAL_PATH
    if options.command == "check":
        return check(settings, root, options.json)
    if options.command in ("apply", "hold") and not options.in_container:
        container = sign_of_container(root)
        if container and _files_to_change(settings, root):
            _print_error(
                f"{options.command} is refused in a container",
                f"{container} shows a container, and the settings change for the whole host",
                "run it on the host, or accept this with --in-container",
            )
            return NOT_DONE
    if options.command == "hold":
        _ignore_signals()
    try:
        with _locked(journal):
            changes = _change(options.command, settings, root, journal)
    except BlockingIOError:
        _print_error(
            f"{_holder(journal)} holds the settings",
            "only one process at a time may change them",
            "wait until it ends, or stop it",
        )
        return JOURNAL
    except PermissionError:
        _print_error(
            "only root can change these settings",
            f"this process runs as user {os.geteuid()}",
            "run the same command with sudo",
        )
        return NOT_DONE
    except (OSError, ValueError) as error:
        _print_error(f"cannot use the journal {journal}", str(error), "repair it, then try again")
        return JOURNAL
    reverted = all(change.status in ("put back", "unchanged") for change in changes)
    if options.command == "hold" and reverted:
        return DONE  # no output, because the reader of the pipe may have ended
    print(*(_grouped(changes) or ["nothing to do"]), sep="\n")
    if options.command == "apply" and changes:
        print(f"old values are in {journal}; `revert` or a reboot restores them")
    if not any(change.status in ("failed", "changed since") for change in changes):
        return DONE
    _print_error(
        "some files do not have the wanted value",
        "the lines above name each file and its reason",
        "remove the reasons, then try again; in a container, run this on the host",
    )
    return NOT_DONE


def _change(command: str, settings: Sequence[Setting], root: Path, journal: Path) -> list[Change]:
    """Run `apply`, `revert` or `hold` and return the changes."""
    if command == "revert":
        return revert(journal)
    if command == "apply":
        return apply(settings, root, journal)
    return hold(apply(settings, root, journal), journal)


def _ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP."""
    # A signal may reach the whole process group. It is meant for the program that started this one,
    # which ends `hold` by closing the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def sign_of_container(root: Path = Path("/")) -> str:
    """Return what shows that this process is in a container: a file or variable. "" outside."""
    for name in (".dockerenv", "run/.containerenv", ".singularity.d"):  # Docker, Podman, Apptainer
        if (root / name).exists():
            return f"/{name}"
    # The first of systemd-nspawn, LXC and Podman; the second of every Kubernetes pod.
    for variable in ("container", "KUBERNETES_SERVICE_HOST"):
        if os.environ.get(variable):
            return f"the variable {variable}"
    return ""


def _files_to_change(settings: Sequence[Setting], root: Path) -> list[File]:
    """Return the files of the settings that do not have the wanted value."""
    files = []
    for setting in settings:
        files += [file for file in setting.look(root) if file.now != file.want]
    return files


def _print_error(what: str, why: str, do: str) -> None:
    print(f"error: {what}\n  why: {why}\n  do:  {do}", file=sys.stderr)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m system_tuning",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    return parser.parse_args(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, also for `./run_and_time.sh tuning`."""
    parser.description = (
        "Check, apply or revert operating-system and CPU settings for training.\n"
        "GPU clocks and power limits are never changed."
    )
    parser.epilog = "settings:\n" + "\n".join(
        f"  {setting.name:<15} {setting.what}" for setting in SETTINGS
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON (check only)",
    )
    parser.add_argument(
        "command",
        choices=("check", "apply", "revert", "hold"),
        help="check: print what apply would change, and the risk of each change;"
        " apply: write the settings; revert: restore the old values;"
        " hold: apply, then revert when standard input ends",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="settings to check, apply or hold (default: all)",
    )
    parser.add_argument(
        "--in-container",
        action="store_true",
        help="apply or hold also in a container, where the settings change for the whole host",
    )


def check(settings: Sequence[Setting], root: Path, as_json: bool) -> int:
    """Print the current and the wanted values, and the risk of each change. Return DONE.

    Nothing is written, and every user may run it. `root`: as in `main`.
    """
    if as_json:
        values = {}
        for setting in settings:
            values[setting.name] = [dataclasses.asdict(file) for file in setting.look(root)]
        print(json.dumps(values, default=str))
        return DONE
    improvable = 0
    for setting in settings:
        files = setting.look(root)
        lines = _grouped([Change(**vars(file)) for file in files])
        if not files:
            state = "not supported here"
        elif all(file.now == file.want for file in files):
            state = "good"
        else:
            state = "could be better"
            improvable += 1
            lines += [f"what:    {setting.what}", f"risk:    {setting.risk}"]
        print(f"{setting.name}: {state}", *(f"    {line}" for line in lines), sep="\n")
    print(f"{improvable} settings could be better; apply writes them, as root")
    return DONE


def apply(settings: Sequence[Setting], root: Path, journal: Path) -> list[Change]:
    """Save the old values in the journal, then write the new ones."""
    files = _files_to_change(settings, root)
    entries = _read_journal(journal)
    for file in files:
        entries.setdefault(str(file.path), [file.now, file.want])
    _write_journal(journal, entries)
    return [_write(Change(**vars(file)), "set") for file in files]


def revert(journal: Path) -> list[Change]:
    """Restore every old value in the journal, in the reverse order of writing.

    Entries that could not be restored stay in the journal, so `revert` may be repeated.
    """
    entries = _read_journal(journal)
    changes = []
    for path, (old, applied) in reversed(entries.items()):
        changes.append(_put_back(Path(path), old, applied))
    restored = ("put back", "unchanged")
    left = {str(change.path) for change in changes if change.status not in restored}
    _write_journal(journal, {path: entry for path, entry in entries.items() if path in left})
    return changes


def hold(changes: list[Change], journal: Path) -> list[Change]:
    """Print the `changes` of `apply`, wait until standard input ends, and revert.

    If a file did not accept its value, revert at once.
    """
    print(*_grouped(changes), sep="\n")
    failed = [change for change in changes if change.status == "failed"]
    if not failed:
        print(HELD, flush=True)
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


@contextlib.contextmanager
def _locked(journal: Path) -> Iterator[None]:
    """Hold the journal's lock. Raise BlockingIOError if another process holds it."""
    with journal.with_suffix(".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _holder(journal: Path) -> str:
    """Describe the process that holds the journal's lock. The lock file contains its ID."""
    try:
        number = journal.with_suffix(".lock").read_text()
        name = Path(f"/proc/{int(number)}/cmdline").read_text().replace("\0", " ").strip()
    except (OSError, ValueError):
        return "another process"
    return f"process {number} ({name})"


def _read_journal(journal: Path) -> dict[str, list[str]]:
    """Return the journal's entries, path -> [old value, value that `apply` wrote].

    Raises ValueError if the file has another form.
    """
    try:
        entries = json.loads(journal.read_text()) if journal.exists() else {}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    pairs = entries.values() if isinstance(entries, dict) else [None]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, str) for value in pair)
        for pair in pairs
    ):
        raise ValueError("it must have an old and a new value, both strings, for each path")
    return entries


def _write_journal(journal: Path, entries: dict[str, list[str]]) -> None:
    """Replace the journal atomically. No fsync is needed, because a reboot deletes the journal."""
    temporary = journal.with_suffix(".new")
    temporary.write_text(json.dumps(entries, indent=1))
    temporary.rename(journal)


def _grouped(changes: Sequence[Change]) -> list[str]:
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


if __name__ == "__main__":
    sys.exit(main())
