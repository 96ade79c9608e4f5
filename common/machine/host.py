"""Memory, CPUs and limits of this host. Standard library only."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
from collections.abc import Iterator
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
    """Return MemAvailable in bytes, or what a control group of this process has left if less.

    A control group's page cache counts as available. On Grace, where GPU memory is a NUMA node of
    its own, MemAvailable would include it, so only nodes with CPUs are counted there.
    """
    available = _available_on_cpu_nodes(root)
    if not available:
        available = key_values(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    for group in _control_groups(root, "memory"):
        limit = read_text(group / "memory.max") or read_text(group / "memory.limit_in_bytes")
        used = read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            counts = key_values(group / "memory.stat")
            cache = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            available = min(available, max(int(limit) - int(used) + cache, 0))
    return available


def cpu_count(root: Path = Path("/"), pid: int = 0) -> int:
    """Return the number of CPUs that a process may use.

    They are those of its affinity, or fewer if a control group of this process has a smaller quota.
    `pid`: of the process (default: this one).
    """
    cpus = float(len(os.sched_getaffinity(pid)))
    for group in _control_groups(root, "cpu"):
        quota, _, period = read_text(group / "cpu.max").partition(" ")
        if not quota:
            quota = read_text(group / "cpu.cfs_quota_us")
            period = read_text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # not "max" or "-1"
            cpus = min(cpus, int(quota) / int(period))
    return max(1, math.ceil(cpus))


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process that may limit it, from the top.

    With version 2, all controllers share one tree. With version 1, each has a tree of its own. A
    container may see its own group as the top of the tree.
    """
    top = root / "sys/fs/cgroup"
    yield top
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = top / controller if controllers else top
        if controllers:
            yield folder
        for name in filter(None, path.split("/")):
            folder /= name
            yield folder


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
