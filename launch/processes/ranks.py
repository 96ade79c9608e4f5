"""Start of ranks: torchrun's command, their environment, and CPUs of their GPU's NUMA node.

`python -m launch.processes.ranks CPUS/CPUS/... MODULE ...` binds the process to the CPUs of its
LOCAL_RANK and then becomes the rank (exec). The threads of torch, NCCL and the driver inherit the
binding. torchrun's own --numa-binding needs the program numactl.

Standard library only. Files in /sys are described in Linux, Documentation/ABI.
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

# The address is numeric, so that no host name has to resolve.
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
# Minimum number of CPUs for a rank's threads (main, backward, data, NCCL's). With fewer CPUs per
# rank, the ranks of a NUMA node share all of them.
CPUS = 8


def torchrun(
    folder: Path,
    processes: int,
    arguments: list[str],
    nodes: Sequence[str] = ONE_NODE,
    cpus: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts `arguments` (-m MODULE ...) on `processes` ranks.

    `cpus`: the CPUs of each rank, none to leave ranks unbound. The command runs
    launch.processes.torchrun, which writes its findings to `folder`.
    """
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
    """Return the environment of a rank: the user's variables, the config's, and the module path.

    The module path finds the project's modules from any directory, and none in the current
    directory.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        **environment,
        **config_env,
        **finding_modules(environment),
    }


def finding_modules(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which Python finds the project's modules from any directory.

    PYTHONSAFEPATH excludes modules in the current directory.
    """
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def cpus_of_ranks(found: Probe, ranks: int, sysfs: Path = Path("/sys")) -> tuple[str, ...]:
    """Return for each rank of this node a list such as "0-11,96-107" of CPUs to bind it to.

    Only CPUs that this process may use are listed. Ranks of one NUMA node share its CPUs evenly,
    with both threads of a core in the same rank.

    Return () if only one NUMA node has CPUs that this process may use, since binding gains nothing
    then. Return () also if the firmware does not report a GPU's node (-1), or if that node has no
    such CPUs.
    """
    allowed = os.sched_getaffinity(0)
    folders = (sysfs / "devices/system/node").glob("node[0-9]*")
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
    """Return the CPUs of a list such as "0-2,8", here {0, 1, 2, 8}.

    A NUMA node without CPUs has an empty list.
    """
    spans = [part.split("-") for part in cpulist.split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def text(cpus: set[int]) -> str:
    """Return the list of these CPUs, the inverse of `numbers`."""
    starts, ends = (sorted(cpu for cpu in cpus if cpu + step not in cpus) for step in (-1, 1))
    return ",".join(
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    )


def main(cpus: str, arguments: list[str]) -> None:
    """Bind this process to its CPUs and replace it with the rank. This never returns."""
    mine = cpus.split("/")[int(os.environ["LOCAL_RANK"])]
    try:
        os.sched_setaffinity(0, numbers(mine))
    except OSError as error:  # the container's CPUs have changed in the meantime
        print(
            f"note: a rank is not bound to the CPUs {mine}: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )
    os.execv(sys.executable, [sys.executable, "-u", "-m", *arguments])  # torchrun also passes -u


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
