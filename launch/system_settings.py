"""Settings of system_tuning: apply them during a run (--system-tuning), and report them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common.errors import PreflightError
from common.terminal import inform, print_stderr
from system_tuning.__main__ import sign_of_container
from system_tuning.changes import HELD
from system_tuning.settings import BETTER, state

HOLD = [sys.executable, "-m", "system_tuning", "hold"]


def advice(root: Path = Path("/")) -> str:
    """Name the settings that could be better, "" if there are none."""
    names = ", ".join(name for name, text in state(root).items() if text == BETTER)
    return f"{names} {BETTER} on this host (AMD's MLPerf settings)" if names else ""


def remedy(root: Path = Path("/")) -> str:
    """Say how to get the settings of `advice`. In a container they cannot be applied."""
    check = "see ./run_and_time.sh system-tuning check"
    if sign_of_container(root):
        return f"{check}, and apply them on the host of this container"
    return f"{check}, or use --system-tuning"


@contextlib.contextmanager
def applied(project: Path) -> Iterator[None]:
    """Apply the settings inside the block, with sudo unless this process runs as root.

    The settings are restored afterwards, and also if this process is killed, which closes its end
    of the pipe. Raise PreflightError if a setting cannot be applied.
    """
    command = HOLD if os.geteuid() == 0 else ["sudo", *HOLD]
    try:
        process = subprocess.Popen(
            command, cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise _not_applied(str(error)) from None
    assert process.stdin is not None and process.stdout is not None
    try:
        messages = []
        while (line := process.stdout.readline()) and line.strip() != HELD:
            messages.append(line.strip())
        if not line:
            _print_messages(messages)  # the files and the reasons
            raise _not_applied(f"{' '.join(command)} ended with exit code {process.wait()}")
        inform(*(f"system     {text}" for text in messages))
        yield
    finally:
        process.stdin.close()
        _print_messages(process.stdout.read().splitlines())  # settings that were not restored
        process.wait()
        process.stdout.close()


def _print_messages(messages: list[str]) -> None:
    for message in messages:
        print_stderr(f"system     {message}")


def _not_applied(why: str) -> PreflightError:
    return PreflightError(
        "--system-tuning cannot apply the settings",
        why,
        "see ./run_and_time.sh system-tuning check, or run without --system-tuning",
    )
