"""The settings: what each does, its benefit where anybody has measured it, its risk, and which value belongs in which file.

Nothing here was measured by this project, which has no GPU host with root, and AMD publishes no measurement either. The list is that
of AMD's MLPerf Training v5.1 submission (`runtime_tunables.sh`), without its module load.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from system_tuning.files import CPU, DROP_CACHES, THP, Host, Refused, choices_of, value_of

# An idle state whose name does not tell counts as deep above this exit latency. On a Skylake Xeon C1E takes 10 us to leave and C6
# 133 us (Linux, drivers/idle/intel_idle.c, skx_cstates).
SHALLOW_LATENCY_US = 10


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a setting: its value now, and the value it should have."""

    path: str
    now: str
    want: str
    note: str = ""
    follows: bool = False  # the kernel changes it together with the file before it: its old value is kept, but apply does not write it

    @property
    def is_good(self) -> bool:
        return self.follows or self.now == self.want


@dataclasses.dataclass
class Found:
    """A setting on this host. `unsupported`: why it does not exist here. `problems`: files that cannot be read, or are refused."""

    files: list[File] = dataclasses.field(default_factory=list)
    unsupported: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)


AMD = "AMD's MLPerf Training v5.1 submission, runtime_tunables.sh"


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    what: str
    benefit: str
    risk: str
    find: Callable[[Host, str], Found]  # the second argument is the value for thp_defrag
    source: str = AMD
    is_one_shot: bool = False  # leaves nothing behind, so there is nothing to revert
    is_default: bool = True

    def look(self, host: Host, defrag: str = "defer+madvise") -> Found:
        """Read-only. A missing file is no error: the setting is not supported here."""
        try:
            return self.find(host, defrag)
        except FileNotFoundError as error:
            return Found(unsupported=f"there is no {error.filename}")
        except (OSError, Refused) as error:
            return Found(problems=[str(error)])


def _one_file(path: str, want: str) -> Callable[[Host, str], Found]:
    return lambda host, defrag: Found([File(path, value_of(host.read(path)), want)])


def _page_cache(host: Host, defrag: str) -> Found:
    if not host.names("/proc/sys/vm", "drop_caches"):
        return Found(unsupported=f"there is no {DROP_CACHES}")
    return Found([File(DROP_CACHES, "", "3")])  # write-only: there is no value to read


def _is_deep(name: str, latency_us: str) -> bool:
    """Whether an idle state is deeper than C1: by its name (C1, C1E, C1_ACPI against C2, C6N, C3_ACPI), else by its exit latency.

    A fixed index would not do: state 2 is C2 on EPYC, but C1E on a Xeon with intel_idle, where AMD's `cpupower idle-set -d 2`
    leaves C6 on.
    """
    if number := re.match(r"C([0-9]+)", name):
        return int(number[1]) > 1
    return latency_us.isdecimal() and int(latency_us) > SHALLOW_LATENCY_US


def _idle_states(host: Host, defrag: str) -> Found:
    found = Found()
    for cpu in host.names(CPU, r"cpu[0-9]{1,5}"):
        folder = f"{CPU}/{cpu}/cpuidle"
        for state in host.names(folder, r"state[1-9][0-9]?"):  # state0 is polling, or WFI on Arm: it must stay
            try:
                name, latency_us = (host.read(f"{folder}/{state}/{file}").strip() for file in ("name", "latency"))
                if _is_deep(name, latency_us):
                    path = f"{folder}/{state}/disable"
                    found.files.append(File(path, value_of(host.read(path)), "1", f"{name}, {latency_us} us to leave"))
            except (OSError, Refused) as error:
                found.problems.append(str(error))
    if not found.files and not found.problems:
        found.unsupported = "there is no idle state deeper than C1 (a virtual machine, or switched off in the BIOS)"
    return found


def _governor(host: Host, defrag: str) -> Found:
    """The governor of every policy. With intel_pstate or amd-pstate in active mode the kernel changes the energy preference with it."""
    found = Found()
    for policy in host.names(f"{CPU}/cpufreq", r"policy[0-9]{1,5}"):
        folder = f"{CPU}/cpufreq/{policy}"
        try:
            governor = File(f"{folder}/scaling_governor", value_of(host.read(f"{folder}/scaling_governor")), "performance")
            choices = host.read(f"{folder}/scaling_available_governors").split()
            if "performance" not in choices:
                found.unsupported = f"{governor.path} does not offer performance, only {' '.join(choices) or 'nothing'}"
                continue
            found.files.append(governor)
            path = f"{folder}/energy_performance_preference"
            if not governor.is_good and host.names(folder, "energy_performance_preference"):
                found.files.append(File(path, value_of(host.read(path)), "performance", follows=True))
        except (OSError, Refused) as error:
            found.problems.append(str(error))
    if not found.files and not found.problems and not found.unsupported:
        found.unsupported = "there is no frequency scaling (a virtual machine, or fixed by the BIOS)"
    return found


def _thp(file: str, want: str = "") -> Callable[[Host, str], Found]:
    def find(host: Host, defrag: str) -> Found:
        text, value = host.read(f"{THP}/{file}"), want or defrag
        if value not in choices_of(text):
            return Found(unsupported=f"this kernel does not offer {value}, only {' '.join(choices_of(text))}")
        return Found([File(f"{THP}/{file}", value_of(text), value)])

    return find


SETTINGS = (
    Setting(
        "page_cache",
        "sync, then drop the page cache, dentries and inodes once",
        "the MLPerf rules require cold caches; more free huge pages. Not measured",
        "the next reads of every program on this host come from disk",
        _page_cache,
        f"{AMD}; NVIDIA's run.sub does the same",
        is_one_shot=True,
    ),
    Setting(
        "idle_states",
        "disable the CPU idle states deeper than C1",
        "leaving a deep state takes tens to hundreds of us (shown), which delays the first work after a wait. Not measured",
        "more power and heat when idle, less headroom for the busy cores to boost",
        _idle_states,
        f"{AMD} (by index 2; here by name and exit latency)",
    ),
    Setting(
        "governor",
        "CPU frequency governor performance",
        "the threads that launch kernels keep the highest clock. Not measured",
        "more power",
        _governor,
    ),
    Setting(
        "numa_balancing",
        "disable automatic NUMA balancing, which samples accesses by unmapping pages",
        "+50 % throughput of two half-size all-reduces, one user's measurement (ROCm/rccl#1562); AMD's training guide asks for it",
        "remote memory stays remote: bind processes to the GPU's node; by AMD's guide some workloads lose",
        _one_file("/proc/sys/kernel/numa_balancing", "0"),
        f"{AMD}; ROCm documentation, prerequisite system validation before training; kernel admin guide (off when bound)",
    ),
    Setting(
        "nmi_watchdog",
        "disable the hard-lockup watchdog: frees one performance counter and its interrupt per CPU",
        "not measured",
        "a CPU that hangs with interrupts off is no longer reported",
        _one_file("/proc/sys/kernel/nmi_watchdog", "0"),
    ),
    Setting(
        "thp_enabled",
        "transparent huge pages for all anonymous memory",
        "fewer TLB misses in large host buffers. Not measured",
        "sparse mappings use more memory",
        _thp("enabled", "always"),
    ),
    Setting(
        "thp_defrag",
        "make huge pages in the background; only memory that asked for them (madvise) waits",
        "huge pages sooner, without the stalls of AMD's choice, always. Not measured",
        "kcompactd uses CPU time; with --thp-defrag always any page fault may stop to compact memory",
        _thp("defrag"),
        f"{AMD} (always); kernel admin guide, transhuge (defer+madvise since Linux 4.11)",
    ),
    Setting(
        "aslr",
        "disable address-space randomization on the whole host; only with --only aslr",
        "said to make runs vary less; nobody has shown a benefit",
        "SECURITY: every process started afterwards is easier to attack; `setarch -R COMMAND` does it for one process",
        _one_file("/proc/sys/kernel/randomize_va_space", "0"),
        is_default=False,
    ),
)
