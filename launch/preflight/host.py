"""Judgments of the host: memory, limits, disks and software. Read-only, standard library only."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import known_issues
from common.errors import PreflightError
from common.gpu_kinds import GIB, GpuKind
from common.gpu_stats import key_values, read_text
from common.hardware import Probe
from common.packages import OLDEST_TORCH, version_of
from launch import torch_build, tuning
from launch.preflight.check_row import CheckRow, at_least, graded, skipped
from launch.run_directory import doubts

# Available GiB per process, warn and refuse. torch and its libraries need 2 to 4 GiB; compilation
# and pinned batches need the rest.
MEMORY_GIB = {"cuda": (16, 4), "cpu": (1.0, 0.5)}
# NCCL and RCCL pass messages within a node through /dev/shm. Docker's default of 64 MB ends in a
# bus error or a hang at start.
SHM_GIB = (8, 1)
OPEN_FILES = (1024, 256)  # 8 ranks have some hundreds of sockets and shared files
LOG_GIB = (10, 1)  # ten runs leave some hundred MB; traces and stacks need more
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Host:
    memory_bytes: int  # available to the machine, or to the container if that is less
    shm_bytes: int  # free in /dev/shm
    memlock_bytes: int  # soft limit, or UNLIMITED
    open_files: int  # soft limit, or UNLIMITED


def read(root: Path = Path("/")) -> Host:
    memlock, files = (
        resource.getrlimit(what)[0] for what in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    shm = root / "dev/shm"
    return Host(
        available_memory(root), shutil.disk_usage(shm).free if shm.exists() else 0, memlock, files
    )


def available_memory(root: Path) -> int:
    """Return MemAvailable in bytes, or the memory that the control group has left if that is less.

    The control group's page cache counts as available. If GPU memory is a NUMA node of its own
    (Grace), MemAvailable would include it, so only nodes with CPUs are counted.
    """
    machine = (
        _available_beside_cpus(root)
        or key_values(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    )
    group = root / "sys/fs/cgroup"
    limit = read_text(group / "memory.max")
    used = read_text(group / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return machine
    kept = int(used) - key_values(group / "memory.stat").get("inactive_file", 0)
    return min(machine, max(int(limit) - kept, 0))


def _available_beside_cpus(root: Path) -> int:
    """Return free memory and page cache of the NUMA nodes that have CPUs, in bytes.

    Return 0 if every node has CPUs.
    """
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    with_cpus = [node for node in nodes if read_text(node / "cpulist")]
    if len(with_cpus) == len(nodes):
        return 0
    total = 0
    for node in with_cpus:  # lines such as `Node 0 MemFree:  1234 kB`
        sizes = {
            words[2]: int(words[3])
            for line in read_text(node / "meminfo").splitlines()
            if len(words := line.split()) >= 4
        }
        total += sum(
            sizes.get(name, 0) for name in ("MemFree:", "Active(file):", "Inactive(file):")
        )
    return total * 1024


def judge(
    host: Host, processes: int, device: str, nodes: int, pinned_bytes: int = 0
) -> list[CheckRow]:
    """Return the rows for memory and limits.

    `pinned_bytes`: host memory that the config pins for each process (offload_layers), in addition
    to what every run needs.
    """
    memory = host.memory_bytes / GIB
    shm = host.shm_bytes / GIB
    warn, refuse = ((limit + pinned_bytes / GIB) * processes for limit in MEMORY_GIB[device])
    do = (
        "end other programs, or give the container or job more memory"
        + ", or set offload_layers lower" * bool(pinned_bytes)
    )
    rows = [
        at_least(
            "host memory",
            memory,
            (warn, refuse),
            f"{memory:.1f} GiB available",
            f"GiB for {processes} processes",
            do,
        )
    ]
    if device == "cuda":
        do = (
            "start the container with --shm-size 16g or --ipc host; on a bare host enlarge the "
            "tmpfs"
        )
        limits = SHM_GIB if processes > 1 else (SHM_GIB[0], 0)
        rows.append(at_least("/dev/shm", shm, limits, f"{shm:.2f} GiB free", "GiB", do))
        # RDMA locks the memory that it registers, so several nodes need this. No need is known on
        # one node, so it only warns there.
        value = _limit(host.memlock_bytes)
        is_low = host.memlock_bytes != UNLIMITED
        do = "ulimit -l unlimited (limits.conf), or --ulimit memlock=-1 for a container"
        rows.append(
            graded(
                "memlock limit",
                value,
                "unlimited (bytes)",
                do,
                refuse=is_low and nodes > 1,
                warn=is_low,
            )
        )
    files = float("inf") if host.open_files == UNLIMITED else host.open_files
    do = f"ulimit -n {OPEN_FILES[0]}, or --ulimit nofile={OPEN_FILES[0]} for a container"
    return [*rows, at_least("open files", files, OPEN_FILES, _limit(host.open_files), "", do)]


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:,}"


def judge_tuning(root: Path = Path("/")) -> CheckRow:
    """Judge the settings of system_tuning.

    They only warn: AMD uses these settings, but no measurement of their gain is known.
    """
    advice = tuning.advice(root)
    do = "tuning check; or run with --tune"
    value = advice or f"{len(tuning.state(root))} settings as AMD makes them"
    return graded(
        "host tuning", value, "what `tuning apply` writes; gain not measured", do, warn=bool(advice)
    )


# --- disks ----------------------------------------------------------------------------------------


def judge_read_folder(name: str, folder: Path, miniature: bool) -> CheckRow:
    """Judge whether the folder holds files."""
    files = (
        [path for path in folder.iterdir() if path.is_file()]
        if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
        else []
    )
    if not files and miniature:
        return skipped(name, f"{folder}: the first run creates it")
    if not files:
        return CheckRow(name, "warn", f"no files in {folder}", "the data", "see prepare --help")
    size = sum(path.stat().st_size for path in files)
    return CheckRow(name, "ok", f"{folder}: {len(files)} files, {size / GIB:,.1f} GiB")


def judge_log_folder(folder: Path) -> CheckRow:
    """Judge free space and write permission of the folder for results, without writing."""
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    do = "free space, or set LOGDIR to another place"
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return CheckRow(
            "LOGDIR",
            "refuse",
            f"{parent} cannot be written by this user",
            "a writable folder",
            "set LOGDIR to another place",
        )
    free = shutil.disk_usage(parent).free / GIB
    return at_least("LOGDIR", free, LOG_GIB, f"{folder}: {free:,.1f} GiB free", "GiB", do)


# --- software -------------------------------------------------------------------------------------


def judge_software() -> CheckRow:
    """Judge the version of torch.

    The local part of the version names its build (+cu130, +rocm7.2).
    """
    triton = next(filter(None, map(version_of, known_issues.PACKAGES["triton"])), "")
    text = (
        f"Python {platform.python_version()}, torch {version_of('torch')}, triton "
        f"{triton or 'missing'}"
    )
    oldest = ".".join(map(str, OLDEST_TORCH))
    is_old = (
        tuple(int(part) for part in re.findall(r"\d+", version_of("torch") or "0")[:2])
        < OLDEST_TORCH
    )
    return graded(
        "software", text, f"torch >= {oldest}", f"install torch {oldest} or newer", refuse=is_old
    )


def judge_torch_build(
    found: Probe, versions: Mapping[str, str], environment: Mapping[str, str]
) -> CheckRow:
    """Judge whether torch is built for these GPUs and their driver."""
    check = "torch build"
    expected = "built for these GPUs and their driver"
    try:
        torch_build.require_fitting_torch(found, versions, environment)
    except PreflightError as error:
        return CheckRow(check, "refuse", f"{error.what} ({error.why})", expected, error.do)
    library = next(
        (f"{name} {versions[name]}" for name in ("rocm", "cuda") if name in versions), "CPU"
    )
    return CheckRow(check, "ok", library, expected)


def judge_compiler(environment: Mapping[str, str]) -> CheckRow:
    """Judge whether Triton can compile the C file of its first launch."""
    missing = torch_build.missing_compiler(environment)
    return graded(
        "C compiler",
        missing or "found, with Python.h",
        "a C compiler and Python.h",
        "install them",
        refuse=bool(missing),
    )


def judge_known_issues(
    kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str]
) -> CheckRow:
    """Judge these versions on this GPU by common/known_issues.toml."""
    issues = known_issues.shown(kind, versions, environment)
    unseen = known_issues.unseen(versions)
    do = "; ".join(
        [
            *(issue.cure for issue in issues),
            *(["look whether something is known of it"] if unseen else []),
        ]
    )
    value = "; ".join([*map(str, issues), *unseen]) or "none of " + ", ".join(
        f"{name} {text}" for name, text in versions.items()
    )
    refuse = any(issue.verdict == "refuse" for issue in issues)
    return graded(
        "known issues",
        value,
        "none that refuses or warns",
        do,
        refuse=refuse,
        warn=bool(issues or unseen),
    )


def judge_checkout(root: Path, environment: Mapping[str, str]) -> CheckRow:
    """Judge whether runs that are started now can be submitted.

    The log must name a commit without changes, and an organization.
    """
    found = doubts(root, environment)
    do = (
        "commit, ignore or remove the files, run as the owner of the checkout, set the variable: "
        "else package will refuse the runs"
    )
    return graded(
        "checkout",
        "; ".join(found) or "a clean commit",
        "a clean commit, MLPERF_SUBMISSION_ORG",
        do,
        warn=bool(found),
    )
