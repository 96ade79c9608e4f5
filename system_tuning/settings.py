"""The settings: purpose, risk, and which value belongs in which file.

Sources and evidence: docs/system_tuning.md. Nothing here was measured by this project, which has no
GPU host with root access, and AMD publishes no measurement either. The list is that of AMD's MLPerf
Training v5.1 submission (`runtime_tunables.sh`), without its module load.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CPU = "sys/devices/system/cpu"
KERNEL = "proc/sys/kernel"
THP = "sys/kernel/mm/transparent_hugepage"
# An idle state whose name does not reveal its depth counts as deep above this exit latency. On a
# Skylake Xeon, C1E needs 10 us to leave and C6 needs 133 us (Linux, drivers/idle/intel_idle.c,
# skx_cstates).
SHALLOW_LATENCY_US = 10


@dataclass(frozen=True)
class File:
    """A file of a setting: its present value, and the value it should have."""

    path: Path
    now: str
    want: str
    note: str = ""


@dataclass(frozen=True)
class Setting:
    name: str
    what: str
    risk: str
    find: Callable[[Path], list[File]]  # the argument is the root of the file system

    def look(self, root: Path) -> list[File]:
        """Return the setting's files on this host, [] if it is not supported. Read-only."""
        return [file for file in self.find(root) if file.now]


def value_of(path: Path) -> str:
    """Return the value in a file, "" if there is none.

    If the file lists choices, the value is the word in brackets (`always [madvise] never`). There
    is no value if the file is missing or the CPU is offline (the kernel then returns EBUSY).
    """
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    chosen = re.search(r"\[(\S+)\]", text)
    return chosen[1] if chosen else text


def _file(path: Path, want: str, note: str = "") -> File:
    return File(path, value_of(path), want, note)


def _is_deep(name: str, latency_us: str) -> bool:
    """Return whether an idle state is deeper than C1.

    The name decides (C1, C1E, C1_ACPI against C2, C6N, C3_ACPI), otherwise the exit latency. A
    fixed index is not enough: state 2 is C2 on EPYC, but C1E on a Xeon with intel_idle. AMD's
    `cpupower idle-set -d 2` would leave C6 enabled there.
    """
    if number := re.match(r"C([0-9]+)", name):
        return int(number[1]) > 1
    return latency_us.isdecimal() and int(latency_us) > SHALLOW_LATENCY_US


def _idle_states(root: Path) -> list[File]:
    files = []
    # state0 is polling, or WFI on Arm, and must stay enabled.
    for state in sorted((root / CPU).glob("cpu[0-9]*/cpuidle/state[1-9]*")):
        name = value_of(state / "name")
        latency_us = value_of(state / "latency")
        if _is_deep(name, latency_us):
            files.append(_file(state / "disable", "1", f"{name}, {latency_us} us to leave"))
    return files


def _governor(root: Path) -> list[File]:
    """Return the governor of every policy, and its energy preference if the governor changes.

    With intel_pstate or amd-pstate in active mode, the kernel sets the energy preference together
    with the governor and then refuses to change it. The preference is therefore written before the
    governor, and restored after it.
    """
    files = []
    # cpuN/cpufreq is a link to one of these folders.
    for policy in sorted((root / CPU / "cpufreq").glob("policy[0-9]*")):
        governor = _file(policy / "scaling_governor", "performance")
        if governor.now != governor.want:
            files.append(_file(policy / "energy_performance_preference", "performance"))
        files.append(governor)
    return files


SETTINGS = (
    Setting(
        "idle_states",
        "disable CPU idle states deeper than C1, which take tens to hundreds of us to leave",
        "more power and heat when idle, less headroom for the busy cores to boost",
        _idle_states,
    ),
    Setting(
        "governor",
        "CPU frequency governor performance: threads that launch kernels keep the highest clock",
        "more power",
        _governor,
    ),
    Setting(
        "numa_balancing",
        "disable automatic NUMA balancing, which samples accesses by unmapping pages",
        "remote memory stays remote unless processes are bound to the GPU's node;"
        " some workloads become slower (AMD's guide)",
        lambda root: [_file(root / KERNEL / "numa_balancing", "0")],
    ),
    Setting(
        "nmi_watchdog",
        "disable the hard-lockup watchdog: frees one performance counter and its interrupt per CPU",
        "a CPU that hangs with interrupts off is no longer reported",
        lambda root: [_file(root / KERNEL / "nmi_watchdog", "0")],
    ),
    Setting(
        "thp_enabled",
        "transparent huge pages for all anonymous memory: fewer TLB misses in large host buffers",
        "sparse mappings use more memory",
        lambda root: [_file(root / THP / "enabled", "always")],
    ),
    Setting(
        "thp_defrag",
        "make huge pages in the background; only memory that asked for them (madvise) waits",
        "kcompactd uses CPU time",
        lambda root: [_file(root / THP / "defrag", "defer+madvise")],
    ),
)
