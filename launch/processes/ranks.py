"""Start of ranks: their command and environment, and the CPUs of each GPU's NUMA node.

`python -m launch.processes.ranks CPUS/CPUS/... MODULE ...` binds the process to the CPUs of its
LOCAL_RANK and then becomes the rank (exec). The threads of torch, NCCL and the driver inherit the
binding. torchrun's own --numa-binding needs the program numactl.

Standard library only. Files in /sys are described in Linux, Documentation/ABI.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.machine.gpu_stats import DriverError, pci_folders, read_text
from common.machine.hardware import PCI_ORDER, Probe
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
# Fewest CPUs for a rank's threads (main, backward, data, NCCL). If a NUMA node has fewer for each
# rank, its ranks share all of its CPUs.
MIN_CPUS = 8


def ranks_command(
    folder: Path,
    processes: int,
    arguments: list[str],
    rendezvous: Sequence[str] = ONE_NODE,
    cpus: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts `arguments` (-m MODULE ...) on `processes` ranks.

    `rendezvous`: options of torchrun for the rendezvous. `cpus`: the CPUs of each rank, () to leave
    the ranks unbound. The command runs launch.processes.torchrun, which writes its log and the
    ranks' exit codes to `folder`.
    """
    bound = ["-m", "launch.processes.ranks", "/".join(cpus), *arguments[1:]] if cpus else arguments
    return [
        sys.executable,
        "-m",
        "launch.processes.torchrun",
        str(folder),
        *rendezvous,
        "--nproc-per-node",
        str(processes),
        *bound,
    ]


def rank_environment(
    environment: Mapping[str, str], config_env: Mapping[str, str], threads: int
) -> dict[str, str]:
    """Return the environment of a rank.

    It has the user's variables, the config's, which take precedence, and those of
    `process_variables`. `threads`: OMP_NUM_THREADS, unless the user or the config sets it.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        **environment,
        **config_env,
        **process_variables(environment),
    }


def process_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make Python find the project's modules, and read files as UTF-8.

    Neither depends on the current directory, whose modules PYTHONSAFEPATH and an empty path in
    PYTHONPATH concern, nor on the locale. CUDA numbers GPUs as nvidia-smi does.
    """
    paths = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "CUDA_DEVICE_ORDER": environment.get("CUDA_DEVICE_ORDER") or PCI_ORDER,
    }


def cpus_of_ranks(found: Probe, ranks: int, sysfs: Path = Path("/sys")) -> tuple[str, ...]:
    """Return, for each rank of this node, the CPUs to bind it to, such as "0-11,96-107".

    Only CPUs that this process may use are listed. Ranks of one NUMA node share its CPUs evenly,
    with both threads of a core in the same rank.

    Return () if only one NUMA node has CPUs that this process may use, since binding gains nothing
    then. Return () also if the firmware does not report a GPU's node (-1), or if that node has no
    such CPUs.
    """
    cpus = _cpus_of_numa_nodes(sysfs)
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
            return tuple(format_cpu_list(shares[node].pop(0)) for node in nodes)
    return ()


def _cpus_of_numa_nodes(sysfs: Path) -> dict[str, set[int]]:
    """Return NUMA node -> its CPUs that this process may use, for nodes that have any."""
    allowed = os.sched_getaffinity(0)
    cpus = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        usable = allowed & parse_cpu_list(read_text(folder / "cpulist"))
        if usable:
            cpus[folder.name.removeprefix("node")] = usable
    return cpus


def _shares(cpus: set[int], ranks: int, sysfs: Path) -> list[set[int]]:
    """Divide the CPUs of a NUMA node between its ranks, with whole cores for each rank.

    With fewer than MIN_CPUS for each rank, every rank gets all CPUs.
    """
    if len(cpus) < MIN_CPUS * ranks:
        return [cpus] * ranks
    core_of = {}  # CPU -> lowest CPU of the same core
    for cpu in cpus:
        topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
        threads = parse_cpu_list(read_text(topology / "thread_siblings_list"))
        core_of[cpu] = min(threads | {cpu})
    by_core = sorted(cpus, key=lambda cpu: (core_of[cpu], cpu))
    bounds = [rank * len(by_core) // ranks for rank in range(ranks + 1)]
    return [set(by_core[start:end]) for start, end in itertools.pairwise(bounds)]


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list such as "0-2,8", here {0, 1, 2, 8}.

    The list of a NUMA node without CPUs is empty.
    """
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: set[int]) -> str:
    """Return the list of these CPUs: the inverse of `parse_cpu_list`."""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    spans = zip(starts, ends, strict=True)
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in spans)


def main(cpus: str, arguments: list[str]) -> None:
    """Bind this process to the CPUs of its rank, and replace it with the rank. Never returns.

    `cpus`: the lists of all local ranks, separated by slashes.
    """
    own = cpus.split("/")[int(os.environ["LOCAL_RANK"])]
    try:
        os.sched_setaffinity(0, parse_cpu_list(own))
    except OSError as error:  # the container's CPUs have changed in the meantime
        note = f"note: cannot bind a rank to the CPUs {own}: {error.strerror}"
        print(note, file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-u", "-m", *arguments])  # torchrun also passes -u


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
