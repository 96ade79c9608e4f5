"""Checks of limits of the user or container that a run would exceed.

Libraries hang or crash at these limits, instead of naming them.
"""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Mapping

from common.errors import ConfigError, OutOfMemory, PreflightError, listed

# Threads of a rank: up to 8 in the miniature, and about 20 more for NCCL and CUDA.
THREADS_PER_RANK = 32
# Address space of a rank in bytes. torch for CPUs maps 3 GiB; CUDA and ROCm map far more than the
# GPU's memory.
ADDRESS_SPACE = 16 * 2**30
DO = "raise the limit ({}; --pids-limit of a container), then start again"


def require_loopback() -> None:
    """Raise PreflightError if processes on this host cannot connect to each other.

    Without this check torchrun would retry for minutes.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=10),
        ):
            pass
    except OSError as error:
        do = "in a container or network namespace: ip link set lo up"
        raise PreflightError(
            "no connection to 127.0.0.1",
            f"{error.strerror or error}; the ranks connect to each other there",
            do,
        ) from None


def require_interfaces(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if gloo is to use a network interface that this host does not have."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environment.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in known:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={name}: no such network interface",
                f"this host has {listed(known)}",
                "correct or unset the variable",
            )


def require_limits(ranks: int) -> None:
    """Raise OutOfMemory if the limits of this user or container do not allow `ranks` processes."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY and soft < ADDRESS_SPACE:
        what = f"a process may have only {soft / 2**30:.1f} GiB of address space (ulimit -v)"
        raise OutOfMemory(what, "torch maps more than that", DO.format("ulimit -v unlimited"))
    wanted = THREADS_PER_RANK * (ranks + 1)
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(wanted)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        started = sum(thread.is_alive() for thread in threads)
        what = f"this user or container may start only {started} more processes and threads"
        raise OutOfMemory(what, f"{error}; a run needs {wanted}", DO.format("ulimit -u")) from None
    finally:
        end.set()
