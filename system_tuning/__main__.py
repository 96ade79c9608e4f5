"""Command line: python3 -m system_tuning check|apply|revert|hold.

The settings apply to the whole host. In a container, `apply` and `hold` therefore change them only
with --in-container. `revert` is always allowed.

Exit codes, as in the whole project: 0 success, 2 wrong usage, 17 the journal cannot be read or
written, or the output cannot be written, 18 a file does not have the wanted value, or the command
is refused in a container, 141 the reader of the output ended early.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from system_tuning.changes import Change, apply, files_to_change, grouped, hold, revert
from system_tuning.journal import JOURNAL_PATH, holder, locked
from system_tuning.settings import SETTINGS, Setting

# Exit codes.
SUCCESS = 0
WRONG_USAGE = 2
JOURNAL_ERROR = 17
OUTPUT_ERROR = 17
NOT_DONE = 18
PIPE_CLOSED = 141  # 128 + SIGPIPE


def main(arguments: list[str] | None = None, root: Path = Path("/")) -> int:
    """Run the command and return its exit code.

    `root`: the root of the file system; tests pass a copy of a host's /proc and /sys.
    """
    options = _parse(arguments)
    if options.command == "revert" and options.only:
        _print_error(
            "revert takes no --only",
            "it restores every value in the journal",
            "revert everything, then apply the settings to keep with apply --only",
        )
        return WRONG_USAGE
    if options.command != "check" and options.json:
        _print_error(f"{options.command} takes no --json", "only check prints JSON", "leave it out")
        return WRONG_USAGE
    only = options.only or [setting.name for setting in SETTINGS]
    settings = [setting for setting in SETTINGS if setting.name in only]
    journal = root / JOURNAL_PATH
    if options.command == "check":
        return check(settings, root, options.json)
    if options.command in ("apply", "hold") and not options.in_container:
        container = sign_of_container(root)
        if container and files_to_change(settings, root):
            _print_error(
                f"{options.command} is refused in a container",
                f"{container} shows a container, and the settings change for the whole host",
                "run it on the host, or accept this with --in-container",
            )
            return NOT_DONE
    if options.command == "hold":
        _ignore_signals()
    try:
        with locked(journal):
            changes = _change(options.command, settings, root, journal)
    except BlockingIOError:
        _print_error(
            f"{holder(journal)} holds the settings",
            "only one process at a time may change them",
            "wait until it ends, or stop it",
        )
        return JOURNAL_ERROR
    except PermissionError:
        _print_error(
            "only root can change these settings",
            f"this process runs as user {os.geteuid()}",
            "run the same command with sudo",
        )
        return NOT_DONE
    except (OSError, ValueError) as error:
        _print_error(f"cannot use the journal {journal}", str(error), "repair it, then try again")
        return JOURNAL_ERROR
    return _report(options.command, changes, journal)


def _change(command: str, settings: Sequence[Setting], root: Path, journal: Path) -> list[Change]:
    """Run `apply`, `revert` or `hold` and return the changes."""
    if command == "revert":
        return revert(journal)
    if command == "apply":
        return apply(settings, root, journal)
    return hold(apply(settings, root, journal), journal)


def _report(command: str, changes: list[Change], journal: Path) -> int:
    """Print the `changes` that `command` made, and return its exit code."""
    reverted = all(change.status in ("put back", "unchanged") for change in changes)
    if command == "hold" and reverted:
        return SUCCESS  # no output, because the reader of the pipe may have ended
    print(*(grouped(changes) or ["nothing to do"]), sep="\n")
    if command == "apply" and changes:
        print(f"old values are in {journal}; `revert` or a reboot restores them")
    if not any(change.status in ("failed", "changed since") for change in changes):
        return SUCCESS
    _print_error(
        "some files do not have the wanted value",
        "the lines above name each file and its reason",
        "remove the reasons, then try again; in a container, run this on the host",
    )
    return NOT_DONE


def _ignore_signals() -> None:
    """Ignore the signals that stop a run."""
    # A signal may reach the whole process group. It is meant for the program that started this one,
    # which ends `hold` by closing the pipe.
    for name in ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)


def sign_of_container(root: Path = Path("/")) -> str:
    """Return the file or variable that shows that this process is in a container, or ""."""
    for name in (".dockerenv", "run/.containerenv", ".singularity.d"):  # Docker, Podman, Apptainer
        if (root / name).exists():
            return f"/{name}"
    # The first of systemd-nspawn, LXC and Podman; the second of every Kubernetes pod.
    for variable in ("container", "KUBERNETES_SERVICE_HOST"):
        if os.environ.get(variable):
            return f"the variable {variable}"
    return ""


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
    """Add the arguments of the command, also for `./run_and_time.sh system-tuning`."""
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
        metavar="NAME",
        help="settings to check, apply or hold (default: all)",
    )
    parser.add_argument(
        "--in-container",
        action="store_true",
        help="apply or hold also in a container, where the settings change for the whole host",
    )


def check(settings: Sequence[Setting], root: Path, as_json: bool) -> int:
    """Print the current and the wanted values, and the risk of each change. Return SUCCESS.

    Nothing is written, and every user may run it. `root`: as in `main`.
    """
    if as_json:
        values = {}
        for setting in settings:
            values[setting.name] = [dataclasses.asdict(file) for file in setting.files(root)]
        print(json.dumps(values, default=str))
        return SUCCESS
    improvable = 0
    for setting in settings:
        files = setting.files(root)
        lines = grouped([Change(**vars(file)) for file in files])
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
    return SUCCESS


def _run() -> int:
    """Run the command and return its exit code. Print no traceback if stdout cannot be written."""
    try:
        code = main()
        print(end="", flush=True)
        return code
    except OSError as error:
        # The interpreter flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        _print_error(
            "cannot write the output",
            str(error),
            "free space, and run check to see the values that the files have now",
        )
        return OUTPUT_ERROR


if __name__ == "__main__":
    sys.exit(_run())
