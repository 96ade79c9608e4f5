"""The settings: what each does, what it is worth where anybody has measured it, its risk, and what to write where.

Nothing here was measured by this project, which has no GPU host with root, and AMD publishes no measurement either: the list is the
one of AMD's MLPerf Training v5.1 submission (`runtime_tunables.sh`), less the module load, and each step is told apart by evidence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from system_tuning.files import CPU, DROP_CACHES, THP, Refused, Tree, choices_of, value_of

# Up to this exit latency an idle state whose name does not tell counts as C1. On a Skylake Xeon C1E takes 10 us to leave and C6 133 us
# (Linux, drivers/idle/intel_idle.c, skx_cstates).
SHALLOW_LATENCY_US = 10


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chose: value for THP defrag; whether address-space randomisation goes off."""

    thp_defrag: str = "defer+madvise"
    aslr_off: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
    """One file: its text and value now, and the value it should have."""

    knob: str
    path: str
    raw: str
    want: str
    note: str = ""
    follows: bool = False  # the kernel changes it along with the setting before it: saved, but never written by apply

    @property
    def now(self) -> str:
        return value_of(self.raw)


@dataclasses.dataclass
class Found:
    """One knob on this host. `missing`: why it is not supported here. `problems`: what could not be looked at, or is refused."""

    settings: list[Setting] = dataclasses.field(default_factory=list)
    missing: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Knob:
    name: str
    what: str
    worth: str
    risk: str
    source: str
    look: Callable[[Tree, Options], Found]
    one_shot: bool = False  # nothing is left behind, so there is nothing to revert


def _one_file(knob: str, path: str, want: str) -> Callable[[Tree, Options], Found]:
    def look(tree: Tree, options: Options) -> Found:
        return Found([Setting(knob, path, tree.read(path), want)])

    return look


def _page_cache(tree: Tree, options: Options) -> Found:
    error = tree.why_not_writable(DROP_CACHES)  # write-only: there is no value to read
    if isinstance(error, FileNotFoundError):
        raise error
    return Found([Setting("page_cache", DROP_CACHES, "", "3")])


def _is_deep(name: str, latency_us: int | None) -> bool | None:
    """Whether an idle state is deeper than C1; None if neither its name nor its exit latency tells.

    The name first: POLL, C1, C1E, C1_ACPI against C2, C6, C6N, C3_ACPI. A fixed index would not do: 2 is C2 on EPYC, but C1E on a
    Xeon with intel_idle, where AMD's `cpupower idle-set -d 2` leaves C6 on.
    """
    if name == "POLL":
        return False
    if number := re.match(r"C([0-9]+)", name):
        return int(number[1]) > 1
    return None if latency_us is None else latency_us > SHALLOW_LATENCY_US


def _idle_states(tree: Tree, options: Options) -> Found:
    found = Found()
    for cpu in tree.names(CPU, r"cpu[0-9]{1,5}"):
        folder = f"{CPU}/{cpu}/cpuidle"
        for state in tree.names(folder, r"state[0-9]{1,2}"):
            if state == "state0":  # POLL, or WFI on Arm: what is left when all others are off
                continue
            try:
                name = tree.read(f"{folder}/{state}/name").strip()
                latency = tree.read(f"{folder}/{state}/latency").strip()
                latency_us = int(latency) if latency.isascii() and latency.isdigit() else None
                if _is_deep(name, latency_us):
                    path = f"{folder}/{state}/disable"
                    found.settings.append(Setting("idle_states", path, tree.read(path), "1", f"{name}, {latency} us to leave"))
            except (OSError, Refused) as error:
                found.problems.append(str(error))
    if not found.settings and not found.problems:
        found.missing = "no idle state deeper than C1 is offered (a virtual machine, or switched off in the BIOS)"
    return found


def _governor(tree: Tree, options: Options) -> Found:
    """The governor of every policy. With intel_pstate or amd-pstate in active mode the kernel changes the energy preference with it."""
    found = Found()
    for policy in tree.names(f"{CPU}/cpufreq", r"policy[0-9]{1,5}"):
        folder = f"{CPU}/cpufreq/{policy}"
        try:
            path = f"{folder}/scaling_governor"
            setting = Setting("governor", path, tree.read(path), "performance")
            choices = tree.read(f"{folder}/scaling_available_governors").split()
            if "performance" not in choices:
                found.missing = f"{path}: performance is not offered, only {' '.join(choices) or 'nothing'}"
                continue
            found.settings.append(setting)
            path = f"{folder}/energy_performance_preference"
            if setting.now != "performance" and tree.names(folder, "energy_performance_preference"):
                found.settings.append(Setting("governor", path, tree.read(path), "performance", follows=True))
        except (OSError, Refused) as error:
            found.problems.append(str(error))
    if not found.settings and not found.problems and not found.missing:
        found.missing = "no frequency scaling (a virtual machine, or fixed by the BIOS)"
    return found


def _thp_defrag(tree: Tree, options: Options) -> Found:
    path = f"{THP}/defrag"
    raw = tree.read(path)
    if options.thp_defrag not in choices_of(raw):
        return Found(missing=f"this kernel does not offer {options.thp_defrag}, only {' '.join(choices_of(raw))}")
    return Found([Setting("thp_defrag", path, raw, options.thp_defrag)])


def _thp_enabled(tree: Tree, options: Options) -> Found:
    path = f"{THP}/enabled"
    raw = tree.read(path)
    if "always" not in choices_of(raw):
        return Found(missing=f"this kernel does not offer always, only {' '.join(choices_of(raw))}")
    return Found([Setting("thp_enabled", path, raw, "always")])


AMD = "AMD's MLPerf Training v5.1 submission, runtime_tunables.sh"

KNOBS = (
    Knob(
        "page_cache",
        "sync, then drop the page cache, dentries and inodes once",
        "the MLPerf rules want cold caches; more free huge pages. Not measured",
        "the next reads of everybody on this host come from disk",
        f"{AMD}; NVIDIA's run.sub does the same",
        _page_cache,
        one_shot=True,
    ),
    Knob(
        "idle_states",
        "disable the CPU idle states deeper than C1",
        "leaving a deep state takes tens to hundreds of us (shown), which delays what follows a wait. Not measured",
        "more power and heat when idle, less head-room for the busy cores to boost",
        f"{AMD} (by index 2; here by name and exit latency)",
        _idle_states,
    ),
    Knob(
        "governor",
        "CPU frequency governor performance",
        "the threads that launch kernels keep the top clock. Not measured",
        "more power",
        AMD,
        _governor,
    ),
    Knob(
        "numa_balancing",
        "automatic NUMA balancing off: no sampling of pages by unmapping them",
        "+50 % throughput of two half-size all-reduces, one user's measurement (ROCm/rccl#1562); AMD's training guide asks for it",
        "memory that is remote stays remote: bind processes to the GPU's node; by AMD's guide some workloads lose",
        f"{AMD}; ROCm documentation, prerequisite system validation before training; kernel admin guide (off when bound)",
        _one_file("numa_balancing", "/proc/sys/kernel/numa_balancing", "0"),
    ),
    Knob(
        "nmi_watchdog",
        "hard-lockup watchdog off: one performance counter and its interrupt per CPU less",
        "not measured",
        "a CPU that is stuck with interrupts off is no longer reported",
        AMD,
        _one_file("nmi_watchdog", "/proc/sys/kernel/nmi_watchdog", "0"),
    ),
    Knob(
        "thp_enabled",
        "transparent huge pages for all anonymous memory",
        "fewer TLB misses in large host buffers. Not measured",
        "more memory used by sparse mappings",
        AMD,
        _thp_enabled,
    ),
    Knob(
        "thp_defrag",
        "huge pages that are not free are made in the background; only memory that asked for them (madvise) waits",
        "huge pages sooner, without the stalls of AMD's choice, always. Not measured",
        "kcompactd uses CPU time; with --thp-defrag always every page fault may stop to compact memory",
        f"{AMD} (always); kernel admin guide, transhuge (defer+madvise since Linux 4.11)",
        _thp_defrag,
    ),
    Knob(
        "aslr",
        "address-space randomisation off, for the whole host; only with --aslr-off",
        "claimed to make runs vary less; no benefit was ever shown",
        "SECURITY: every process started from then on is easier to attack; `setarch -R COMMAND` does it for one process",
        AMD,
        _one_file("aslr", "/proc/sys/kernel/randomize_va_space", "0"),
    ),
)
NAMES = tuple(knob.name for knob in KNOBS)


def look(knob: Knob, tree: Tree, options: Options) -> Found:
    """The knob as it is on this host. Reads only. A file that does not exist is no error: the knob is not supported here."""
    try:
        return knob.look(tree, options)
    except FileNotFoundError as error:
        return Found(missing=f"there is no {error.filename}")
    except (OSError, Refused) as error:
        return Found(problems=[str(error)])


def offered(tree: Tree, path: str) -> list[str]:
    """The values that may be written to `path` now, by what the kernel itself offers. Raises OSError and Refused."""
    folder, _, name = path.rpartition("/")
    if folder == THP:
        return choices_of(tree.read(path))
    if name == "scaling_governor":
        return tree.read(f"{folder}/scaling_available_governors").split()
    if name == "energy_performance_preference":
        return [*tree.read(f"{folder}/energy_performance_available_preferences").split(), *map(str, range(256))]
    return {"drop_caches": ["3"], "numa_balancing": ["0", "1", "2", "3"], "randomize_va_space": ["0", "1", "2"]}.get(name, ["0", "1"])
