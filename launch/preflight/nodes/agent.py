"""Agent on one node: `python -m launch.preflight.nodes.agent`, started by `preflight --nodes`.

It reads commands from stdin, one JSON object per line, and answers each with one line on stdout:

    command                                answer
    {"do": "facts"}                        versions, settings, interfaces, kernel log (facts.py)
    {"do": "check", "arguments", ...}      the rows of `preflight` on this node
    {"do": "listen", "ports"}              a listener's free port, and ports that are in use
    {"do": "probe", "host", ...}           the link to another node's listener (links.py)
    {"do": "collective", "rank", ...}      speed of all-reduce and all-to-all (collectives.py)

When stdin is closed, also by a lost connection, the agent ends with all its processes. It ends
after LIFETIME_S in any case.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from common.paths import ROOT
from launch.preflight.nodes import facts, links
from launch.processes.ranks import module_search_path

LIFETIME_S = 7200
GRACE_S = 5.0  # from SIGTERM to SIGKILL
POLL_S = 0.1


class Agent:
    """Server of the commands. Each method `do_X` is the command X and returns its answer."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        # Held while processes start: one that is not yet in `processes` would not be stopped.
        self.processes_lock = threading.Lock()
        self.listener: links.Listener | None = None

    def serve(self) -> NoReturn:
        """Answer commands until stdin ends, then end this process."""
        commands: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(commands,), daemon=True).start()
        while True:
            arguments = json.loads(commands.get())
            try:
                method = getattr(self, f"do_{arguments.pop('do')}")
                answer = method(**arguments)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)

    def _read(self, commands: queue.Queue[str]) -> None:
        for line in sys.stdin:
            commands.put(line)
        with self.processes_lock:  # kept until the end: no process starts after this
            self._stop_processes()
            os._exit(0)

    def _stop_processes(self) -> None:
        """Send SIGTERM, so that the processes can end their ranks, and SIGKILL after GRACE_S."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_number)
            deadline = time.monotonic() + GRACE_S
            while any(process.poll() is None for process in self.processes):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)

    def do_facts(self) -> dict:
        """Return the facts by which nodes are compared."""
        return facts.read(os.environ)

    def do_check(self, arguments: list[str], environment: dict[str, str], limit_s: float) -> dict:
        """Run the checks of one node. `environment`: variables that the user set for the run."""
        command = [sys.executable, "-m", "launch.preflight", *arguments, "--json"]
        [(_, output, errors)] = self._run([(command, environment)], limit_s)
        try:
            return {"rows": json.loads(output)["rows"]}
        except (ValueError, KeyError):
            last = _last_line(errors) or "it printed nothing"
            return {"error": f"the checks of this node did not finish: {last}"}

    def do_listen(self, ports: list[int]) -> dict:
        """Start a listener on `ports` and on a free port."""
        self.listener = links.Listener(ports)
        return {"free_port": self.listener.free_port, "errors": self.listener.errors}

    def do_probe(self, host: str, ports: list[int], free_port: int, seconds: float) -> dict:
        """Measure the link to the listener on `host`, and name the interface that it uses."""
        result = links.probe(host, ports, free_port, seconds)
        interfaces = facts.interfaces(Path("/"))
        interface = facts.interface_of(result.get("address", ""), interfaces)
        return result | {"interface": interface}

    def do_collective(
        self,
        rank: int,
        nodes: int,
        gpus: int,
        environment: dict[str, str],
        seconds: float,
        limit_s: float,
    ) -> dict:
        """Measure the collectives together with other nodes: run the ranks of this node.

        `rank`: number of this node among `nodes`. `environment`: MASTER_ADDR, MASTER_PORT and the
        interfaces to use.
        """
        if self.listener:
            self.listener.close()  # rank 0 listens on MASTER_PORT
            self.listener = None
        device = "cuda" if gpus else "cpu"
        local_ranks = max(gpus, 1)
        module = "launch.preflight.nodes.collectives"
        command = [sys.executable, "-m", module, device, str(seconds)]
        starts = []
        for local in range(local_ranks):
            variables = {
                "RANK": str(rank * local_ranks + local),
                "WORLD_SIZE": str(nodes * local_ranks),
                "LOCAL_RANK": str(local),
                "OMP_NUM_THREADS": "1",
            }
            starts.append((command, environment | variables))
        results = self._run(starts, limit_s)
        for exit_code, _, errors in results:
            if exit_code:
                return {"error": _last_line(errors) or f"exit code {exit_code}"}
        output = results[0][1].strip()
        return {"rates": json.loads(output.splitlines()[-1]) if output else {}}

    def _run(
        self, starts: list[tuple[list[str], dict[str, str]]], limit_s: float
    ) -> list[tuple[int, str, str]]:
        """Run several commands at the same time. Return exit code, stdout and stderr of each.

        `starts`: each command, and variables to add to its environment. Commands that run longer
        than `limit_s` are killed.
        """
        deadline = time.monotonic() + limit_s
        with self.processes_lock:
            self.processes = [_start(command, environment) for command, environment in starts]
        killer = threading.Timer(limit_s, self._stop_processes)
        killer.daemon = True
        killer.start()
        results = []
        for process in self.processes:
            output, errors = process.communicate()
            results.append((process.returncode, output, errors))
        killer.cancel()
        self.processes = []
        if time.monotonic() > deadline:
            raise TimeoutError(f"not finished within {limit_s:.0f} s")
        return results


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Start `command` in a session of its own, with `environment` added to this process's."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **module_search_path(os.environ), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _last_line(text: str) -> str:
    """Return the last line of `text`, "" if there is none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    signal.alarm(LIFETIME_S)
    Agent().serve()
