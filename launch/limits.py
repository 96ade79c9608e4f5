"""Limits of this user or container that a run would meet in the middle, where libraries hang or crash instead of saying so."""

from __future__ import annotations

import resource
import socket
import threading

from common.errors import OutOfMemory, PreflightError

PER_RANK = 32  # threads: a rank of the miniature has 8 at most, NCCL's and CUDA's are some 20 more
ADDRESSES = (
    16 * 2**30
)  # bytes per rank: torch for a CPU maps 3 GiB, CUDA and ROCm far more than a GPU has
DO = "raise it ({}), in a container its limit of processes (--pids-limit), then start again"


def require_loopback() -> None:
    """Raise PreflightError where a process cannot reach another one on this host: torchrun would try for minutes."""
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
            f"{error.strerror or error}; the ranks find each other there",
            do,
        ) from None


def require_limits(ranks: int) -> None:
    """Raises OutOfMemory where `ranks` processes could not be started."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY and soft < ADDRESSES:
        what = f"a process may have {soft / 2**30:.1f} GiB of addresses (ulimit -v)"
        raise OutOfMemory(what, "torch maps more than that", DO.format("ulimit -v unlimited"))
    wanted, end = PER_RANK * (ranks + 1), threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(wanted)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        what = f"this user or container may start {sum(map(threading.Thread.is_alive, threads))} more processes and threads"
        raise OutOfMemory(what, f"{error}; a run needs {wanted}", DO.format("ulimit -u")) from None
    finally:
        end.set()
