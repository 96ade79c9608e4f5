"""The settings: the purpose and risk of each, its files and their wanted values.

docs/system_tuning.md names the sources. The list comes from AMD's MLPerf Training v5.1 submission
(`runtime_tunables.sh`), without the kernel module that it loads. The benefit of these settings is
not measured: this project has no GPU host with root access, and AMD publishes no measurement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CPU = "sys/devices/system/cpu"
KERNEL = "proc/sys/kernel"
THP = "sys/kernel/mm/transparent_hugepage"
# Maximum exit latency of a shallow idle state, in microseconds. It decides only if the state's name
# does not. On a Skylake Xeon the exit latency is 10 µs for C1E and 133 µs for C6 (Linux,
# drivers/idle/intel_idle.c, skx_cstates).
SHALLOW_LATENCY_US = 10
BETTER = "could be better"


@dataclass(frozen=True)
class File:
    """A file of a setting: its current value and the wanted value."""

    path: Path
    now: str  # "" if the file has no value
    want: str
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting of the operating system, which may consist of many files."""

    name: str
    what: str  # what it changes, and why that helps
    risk: str
    find: Callable[[Path], list[File]]  # the argument is the root of the file system

    def files(self, root: Path) -> list[File]:
        """Return the setting's files on this host, or [] if the host does not support it.

        Nothing is written.
        """
        return [file for file in self.find(root) if file.now]


def value_of(path: Path) -> str:
    """Return the value in the file at `path`, or "" if it cannot be read.

    If the file lists choices, the value is the word in brackets (`always [madvise] never`). A file
    cannot be read if it is missing or not text, or if its CPU is offline (the kernel then returns
    EBUSY).
    """
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    chosen = re.search(r"\[(\S+)\]", text)
    return chosen[1] if chosen else text


def _file(path: Path, want: str, note: str = "") -> File:
    return File(path, value_of(path), want, note)


def _is_deep(name: str, latency_us: str) -> bool:
    """Return whether an idle state is deeper than C1.

    The number in the name decides: C1, C1E and C1_ACPI are shallow, C2, C6N and C3_ACPI are deep.
    Without a number, the exit latency decides. The index of the state cannot decide: state 2 is C2
    on EPYC, but C1E on a Xeon with intel_idle, where AMD's `cpupower idle-set -d 2` would leave C6
    enabled.
    """
    if number := re.match(r"C([0-9]+)", name):
        return int(number[1]) > 1
    return latency_us.isdecimal() and int(latency_us) > SHALLOW_LATENCY_US


def _idle_states(root: Path) -> list[File]:
    """Return the file `disable` of every deep idle state of every CPU."""
    files = []
    # state0 (polling, on Arm WFI) must stay enabled.
    for state in sorted((root / CPU).glob("cpu[0-9]*/cpuidle/state[1-9]*")):
        name = value_of(state / "name")
        latency_us = value_of(state / "latency")
        if _is_deep(name, latency_us):
            files.append(_file(state / "disable", "1", f"{name}, {latency_us} µs to leave"))
    return files


def _governor(root: Path) -> list[File]:
    """Return the governor file of every policy, preceded by its energy preference if it changes.

    With intel_pstate or amd-pstate in active mode, the governor "performance" also sets the energy
    preference, which the kernel then refuses to change. The preference is therefore written before
    the governor and restored after it.
    """
    files = []
    # cpuN/cpufreq is only a link to one of these directories.
    for policy in sorted((root / CPU / "cpufreq").glob("policy[0-9]*")):
        governor = _file(policy / "scaling_governor", "performance")
        if governor.now != governor.want:
            files.append(_file(policy / "energy_performance_preference", "performance"))
        files.append(governor)
    return files


SETTINGS = (
    Setting(
        "idle_states",
        "disable CPU idle states deeper than C1, which take tens to hundreds of µs to leave",
        "more power and heat when idle, less headroom for the busy cores to boost",
        _idle_states,
    ),
    Setting(
        "governor",
        "set the CPU frequency governor to performance, so that threads that launch kernels keep"
        " the highest clock",
        "more power",
        _governor,
    ),
    Setting(
        "numa_balancing",
        "disable automatic NUMA balancing, which samples accesses by unmapping pages",
        "memory on another NUMA node stays there unless processes are bound to the GPU's node;"
        " some workloads become slower (AMD's guide)",
        lambda root: [_file(root / KERNEL / "numa_balancing", "0")],
    ),
    Setting(
        "nmi_watchdog",
        "disable the hard-lockup watchdog, which takes a performance counter and its interrupt on"
        " each CPU",
        "a CPU that hangs with interrupts off is no longer reported",
        lambda root: [_file(root / KERNEL / "nmi_watchdog", "0")],
    ),
    Setting(
        "thp_enabled",
        "use transparent huge pages for all anonymous memory: fewer TLB misses in large host"
        " buffers",
        "sparsely used mappings take more memory",
        lambda root: [_file(root / THP / "enabled", "always")],
    ),
    Setting(
        "thp_defrag",
        "form huge pages in the background; only memory that asks for them (madvise) waits",
        "kcompactd uses CPU time",
        lambda root: [_file(root / THP / "defrag", "defer+madvise")],
    ),
)


def state(root: Path = Path("/")) -> dict[str, str]:
    """Return "good" or "could be better" for each setting that this host has, by its name."""
    states = {}
    for setting in SETTINGS:
        files = setting.files(root)
        if files:
            is_good = all(file.now == file.want for file in files)
            states[setting.name] = "good" if is_good else BETTER
    return states
