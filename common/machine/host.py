"""Memory and limits of this host. Standard library only."""

from __future__ import annotations

import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from common.machine.gpu_stats import key_values, read_text

CAP_IPC_LOCK = 14  # number in linux/capability.h


@dataclass(frozen=True)
class Host:
    memory_bytes: int  # available to the machine, or to the container if that is less
    shm_bytes: int  # free in /dev/shm
    memlock_bytes: int  # soft limit, or UNLIMITED, as with the capability IPC_LOCK
    open_files: int  # soft limit, or UNLIMITED


def read_host(root: Path = Path("/")) -> Host:
    """Return the memory and the limits of this host. `root`: of its file systems."""
    shm = root / "dev/shm"
    return Host(
        memory_bytes=available_memory(root),
        shm_bytes=shutil.disk_usage(shm).free if shm.exists() else 0,
        memlock_bytes=_memlock_bytes(root),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _memlock_bytes(root: Path) -> int:
    """Return how much memory this process may lock."""
    effective = re.search(r"^CapEff:\s*(\w+)", read_text(root / "proc/self/status"), re.MULTILINE)
    if effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1:
        return resource.RLIM_INFINITY
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def available_memory(root: Path) -> int:
    """Return MemAvailable in bytes, or what the control group has left if that is less.

    The control group's page cache counts as available. On Grace, where GPU memory is a NUMA node of
    its own, MemAvailable would include it, so only nodes with CPUs are counted there.
    """
    machine = _available_on_cpu_nodes(root)
    if not machine:
        machine = key_values(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    group = root / "sys/fs/cgroup"
    limit = read_text(group / "memory.max")
    used = read_text(group / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return machine
    kept = int(used) - key_values(group / "memory.stat").get("inactive_file", 0)
    return min(machine, max(int(limit) - kept, 0))


def _available_on_cpu_nodes(root: Path) -> int:
    """Return the free memory and page cache of the NUMA nodes that have CPUs, in bytes.

    Return 0 if every node has CPUs.
    """
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    with_cpus = [node for node in nodes if read_text(node / "cpulist")]
    if len(with_cpus) == len(nodes):
        return 0
    total = 0
    for node in with_cpus:
        for line in read_text(node / "meminfo").splitlines():
            words = line.split()  # Node 0 MemFree: 1234 kB
            if len(words) >= 4 and words[2] in ("MemFree:", "Active(file):", "Inactive(file):"):
                total += int(words[3])
    return total * 1024
