"""Reads and writes files under /proc and /sys. Only files on the allow-list are written, and never through a symbolic link."""

from __future__ import annotations

import os
import re

CPU = "/sys/devices/system/cpu"
THP = "/sys/kernel/mm/transparent_hugepage"
DROP_CACHES = "/proc/sys/vm/drop_caches"

# cpuN/cpufreq is a link to cpufreq/policyN: the policies are used instead.
WRITABLE = (
    re.escape(DROP_CACHES),
    r"/proc/sys/kernel/(numa_balancing|nmi_watchdog|randomize_va_space)",
    re.escape(THP) + r"/(enabled|defrag)",
    re.escape(CPU) + r"/cpufreq/policy[0-9]{1,5}/(scaling_governor|energy_performance_preference)",
    re.escape(CPU) + r"/cpu[0-9]{1,5}/cpuidle/state[0-9]{1,2}/disable",
)
VALUE = r"[A-Za-z0-9_+-]{1,40}"  # one word, so that no second line can hide in a value


class Refused(Exception):
    """This package does not touch that path, or does not write that value."""


def value_of(text: str) -> str:
    """The value in the text of a file: the word in brackets where the file lists choices (`always [madvise] never`)."""
    chosen = re.search(r"\[([^\]\s]+)\]", text)
    return chosen[1] if chosen else text.strip()


def choices_of(text: str) -> list[str]:
    """The choices that a file with brackets offers."""
    return text.replace("[", "").replace("]", "").split()


def check_writable(path: str, value: str) -> None:
    """Raises Refused unless `path` is on the allow-list and `value` is one plain word."""
    if not any(re.fullmatch(pattern, path) for pattern in WRITABLE):
        raise Refused(f"{path!r} is not on the list of files that may be written")
    if not re.fullmatch(VALUE, value):
        raise Refused(f"{value!r} is not a value for {path}")


class Host:
    """/proc and /sys below `root`. Methods raise OSError as the kernel does (FileNotFoundError: not supported here), and Refused."""

    def __init__(self, root: str = "/"):
        self.root = os.path.realpath(root)

    def read(self, path: str) -> str:
        with open(self._place(path), encoding="utf-8", errors="surrogateescape") as file:
            return file.read()

    def names(self, folder: str, pattern: str) -> list[str]:
        """Entries of `folder` that match `pattern`, ordered by the number in them; [] if there is no such folder."""
        place = self._place(folder)
        names = os.listdir(place) if os.path.isdir(place) else []
        return sorted((name for name in names if re.fullmatch(pattern, name)), key=lambda name: int("0" + re.sub(r"[^0-9]", "", name)))

    def may_write(self, path: str) -> bool:
        """Whether this process may write the file, asked of the kernel; False also on a read-only mount."""
        return os.access(self._place(path), os.W_OK)

    def write(self, path: str, value: str) -> None:
        """Write one word, with one write(2): the kernel takes it whole or not at all."""
        check_writable(path, value)
        descriptor = os.open(self._place(path), os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            os.write(descriptor, f"{value}\n".encode())
        finally:
            os.close(descriptor)

    def _place(self, path: str) -> str:
        place = os.path.join(self.root, path.lstrip("/"))
        if (real := os.path.realpath(place)) != place:
            raise Refused(f"{path} leads through a symbolic link to {real}")
        return place
