"""What the driver reports about each GPU now: utilization, memory errors, throttling. Asks nvidia-smi, or reads amdgpu's files in /sys.

Neither needs root or a Python package. The AMD part was written from the kernel's documentation and never run: we have no AMD GPU.
Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# nvml.h, nvmlClocksEventReasons. Bit 0 means idle and is no throttling.
NVML_THROTTLE_REASONS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (driver)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
FIELDS = "pci.bus_id,utilization.gpu,ecc.errors.uncorrected.volatile.total,ecc.errors.corrected.volatile.total,clocks_event_reasons.active"


@dataclass(frozen=True)
class GpuStats:
    """One GPU at one moment; None where the driver does not say."""

    utilization_percent: int | None = None
    uncorrected_errors: int | None = None  # of memory, since the driver was loaded
    corrected_errors: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    memory_partition: str = ""  # AMD: NPS1 is one partition


class DriverError(Exception):
    """nvidia-smi is missing, fails or hangs; the message is its first line of output."""


def ask_nvidia_smi(fields: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The values of `fields` (separated by commas), one row per GPU of the machine. Raises DriverError."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(str(error)) from None
    if answer.returncode:
        raise DriverError(next(iter((answer.stdout + answer.stderr).strip().splitlines()), "no output"))
    return parse_csv(answer.stdout)


def parse_csv(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]


def read_text(path: Path) -> str:
    """The stripped text of a file in /proc or /sys; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def key_values(path: Path) -> dict[str, int]:
    """The lines `name number` of a file in /proc or /sys."""
    lines = [line.split() for line in read_text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}


def read_gpus(vendor: str, environment: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys")) -> dict[str, GpuStats]:
    """All GPUs of the machine by PCI address (0000:1b:00.0); {} if the driver does not answer."""
    if vendor == "amd":
        cards = [path.parent for path in (sysfs / "bus/pci/devices").glob("*/mem_info_vram_total")]
        return {card.name: _amd_stats(card) for card in cards if read_text(card / "vendor") == "0x1002"}
    try:
        return nvidia_stats(ask_nvidia_smi(FIELDS, environment))
    except DriverError:
        return {}


def nvidia_stats(rows: list[list[str]]) -> dict[str, GpuStats]:
    """`rows`: the answer to FIELDS, with [N/A] for what a card does not have. NVML's PCI domain has eight digits, Linux's has four."""
    stats = {}
    for pci, utilization, uncorrected, corrected, reasons in (row for row in rows if len(row) == 5):
        domain, _, rest = pci.lower().partition(":")
        stats[f"{domain[-4:]}:{rest}"] = GpuStats(_number(utilization), _number(uncorrected), _number(corrected), throttle_reasons(reasons))
    return stats


def throttle_reasons(text: str) -> tuple[str, ...] | None:
    """The names of the bits that nvidia-smi gives as 0x0000000000000004."""
    bits = _number(text)
    return None if bits is None else tuple(name for bit, name in NVML_THROTTLE_REASONS.items() if bits & bit)


def _amd_stats(card: Path) -> GpuStats:
    """Each block's error file holds `ue: 0` and `ce: 0`. sysfs has no throttle reasons whose names hold across driver versions."""
    counts = [dict(re.findall(r"(ue|ce): (\d+)", read_text(path))) for path in sorted((card / "ras").glob("*_err_count"))]
    uncorrected, corrected = (sum(int(count.get(name, 0)) for count in counts) if counts else None for name in ("ue", "ce"))
    partition = read_text(card / "current_memory_partition")
    return GpuStats(_number(read_text(card / "gpu_busy_percent")), uncorrected, corrected, None, partition)


def _number(text: str) -> int | None:
    return int(text, 16 if text.startswith("0x") else 10) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text) else None
