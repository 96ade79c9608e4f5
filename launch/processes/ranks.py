"""How ranks are started: torchrun's command, their environment, and each one on CPUs of its GPU's NUMA node. Standard library only.

`python -m launch.processes.ranks CPUS/CPUS/... MODULE ...` takes the CPUs of LOCAL_RANK and becomes the rank (exec): the threads of torch, NCCL
and the driver inherit them. torchrun's own --numa-binding needs the program numactl. Files in /sys: Linux, Documentation/ABI.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.gpu_stats import DriverError, pci_folders, read_text
from common.hardware import Probe
from common.paths import ROOT

# By no host name: none need resolve.
ONE_NODE = [
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
    "--nnodes",
    "1",
    "--local-addr",
    "127.0.0.1",
]
CPUS = 8  # a rank has at least these to itself, for its threads (main, backward, data, NCCL's); else the ranks of a NUMA node share all


def torchrun(
    folder: Path,
    processes: int,
    arguments: list[str],
    nodes: Sequence[str] = ONE_NODE,
    cpus: Sequence[str] = (),
) -> list[str]:
    """Start `arguments` (-m MODULE ...) on so many ranks, on `cpus`, by way of launch.processes.torchrun, which leaves its findings in `folder`."""
    bound = ["-m", "launch.processes.ranks", "/".join(cpus), *arguments[1:]] if cpus else arguments
    return [
        sys.executable,
        "-m",
        "launch.processes.torchrun",
        str(folder),
        *nodes,
        "--nproc-per-node",
        str(processes),
        *bound,
    ]


def rank_environment(
    environment: Mapping[str, str], config_env: Mapping[str, str], threads: int
) -> dict[str, str]:
    """The user's variables, those of the config, and what finds the project's modules, and only those, from any directory."""
    return {
        "OMP_NUM_THREADS": str(threads),
        **environment,
        **config_env,
        **finding_modules(environment),
    }


def finding_modules(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a Python finds the project's modules, and none in the current directory."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def cpus_of_ranks(found: Probe, ranks: int, sysfs: Path = Path("/sys")) -> tuple[str, ...]:
    """For each rank of this node a list such as "0-11,96-107" of the CPUs that this process may use. Ranks of one NUMA node share its CPUs
    evenly, both threads of a core in one rank.

    Empty where nothing is gained or known: one NUMA node with CPUs of ours, or a GPU whose node the firmware does not tell (-1) or has none.
    """
    allowed, folders = os.sched_getaffinity(0), (sysfs / "devices/system/node").glob("node[0-9]*")
    cpus = {
        folder.name[4:]: mine
        for folder in folders
        if (mine := allowed & numbers(read_text(folder / "cpulist")))
    }
    if len(cpus) < 2 or not found.devices:
        return ()
    with contextlib.suppress(DriverError):
        addresses = [device.address for device in found.devices[:ranks]]
        nodes = [
            read_text(folder / "numa_node")
            for folder in pci_folders(found.vendor, addresses, sysfs)
        ]
        if cpus.keys() >= set(nodes):
            shares = {node: _shares(cpus[node], nodes.count(node), sysfs) for node in set(nodes)}
            return tuple(text(shares[node].pop(0)) for node in nodes)
    return ()


def _shares(cpus: set[int], ranks: int, sysfs: Path) -> list[set[int]]:
    if len(cpus) < CPUS * ranks:
        return [cpus] * ranks
    core = {
        cpu: min(
            numbers(read_text(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
            | {cpu}
        )
        for cpu in cpus
    }
    order = sorted(cpus, key=lambda cpu: (core[cpu], cpu))
    return [
        set(order[rank * len(order) // ranks : (rank + 1) * len(order) // ranks])
        for rank in range(ranks)
    ]


def numbers(cpulist: str) -> set[int]:
    """ "0-2,8" -> {0, 1, 2, 8}; a NUMA node without CPUs has an empty list."""
    spans = [part.split("-") for part in cpulist.split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def text(cpus: set[int]) -> str:
    """The inverse of `numbers`."""
    starts, ends = (sorted(cpu for cpu in cpus if cpu + step not in cpus) for step in (-1, 1))
    return ",".join(
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    )


def main(cpus: str, arguments: list[str]) -> None:
    """Does not return."""
    mine = cpus.split("/")[int(os.environ["LOCAL_RANK"])]
    try:
        os.sched_setaffinity(0, numbers(mine))
    except OSError as error:  # the container's CPUs were changed just now
        print(
            f"note: a rank is not bound to the CPUs {mine}: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )
    os.execv(sys.executable, [sys.executable, "-u", "-m", *arguments])  # -u as torchrun has it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
