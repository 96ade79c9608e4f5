"""The agents on all nodes, started by ssh, srun or another command, each with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import ConfigError
from common.paths import ROOT
from launch.preflight.nodes import under_torchrun

END_S = 8.0  # for an agent to end its processes after its stdin was closed
NODE = re.compile(r"[A-Za-z0-9_.:@-]+")  # name or address of a host
CONNECT_S = 10  # for ssh to connect
# Command of an agent -> what it does, for messages.
TASKS = {
    "facts": "reading versions and settings",
    "check": "checking the node",
    "listen": "opening its ports",
    "probe": "measuring a link",
    "collective": "measuring collectives",
}


class NodeFailed(Exception):
    """A node did not answer, or its agent ended. The message says which."""


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
            raise ConfigError(
                f"--nodes {text} cannot be expanded", str(error), "separate the hosts by commas"
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


def agent_command(launcher: str, node: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts the agent on `node`.

    The checkout and its Python must have the same paths there. `launcher`: ssh, srun, a command
    with {node} in it, or "" to choose torchrun in one of its ranks, srun within a Slurm job, and
    ssh elsewhere. Raises ConfigError.
    """
    root = shlex.quote(str(ROOT))
    python = shlex.quote(sys.executable)
    # The checkout comes first: a PYTHONPATH of the node cannot replace the project's modules.
    paths = f"PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}"
    shell = f"cd {root} && {paths} exec {python} -m launch.preflight.nodes.agent"
    if not launcher and under_torchrun.is_rank(environment):
        return under_torchrun.agent_command(node, environment)
    if not launcher:
        launcher = "srun" if environment.get("SLURM_JOB_ID") else "ssh"
    if launcher == "ssh":
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
        options += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
        command = ["ssh", *options, node, shell]
    elif launcher == "srun":
        one_task = ["--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        command = ["srun", *one_task, "sh", "-c", shell]
    elif "{node}" in launcher:
        words = [word.replace("{node}", node) for word in shlex.split(launcher)]
        command = [*words, "sh", "-c", shell]
    else:
        raise ConfigError(
            f"--launcher {launcher}: unknown launcher",
            "it is neither ssh nor srun, and does not contain {node}",
            "write, for example, --launcher 'kubectl exec -i {node} --'",
        )
    if not shutil.which(command[0], path=environment.get("PATH")):
        raise ConfigError(
            f"{command[0]} is not installed here",
            "it starts the agent on each node",
            "set --launcher to ssh, srun or a command that contains {node}",
        )
    return command


class Remote:
    """The agent of one node. After a method has raised NodeFailed, the agent cannot be used."""

    def __init__(self, name: str, command: list[str]):
        self.name = name
        self.host = name.rpartition("@")[2]  # the name for the network, without ssh's user
        self.answers: queue.Queue[dict | None] = queue.Queue()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the agent
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # a banner of the login shell
                answer = json.loads(line)
                if isinstance(answer, dict):
                    self.answers.put(answer)
        self.answers.put(None)

    def ask(self, limit_s: float, do: str, /, **message: Any) -> dict:
        """Send the command `do` to the agent, and return its answer.

        Raises NodeFailed if the agent has ended, or does not answer within `limit_s` seconds.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **message}) + "\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise NodeFailed(f"no answer within {limit_s:.0f} s while {TASKS[do]}") from None
        except OSError:
            answer = None
        if answer is None:
            raise NodeFailed(self._why_ended(do))
        return answer

    def _why_ended(self, do: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        reason = lines[-1] if lines else f"exit code {self.process.returncode}"
        return f"{reason} (the connection ended while {TASKS[do]})"

    def close_stdin(self) -> None:
        """Close the agent's stdin. The agent then ends its processes and itself."""
        with contextlib.suppress(OSError):
            if self.process.stdin:
                self.process.stdin.close()

    def close(self) -> None:
        """Close the agent's stdin, and kill the launcher after END_S."""
        self.close_stdin()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def close(remotes: Sequence[Remote]) -> None:
    """End all agents at the same time."""
    for remote in remotes:
        remote.close_stdin()
    with ThreadPoolExecutor(max(len(remotes), 1)) as pool:
        list(pool.map(Remote.close, remotes))


def at_once(
    remotes: Iterable[Remote], work: Callable[[Remote], dict]
) -> tuple[dict[str, dict], dict[str, str]]:
    """Call `work` for all remotes at the same time.

    Return node -> answer, and node -> reason for the nodes that failed.
    """
    remotes = list(remotes)
    answers: dict[str, dict] = {}
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(max(len(remotes), 1)) as pool:
        futures = [(remote.name, pool.submit(work, remote)) for remote in remotes]
        for name, future in futures:
            try:
                answers[name] = future.result()
            except NodeFailed as error:
                failures[name] = str(error)
            except BaseException:
                # On Ctrl-C, end the agents: otherwise the pool waits for the threads, which wait
                # for answers.
                close(remotes)
                raise
    return answers, failures
