"""Run a command on several nodes at the same time, by ssh, srun or another command."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO

from common.errors import ConfigError
from common.paths import ROOT

NODE = re.compile(r"[A-Za-z0-9_.:@-]+")  # name or address of a host
CONNECT_S = 10  # for ssh to connect
END_S = 8.0  # for a command to end after its stdin was closed
VICTIMS_S = 10.0  # for the other nodes to end after one of them has failed
POLL_S = 0.1
TIMED_OUT = 124  # exit code of timeout(1)
# The command must end with its connection, so it runs in the background while this shell reads
# stdin. Without stdin the command would end at once, hence the first line.
SHELL = """
read -r _ || {{ echo 'error: no stdin (write kubectl exec -i)' >&2; exit 1; }}
cd {root} || exit 1
export PYTHONUTF8=1 PYTHONSAFEPATH=1 CUDA_DEVICE_ORDER="${{CUDA_DEVICE_ORDER:-PCI_BUS_ID}}"
export PYTHONPATH={root}"$(printf %s ":$PYTHONPATH" | tr -s : | sed 's/:$//')"
exec 3<&0
timeout {limit_s:.0f} env {command} </dev/null 3<&- &
pid=$!
(while read -r _; do :; done; kill $pid) <&3 >/dev/null 2>&1 &
watch=$!
wait $pid
code=$?
kill $watch
exit $code
"""
# Lines on stderr that say why a command failed. The last line of a traceback is one of them.
REASON = re.compile(r"^error: (.*)|(\w*(?:Error|Watchdog)\b.*)")


def node_names(text: str) -> list[str]:
    """Return the nodes of `host1,host2` or of a Slurm list such as `gpu[01-04]`.

    Raises ConfigError.
    """
    if "[" in text:
        try:
            text = subprocess.run(
                ["scontrol", "show", "hostnames", text],
                capture_output=True,
                text=True,
                check=True,
                timeout=CONNECT_S,
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            reason = "is not installed" if isinstance(error, FileNotFoundError) else error
            raise ConfigError(
                f"--nodes {text!r} cannot be expanded",
                f"scontrol, which expands a list of Slurm, {reason}",
                "separate the hosts by commas",
            ) from None
    names = text.replace(",", " ").split()
    wrong = [name for name in names if not NODE.fullmatch(name) or name.startswith("-")]
    if wrong or len(set(names)) < len(names) or len(names) < 2:
        raise ConfigError(
            f"--nodes {text}: {wrong[0] if wrong else 'at least two different hosts are needed'}",
            "each host must be a name or an address",
            "write --nodes host1,host2; without --nodes this machine alone is checked",
        )
    return names


def launcher_words(launcher: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts a shell command on {node}.

    `launcher`: ssh, srun, a command with {node} in it, or "" to choose srun within a Slurm job and
    ssh elsewhere. Raises ConfigError.
    """
    launcher = launcher or ("srun" if environment.get("SLURM_JOB_ID") else "ssh")
    if launcher == "ssh":
        options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_S} -o ServerAliveInterval=10"
        launcher = f"ssh {options} {{node}}"
    elif launcher == "srun":
        launcher = "srun --overlap --unbuffered --nodes=1 --ntasks=1 --nodelist={node}"
    elif "{node}" not in launcher:
        raise ConfigError(
            f"--launcher {launcher}: unknown launcher",
            "it is neither ssh nor srun, and does not contain {node}",
            "write, for example, --launcher 'kubectl exec -i {node} --'",
        )
    words = shlex.split(launcher)
    if not shutil.which(words[0], path=environment.get("PATH")):
        raise ConfigError(
            f"{words[0]} is not installed here",
            "it starts the checks on each node",
            "set --launcher to ssh, srun or a command that contains {node}",
        )
    return words


def command_on(
    node: str,
    launcher: list[str],
    arguments: list[str],
    variables: Mapping[str, str],
    limit_s: float,
) -> list[str]:
    """Return the command that runs this Python with `arguments` on `node`, for at most `limit_s`.

    The checkout and its Python must have the same paths there. The checkout comes first in
    PYTHONPATH, so that the node's cannot replace the project's modules. `variables` are added to
    the node's environment.
    """
    words = [f"{name}={value}" for name, value in variables.items()]
    command = shlex.join([*words, sys.executable, *arguments])
    script = SHELL.format(root=shlex.quote(str(ROOT)), limit_s=limit_s, command=command)
    started = [word.replace("{node}", node) for word in launcher]
    if launcher[0] == "ssh":  # it passes one string to the user's shell, which may not be sh
        return [*started, shlex.join(["sh", "-c", script])]
    return [*started, "sh", "-c", script]


@dataclass
class Ended:
    """A command that has ended on a node, or that was stopped."""

    exit_code: int | None  # None if it did not end in time
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """Why the command failed, by its last error message, or else its last line.

        torch's C++ warnings, which begin with [W, are no reason.
        """
        if self.exit_code in (None, TIMED_OUT):
            return "no answer in time"
        lines = [line for line in self.errors.splitlines() if re.match(r"(?!\[W).*\w", line)]
        reasons = [match[1] or match[2] for line in lines if (match := REASON.search(line))]
        return [f"exit code {self.exit_code}", *lines[-1:], *reasons[-1:]][-1].strip()


def run_on_nodes(
    commands: Mapping[str, list[str]], limit_s: float, together: bool = False
) -> dict[str, Ended]:
    """Run the command of each node, all at the same time. Return node -> how it ended.

    `limit_s`: the commands' own limit; they are stopped a little later. `together`: a command that
    fails ends the others after VICTIMS_S.
    """
    deadline = time.monotonic() + limit_s + END_S
    with contextlib.ExitStack() as files:
        outputs = {}
        processes: dict[str, subprocess.Popen] = {}
        try:
            for node, command in commands.items():
                output = files.enter_context(tempfile.TemporaryFile("w+"))
                errors = files.enter_context(tempfile.TemporaryFile("w+"))
                outputs[node] = output, errors
                processes[node] = _start(command, output, errors)
            while any(process.poll() is None for process in processes.values()):
                if together and any(process.returncode for process in processes.values()):
                    deadline = min(deadline, time.monotonic() + VICTIMS_S)
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
            codes = {node: process.poll() for node, process in processes.items()}
        finally:
            _end(processes.values())
        ended = {}
        for node, (output, errors) in outputs.items():
            output.seek(0)
            errors.seek(0)
            ended[node] = Ended(codes[node], output.read(), errors.read())
        return ended


def _start(command: list[str], output: IO[str], errors: IO[str]) -> subprocess.Popen:
    """Start `command` in a session of its own, and write the line that SHELL waits for."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True
    )
    assert process.stdin
    with contextlib.suppress(OSError):  # the command has ended
        process.stdin.write(b"go\n")
        process.stdin.flush()
    return process


def _end(processes: Iterable[subprocess.Popen]) -> None:
    """Close the commands' stdin, with which they end on their nodes. Kill what is left here."""
    for process in processes:
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + END_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
