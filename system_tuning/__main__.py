"""Command line: python3 -m system_tuning check|apply|revert|hold.

The journal holds the old values of all files before the first file is written, so that `revert`
works after a kill. It is a JSON object, path -> [old value, value that apply writes]. It is in
/run, which a reboot empties just as it resets the settings. The first old value of a path is kept,
however often `apply` runs.

Exit codes are those of the whole package: 0 done, 2 usage, 17 the journal cannot be used, 18
something could not be done.
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
# The line with which `hold` reports that every file has its value.
HELD = "held until the end of the input"


@dataclasses.dataclass(frozen=True)
class Change(File):
    """A file and the result of changing it."""

    status: str = ""  # "failed" and "changed since" end with exit code 18

    def became(self, status: str, note: str = "") -> Change:
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
    # Ignore signals meant for the program that started this one: closing the pipe ends `hold`.
    if options.command == "hold":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    try:
        with _locked(journal):
            steps = (
                revert(journal) if options.command == "revert" else apply(settings, root, journal)
            )
            if options.command == "hold":
                steps = hold(steps, journal)
    except BlockingIOError:
        _print_error(f"{_holder(journal)} holds the settings", "wait until it ends, or stop it")
        return JOURNAL
    except PermissionError:
        _print_error("only root can write these files", "run the same command with sudo")
        return NOT_DONE
    except (OSError, ValueError) as error:
        _print_error(f"cannot use the journal {journal}: {error}", "repair it, then try again")
        return JOURNAL
    if options.command == "hold" and all(
        step.status in ("put back", "unchanged") for step in steps
    ):
        return DONE  # no output, because the reader may be gone
    print(*(_grouped(steps) or ["nothing to do"]), sep="\n")
    if options.command == "apply" and steps:
        print(f"old values are in {journal}; `revert` or a reboot restores them")
    if not any(step.status in ("failed", "changed since") for step in steps):
        return DONE
    _print_error(
        "some files do not have the right value",
        "see the lines above; in a container, run this on the host",
    )
    return NOT_DONE


def _print_error(what: str, do: str) -> None:
    print(f"error: {what}\n  do:  {do}", file=sys.stderr)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m system_tuning",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    return parser.parse_args(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, also for `./run_and_time.sh tuning`."""
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
        help="check: print what apply would change, and the risk;"
        " hold: apply, and revert at the end of standard input",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="settings to check, apply or hold (default: all)",
    )


def check(settings: Sequence[Setting], root: Path, as_json: bool) -> int:
    """Print the present values, better values and the risk. Read-only, for any user."""
    if as_json:
        print(
            json.dumps(
                {
                    setting.name: [dataclasses.asdict(file) for file in setting.look(root)]
                    for setting in settings
                },
                default=str,
            )
        )
        return DONE
    worse = 0
    for setting in settings:
        files = setting.look(root)
        steps = [Change(**vars(file)) for file in files]
        is_good = all(file.now == file.want for file in files)
        worse += not is_good
        about = [] if is_good else [f"what:    {setting.what}", f"risk:    {setting.risk}"]
        if not files:
            state = "not supported here"
        elif is_good:
            state = "good"
        else:
            state = "could be better"
        print(
            f"{setting.name}: {state}",
            *(f"    {line}" for line in [*_grouped(steps), *about]),
            sep="\n",
        )
    print(f"{worse} settings could be better; apply writes them, as root")
    return DONE


def apply(settings: Sequence[Setting], root: Path, journal: Path) -> list[Change]:
    """Save the old values in the journal, then write the new ones."""
    files = [file for setting in settings for file in setting.look(root) if file.now != file.want]
    entries = _read_journal(journal)
    for file in files:
        entries.setdefault(str(file.path), [file.now, file.want])
    _write_journal(journal, entries)
    return [_write(Change(**vars(file)), "set") for file in files]


def revert(journal: Path) -> list[Change]:
    """Restore every old value in the journal, the last one written first.

    This may run any number of times.
    """
    entries = _read_journal(journal)
    steps = [_put_back(Path(path), old, ours) for path, (old, ours) in reversed(entries.items())]
    left = {str(step.path) for step in steps if step.status not in ("put back", "unchanged")}
    _write_journal(journal, {path: entry for path, entry in entries.items() if path in left})
    return steps


def hold(steps: list[Change], journal: Path) -> list[Change]:
    """Print what `apply` has done, wait until the input ends, and revert.

    If a file did not accept its value, revert at once.
    """
    print(*_grouped(steps), sep="\n")
    failed = [step for step in steps if step.status == "failed"]
    if not failed:
        print(HELD, flush=True)
        sys.stdin.read()
    return [*failed, *revert(journal)]


def _put_back(path: Path, old: str, ours: str) -> Change:
    step = Change(path, value_of(path), old)
    if step.now == old:
        return step.became("unchanged")
    if step.now != ours:
        return step.became(
            "changed since", f"by another program, or it is gone: apply wrote {ours}"
        )
    return _write(step, "put back")


def _write(step: Change, done: str) -> Change:
    try:
        step.path.write_text(f"{step.want}\n")
    except OSError as error:
        return step.became("failed", str(error.strerror))
    now = value_of(step.path)
    return step.became(done) if now == step.want else step.became("failed", f"reads back as {now}")


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
    """Return the process that holds the lock, which wrote its number there."""
    try:
        number = journal.with_suffix(".lock").read_text()
        name = Path(f"/proc/{int(number)}/cmdline").read_text().replace("\0", " ").strip()
    except (OSError, ValueError):
        return "another process"
    return f"process {number} ({name})"


def _read_journal(journal: Path) -> dict[str, list[str]]:
    """Return the journal's entries. Raise ValueError unless they are pairs of values by path."""
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
    """Replace the journal atomically. There is no fsync, since a reboot makes it void."""
    temporary = journal.with_suffix(".new")
    temporary.write_text(json.dumps(entries, indent=1))
    temporary.rename(journal)


def _grouped(steps: Sequence[Change]) -> list[str]:
    """Return the lines of output, one for all files that differ only in their CPU number."""
    groups = Counter(
        dataclasses.replace(step, path=Path(re.sub(r"(cpu|policy)[0-9]+", r"\1*", str(step.path))))
        for step in steps
    )
    lines = []
    for step, count in groups.items():
        change = step.want if step.now == step.want else f"{step.now or '-'} -> {step.want}"
        line = f"{step.status:<14} {step.path}: {change}".lstrip()
        if count > 1:
            line += f" ({count} files)"
        if step.note:
            line += f"  [{step.note}]"
        lines.append(line)
    return lines


if __name__ == "__main__":
    sys.exit(main())
