"""What the host offers a run: memory, shared memory, limits, disks; and whether that is enough. Read-only, standard library only."""

from __future__ import annotations

import mmap
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from preflight.rows import Row, graded, skipped

GIB, MB = 2**30, 10**6
# Available memory per process, warn and refuse: torch and its libraries take 2 to 4 GiB, compiling and pinned batches the rest.
MEMORY_GIB = {"cuda": (16, 4), "cpu": (1.0, 0.5)}
# NCCL and RCCL pass messages within a node through /dev/shm; Docker's default of 64 MB ends in a bus error or a hang at start.
SHM_GIB = (8, 1)
OPEN_FILES = (1024, 256)  # sockets and shared files of 8 ranks are some hundreds
LOG_GIB = (10, 1)  # ten runs leave some hundred MB; traces and stacks more
# The 138 GB of a 70B base take half of the 30 minutes that the rules allow for the start at 150 MB/s. Tokens need 1 MB/s.
READ_MB_S = (150, 10)
MEASURABLE_BYTES = 64 * MB  # a shorter file says little about a disk
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Host:
    memory_bytes: int  # available: to the machine, or to the container if that is less
    shm_bytes: int  # free in /dev/shm
    memlock_bytes: int  # soft limit; UNLIMITED
    open_files: int  # soft limit; UNLIMITED


def read(root: Path = Path("/")) -> Host:
    memlock, files = (resource.getrlimit(what)[0] for what in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    return Host(available_memory(root), free_bytes(root / "dev/shm"), memlock, files)


def available_memory(root: Path) -> int:
    """MemAvailable, or what the control group leaves if that is less: files in its page cache can be given up."""
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    group = root / "sys/fs/cgroup"
    limit, used = _text(group / "memory.max"), _text(group / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return machine
    kept = int(used) - _numbers(group / "memory.stat").get("inactive_file", 0)
    return min(machine, max(int(limit) - kept, 0))


def _numbers(path: Path) -> dict[str, int]:
    lines = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nearest(path: Path) -> Path:
    """`path`, or the first of its parents that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(path: Path) -> int:
    """What this user may still write on the file system of `path`; 0 if it is not there."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


def judge(host: Host, processes: int, device: str, nodes: int, pinned_bytes: int = 0) -> list[Row]:
    """`pinned_bytes`: what the run pins for each process beside what every run takes (offload_layers)."""
    gpu = device == "cuda"
    warn, refuse = ((limit + pinned_bytes / GIB) * processes for limit in MEMORY_GIB[device])
    memory, shm = host.memory_bytes / GIB, host.shm_bytes / GIB
    rows = [
        graded(
            "host memory",
            f"{memory:.1f} GiB available",
            f">= {warn:g} GiB for {processes} process{'es' if processes > 1 else ''}",
            "end other programs, or give the container or job more memory" + ", or set offload_layers lower" * bool(pinned_bytes),
            refuse=memory < refuse,
            warn=memory < warn,
        )
    ]
    if gpu:
        do = "start the container with --shm-size 16g or --ipc host; on a bare host enlarge the tmpfs"
        few = processes > 1 and shm < SHM_GIB[1]
        rows.append(graded("/dev/shm", f"{shm:.2f} GiB free", f">= {SHM_GIB[0]} GiB", do, refuse=few, warn=shm < SHM_GIB[0]))
        rows.append(_judge_memlock(host.memlock_bytes, nodes))
    else:
        rows += [skipped(name, "only GPUs need it") for name in ("/dev/shm", "memlock limit")]
    files = float("inf") if host.open_files == UNLIMITED else host.open_files
    do = f"ulimit -n {OPEN_FILES[0]}, or --ulimit nofile={OPEN_FILES[0]} for a container"
    rows.append(
        graded("open files", _limit(host.open_files), f">= {OPEN_FILES[0]}", do, refuse=files < OPEN_FILES[1], warn=files < OPEN_FILES[0])
    )
    return rows


def _judge_memlock(memlock_bytes: int, nodes: int) -> Row:
    """RDMA registers memory as locked: between nodes nothing works without; within one node we know of no need, so it only warns."""
    few = memlock_bytes != UNLIMITED
    value = _limit(memlock_bytes if not few else memlock_bytes // 1024) + (" KiB" if few else "")
    do = "ulimit -l unlimited (limits.conf), or --ulimit memlock=-1 for a container"
    return graded("memlock limit", value, "unlimited", do, refuse=few and nodes > 1, warn=few)


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:,}"


# --- disks ------------------------------------------------------------------------------------------------------------


def judge_read_folder(name: str, folder: Path, miniature: bool) -> list[Row]:
    """Is it there, how much is free, and how fast is its largest file read?"""
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else []
    free = f"{free_bytes(nearest(folder)) / GIB:,.0f} GiB free"
    speed = f"{name}, read speed"
    if not files:
        if miniature:
            return [skipped(name, f"{folder}: made by the first run; {free}"), skipped(speed, "nothing to read yet")]
        return [Row(name, "warn", f"no files in {folder}; {free}", "the data", "see prepare --help"), skipped(speed, "nothing to read")]
    largest = max(files, key=lambda path: path.stat().st_size)
    size = sum(path.stat().st_size for path in files)
    return [Row(name, "ok", f"{folder}: {len(files)} files, {size / GIB:,.1f} GiB; {free}"), judge_speed(speed, largest)]


def judge_speed(check: str, path: Path) -> Row:
    wanted = f">= {READ_MB_S[0]} MB/s"
    if path.stat().st_size < MEASURABLE_BYTES:
        return skipped(check, f"not measured: the largest file has only {path.stat().st_size / MB:.1f} MB", wanted)
    try:
        speed = read_speed(path) / MB
    except OSError as error:
        return skipped(check, f"not measured: {path.name} cannot be read past the page cache ({error.strerror})", wanted)
    do = "use a faster file system, or copy the files to a local disk"
    return graded(check, f"{speed:,.0f} MB/s ({path.name})", wanted, do, refuse=speed < READ_MB_S[1], warn=speed < READ_MB_S[0])


def read_speed(path: Path, seconds: float = 1.0) -> float:
    """Bytes per second of direct reads of 16 MiB, past the page cache and leaving it alone. Raises OSError where that is not possible."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 16 * 2**20) as buffer:  # direct reads want memory that starts at a page
            done, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds and (count := os.preadv(descriptor, [buffer], done)):
                done += count
            return done / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def judge_log_folder(folder: Path) -> Row:
    """Where results go: room, and the right to write, without writing."""
    parent = nearest(folder)
    free = free_bytes(parent) / GIB
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return Row("LOGDIR", "refuse", f"{parent} cannot be written by this user", "a writable folder", "set LOGDIR to another place")
    do = "free space, or set LOGDIR to another place"
    value = f"{folder}: {free:,.1f} GiB free"
    return graded("LOGDIR", value, f">= {LOG_GIB[0]} GiB", do, refuse=free < LOG_GIB[1], warn=free < LOG_GIB[0])
