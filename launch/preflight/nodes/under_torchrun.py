"""`preflight --nodes` as a program of torchrun, for clusters where nothing else starts a process.

    torchrun ... -m launch.preflight --nodes host1,host2

torchrun starts one rank on each node. Rank 0 checks all nodes, and each other rank is the agent of
its own node. They exchange the agents' lines through torchrun's store:

    python -m launch.preflight.nodes.under_torchrun ask NODE

Rank 0 runs this command for each other node. The keys are NODE/ask/N and NODE/answer/N. An empty
line ends the agent.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from common.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore


WAIT_S = 7200.0  # the lifetime of an agent
# Ports of the check under torchrun, whose own store listens on MASTER_PORT.
PORT_OFFSET = 2
# Variables of torchrun, and their prefixes. An agent must not inherit them: it starts another
# torchrun.
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment


def torchrun_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of torchrun's variables in `environment`."""
    return [
        name
        for name in environment
        if name in TORCHRUN_VARIABLES or name.startswith(TORCHRUN_PREFIXES)
    ]


def local_agent_command(environment: Mapping[str, str]) -> list[str]:
    """Return the command of this node's agent, which does not see torchrun's variables."""
    unset = [word for name in torchrun_variables(environment) for word in ("-u", name)]
    return ["env", *unset, sys.executable, "-m", "launch.preflight.nodes.agent"]


def agent_command(node: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command that rank 0 starts to talk to the agent of `node`."""
    if is_here(node):
        return local_agent_command(environment)
    return [sys.executable, "-m", "launch.preflight.nodes.under_torchrun", "ask", node]


def is_here(node: str) -> bool:
    """Return whether an address of `node` is one of this machine."""
    host = node.rpartition("@")[2]  # without ssh's user
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def name_of_this_node(names: Sequence[str]) -> str:
    """Return the only name in `names` that is this machine. Raises ConfigError."""
    own = [name for name in names if is_here(name)]
    if len(own) != 1:
        raise ConfigError(
            f"--nodes has {len(own)} names of this node, {socket.gethostname()}",
            "under torchrun each rank finds its own node by its address",
            "write one address of each node",
        )
    return own[0]


def connect_to_store(environment: Mapping[str, str]) -> TCPStore:
    """Return a client of torchrun's store."""
    from torch.distributed import TCPStore

    return TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=WAIT_S),
    )


def serve(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start this node's agent, and pass commands and answers between it and rank 0.

    Return when rank 0 sends an empty line. On a node with several ranks, all but the first return
    at once. Raises ConfigError if `names` lacks this node.
    """
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    name = name_of_this_node(names)
    messages = connect_to_store(environment)
    process = subprocess.Popen(
        local_agent_command(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    number = 0
    while line := messages.get(f"{name}/ask/{number}").decode():
        process.stdin.write(line)
        process.stdin.flush()
        messages.set(f"{name}/answer/{number}", process.stdout.readline())
        number += 1
    process.stdin.close()
    process.wait()


def ask(name: str, environment: Mapping[str, str]) -> None:
    """Pass lines of stdin to the agent of node `name`, and print its answers, on rank 0."""
    messages = connect_to_store(environment)
    number = 0
    for line in sys.stdin:
        messages.set(f"{name}/ask/{number}", line)
        answer = messages.get(f"{name}/answer/{number}").decode()
        number += 1
        if not answer:  # the agent has ended
            break
        print(answer, end="", flush=True)
    messages.set(f"{name}/ask/{number}", "")  # ends the agent


if __name__ == "__main__":
    ask(sys.argv[2], os.environ)
