"""Errors of GPUs, memory, PCIe and network cards in the kernel log. Standard library only.

Sources: for Xid numbers, "GPU Deployment and Management: Xid Errors" in NVIDIA's documentation; for
amdgpu and EDAC, the messages in Linux, drivers/gpu/drm/amd/amdgpu and drivers/edac.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter

from launch.preflight.check_row import CheckRow, graded, skipped

COMMANDS = (["dmesg"], ["journalctl", "--dmesg", "--boot", "--quiet", "--no-pager"])
READ_S = 20.0
# Xids that a program causes: an exception or a page fault in its kernels, or its termination. Other
# Xids point to the GPU, its memory, links, firmware or driver.
PROGRAM_XIDS = (13, 31, 43, 45, 68, 69)
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+)")
# Pattern, name of the error and verdict. The first pattern that matches a line counts.
PATTERNS = (
    (r"EDAC .*\bUE\b|mce: .*Uncorrected|Memory failure:", "uncorrected memory error", "refuse"),
    (r"amdgpu .*(uncorrectable|poison)", "amdgpu uncorrectable error", "refuse"),
    (r"amdgpu .*(GPU reset|ring \S+ timeout)", "amdgpu GPU reset or ring timeout", "refuse"),
    (r"amdgpu .*\*ERROR\*", "amdgpu error", "warn"),
    (r"AER: .*(Uncorrect|Fatal)|PCIe Bus Error: severity=Uncorrect", "PCIe error", "refuse"),
    (r"mce: .*Hardware Error|EDAC .*\bCE\b", "corrected memory or CPU error", "warn"),
    (r"PCIe Bus Error: severity=Correct", "corrected PCIe error", "warn"),
    (r"mlx5_core .*(health|fatal|internal error)", "mlx5 device error", "warn"),
    (r"Out of memory: Killed process", "process killed for memory", "warn"),
)


def read() -> tuple[list[str], str]:
    """Return the lines of the kernel log since boot, and an error if it cannot be read, else ""."""
    why = ""
    for command in COMMANDS:
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=READ_S)
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
            continue
        if result.returncode == 0 and result.stdout:
            return result.stdout.splitlines(), ""
        why = result.stderr.strip() or f"{command[0]} shows nothing to this user"
    return [], why


def judge(lines: list[str], unreadable: str) -> CheckRow:
    """Judge the errors in `lines` of the kernel log. `unreadable`: why it could not be read."""
    expected = "no error of GPUs, memory, PCIe or network cards since boot"
    if unreadable:
        return skipped("kernel log", unreadable, expected)
    counts: Counter[str] = Counter()
    verdicts = set()
    for line in lines:
        name, verdict = _error(line)
        if name:
            counts[name] += 1
            verdicts.add(verdict)
    value = "; ".join(f"{name} ({count} x)" for name, count in counts.items())
    do = "see dmesg; reset or replace the part, then reboot, since errors are counted from boot"
    return graded(
        "kernel log",
        value or "no such error",
        expected,
        do,
        refuse="refuse" in verdicts,
        warn="warn" in verdicts,
    )


def _error(line: str) -> tuple[str, str]:
    """Return the name and the verdict of the error that `line` reports, "" and "" if none."""
    if xid := XID.search(line):
        address, number = xid.groups()
        verdict = "warn" if int(number) in PROGRAM_XIDS else "refuse"
        return f"Xid {number} on {address}", verdict
    for pattern, name, verdict in PATTERNS:
        if re.search(pattern, line):
            return name, verdict
    return "", ""
