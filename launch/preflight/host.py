"""Judgments of the host: memory, limits, disks and software. Read-only, standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from common import known_issues
from common.errors import ConfigError, PreflightError
from common.gpu_kinds import GIB, GpuKind
from common.machine import network
from common.machine.hardware import Probe
from common.machine.host import Host
from common.packages import OLDEST, is_recent, version_of
from launch import system_settings, torch_build
from launch.preflight.check_row import CheckRow, at_least, graded, skipped
from submission import prerequisites
from system_tuning import settings

# Each pair holds the limits below which a row warns and refuses.
# Available GiB per process. torch and its libraries need 2 to 4 GiB; compilation and pinned batches
# need the rest.
MEMORY_GIB = {"cuda": (16, 4), "cpu": (1.0, 0.5)}
# Free GiB. NCCL and RCCL pass messages within a node through /dev/shm. Docker's default of 64 MB
# leads to a bus error or a hang at the start.
SHM_GIB = (8, 1)
OPEN_FILES = (1024, 256)  # 8 ranks open a few hundred sockets and shared files
LOG_GIB = (10, 1)  # free GiB: ten runs write a few hundred MB; traces and stacks need more
UNLIMITED = resource.RLIM_INFINITY
IBVERBS = "libibverbs.so.1"  # loaded by NCCL and RCCL, if it is there


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
    do = "end other programs, or give the container or job more memory"
    if pinned_bytes:
        do += ", or set offload_layers lower"
    rows = [
        at_least(
            "host memory",
            memory,
            (warn, refuse),
            f"{memory:.1f} GiB available",
            "GiB for 1 process" if processes == 1 else f"GiB for {processes} processes",
            do,
        )
    ]
    if device == "cuda":
        do = (
            "start the container with --shm-size 16g or --ipc host; without a container, enlarge "
            "the tmpfs"
        )
        limits = SHM_GIB if processes > 1 else (SHM_GIB[0], 0)
        rows.append(at_least("/dev/shm", shm, limits, f"{shm:.2f} GiB free", "GiB", do))
        # RDMA locks the memory that it registers, so several nodes need this. One node has no known
        # need, so the row only warns there.
        value = _limit(host.memlock_bytes)
        is_low = host.memlock_bytes != UNLIMITED
        do = (
            "ulimit -l unlimited (limits.conf), --ulimit memlock=-1 for a container, or in "
            "Kubernetes LimitMEMLOCK=infinity of the nodes' container runtime"
        )
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


def judge_rdma(environment: Mapping[str, str], root: Path = Path("/")) -> CheckRow:
    """Judge whether NCCL and RCCL can use RDMA between nodes. Otherwise they use TCP silently.

    `environment`: the user's variables and the config's [env]. `root`: of the file system.
    """
    net = environment.get("NCCL_NET", "")
    if net and net.lower() not in ("ib", "socket"):
        return skipped("RDMA", f"NCCL_NET={net}: a plugin is not checked")
    ports = network.rdma_ports(root)
    devices = (root / "dev/infiniband").glob("uverbs*")
    why = ""
    do = "check the driver of the network cards (ibstat)"
    if net.lower() == "socket" or environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        why = "NCCL_NET or NCCL_IB_DISABLE turns it off"
        do = "unset it"
    elif not ports:
        why = "no active port in /sys/class/infiniband"
    elif not any(os.access(device, os.R_OK | os.W_OK) for device in devices):
        why = "no /dev/infiniband/uverbs* that this user may open"
        do = "give it to the user or the container (docs/clusters.md; RDMA_RESOURCE in Kubernetes)"
    elif not _can_load(IBVERBS):
        why = f"{IBVERBS} cannot be loaded"
        do = "install libibverbs and the provider of the cards, in a container: in the image"
    value = f"{why}: NCCL and RCCL fall back to TCP" if why else f"{len(ports)} active ports"
    return graded("RDMA", value, "a port that NCCL and RCCL can use", do, warn=bool(why))


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:,}"


def judge_system_tuning(root: Path = Path("/")) -> CheckRow:
    """Judge the operating system settings of `system-tuning`.

    The row only warns: AMD uses these settings, but no measurement of their effect is known.
    """
    advice = system_settings.advice(root)
    return graded(
        "system tuning",
        advice or f"{len(settings.state(root))} settings are as AMD sets them",
        "the values of `system-tuning apply`; effect not measured",
        system_settings.remedy(root),
        warn=bool(advice),
    )


# --- disks ----------------------------------------------------------------------------------------


def judge_read_folder(name: str, folder: Path, miniature: bool) -> CheckRow:
    """Judge whether `folder`, the directory that variable `name` gives, holds files."""
    files = []
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        files = [path for path in folder.iterdir() if path.is_file()]
    if not files and miniature:
        return skipped(name, f"{folder}: the first run creates it")
    if not files:
        return CheckRow(name, "warn", f"no files in {folder}", "the data", "see prepare --help")
    size = sum(path.stat().st_size for path in files)
    return CheckRow(name, "ok", f"{folder}: {len(files)} files, {size / GIB:,.1f} GiB")


def judge_log_folder(folder: Path) -> CheckRow:
    """Judge free space and write permission of the directory for results, without writing."""
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

    The row shows the full version, which includes the build (+cu130, +rocm7.2).
    """
    triton_versions = [version_of(name) for name in known_issues.PACKAGES["triton"]]
    triton = next(filter(None, triton_versions), "missing")
    torch = version_of("torch")
    text = f"Python {platform.python_version()}, torch {torch}, triton {triton}"
    oldest = OLDEST["torch"]
    return graded(
        "software",
        text,
        f"torch >= {oldest}",
        f"install torch {oldest} or newer",
        refuse=not is_recent("torch", torch),
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
    library = "CPU"
    for name in ("cuda", "rocm"):
        if name in versions:
            library = f"{name} {versions[name]}"
    return CheckRow(check, "ok", library, expected)


def judge_compiler(environment: Mapping[str, str]) -> CheckRow:
    """Judge whether there is a C compiler: Triton compiles C code at a kernel's first launch."""
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
    advice = [issue.cure for issue in issues]
    if unseen:
        advice.append("look for known issues of the versions that were never tried")
    do = "; ".join(advice)
    installed = ", ".join(f"{name} {text}" for name, text in versions.items())
    value = "; ".join([*map(str, issues), *unseen]) or f"none of {installed}"
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
    """Judge whether runs from this checkout can be submitted.

    The log must name a commit without changes, and an organization. With a name that cannot be
    submitted, no run starts.
    """
    problems = prerequisites.refusal_reasons(root, environment)
    refuse = False
    try:
        prerequisites.require_names(environment)
    except ConfigError:
        refuse = True
    do = (
        "commit, ignore or remove the files, run as the owner of the checkout, or set or correct "
        "the variable; otherwise package will refuse the runs"
    )
    return graded(
        "checkout",
        "; ".join(problems) or "a clean commit",
        "a clean commit, MLPERF_SUBMISSION_ORG",
        do,
        refuse=refuse,
        warn=bool(problems),
    )
