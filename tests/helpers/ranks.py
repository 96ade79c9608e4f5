"""Start ranks for the tests: processes of one command, or of one function, joined by gloo."""

from __future__ import annotations

import importlib
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from unittest import mock

import fp8_on_cpu  # noqa: F401  (changes torch)
import torch
from child_path import python_path

from common.paths import ROOT
from common.sharding.processes import start_processes

PYTHONPATH = python_path(
    ROOT, *sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir())
)


def rank_environment(rank: int, world_size: int, port: int, per_node: int = 0) -> dict[str, str]:
    """Return this process's environment with the variables that torchrun sets for `rank`.

    `per_node`: ranks of a node (default: all ranks are on one node).
    """
    per_node = per_node or world_size
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world_size,
    }
    names = {**where, "LOCAL_WORLD_SIZE": per_node, "OMP_NUM_THREADS": 1, "PYTHONPATH": PYTHONPATH}
    return os.environ | {name: str(value) for name, value in names.items()}


def free_port() -> int:
    """Return a TCP port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(world_size: int, command: list[str]) -> list[subprocess.Popen]:
    """Start `command` once per rank, with the environment that torchrun would set."""
    port = free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [sys.executable, *command], env=rank_environment(rank, world_size, port), **pipes
        )
        for rank in range(world_size)
    ]


def call_on_ranks(
    world_size: int,
    function: str,
    folder: Path,
    timeout_s: float = 120.0,
    device: str = "cpu",
    ranks_per_node: int = 0,
) -> list:
    """Call `function` ("module:name") with (processes, folder) on every rank. Return the results.

    All ranks are on one node unless `ranks_per_node` says otherwise.
    """
    # Importing torch's compiler queries the GPUs. A process forked after that cannot use one.
    port = free_port()
    context = rank_server() if device == "cpu" else multiprocessing.get_context("spawn")
    environments = [
        rank_environment(rank, world_size, port, ranks_per_node) for rank in range(world_size)
    ]
    processes = [
        context.Process(target=call, args=(function, folder, device, environment))
        for environment in environments
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0, (folder / f"rank_{rank}.err").read_text()[-4000:]
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(world_size)]


@cache
def rank_server() -> multiprocessing.context.BaseContext:
    """Return a context that forks ranks from an idle process that has imported torch.

    That saves each rank four seconds of CPU time.
    """
    context = multiprocessing.get_context("forkserver")
    # torch imports torch._dynamo when the first optimizer is created.
    context.set_forkserver_preload(["tiny", "torch._dynamo", "common.training.checkpoint"])
    with mock.patch.dict(os.environ, rank_environment(0, 1, 0)):
        multiprocessing.forkserver.ensure_running()
    return context


def call(function: str, folder: Path, device: str, environment: dict[str, str]) -> None:
    """Be one rank of `call_on_ranks`: save the result in `folder`, and end this process."""
    os.environ.update(environment)
    with (folder / f"rank_{environment['RANK']}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    # The server hands on pytest's path, which lacks the folders that were not collected.
    sys.path += PYTHONPATH.split(os.pathsep)
    module, _, name = function.partition(":")
    processes = start_processes(device, 60.0)
    result = getattr(importlib.import_module(module), name)(processes, folder)
    torch.save(result, folder / f"rank_{processes.rank}.pt")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    # While the interpreter shuts down, gloo's threads sometimes call std::terminate.
    os._exit(0)
