"""What the driver reports about each GPU now: power, clocks, memory, use, throttling, memory errors. For the sampler and for preflight.

Asks nvidia-smi, or reads amdgpu's files in /sys; neither needs root or a Python package. nvidia-smi was tried on an H200, where a call
takes 0.03 s; amdgpu's files were taken from the kernel's documentation and never read: we have no AMD GPU. Standard library only.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Name of a value: field of nvidia-smi, what to divide it by; files of an AMD card, of which the first that exists counts, and their divisor
# (kernel documentation, gpu/amdgpu).
VALUES: dict[str, tuple[str, float, tuple[str, ...], float]] = {
    "power_w": ("power.draw", 1, ("hwmon/hwmon*/power1_average", "hwmon/hwmon*/power1_input"), 1e6),
    "power_limit_w": ("enforced.power.limit", 1, ("hwmon/hwmon*/power1_cap",), 1e6),
    "temperature_c": (
        "temperature.gpu",
        1,
        ("hwmon/hwmon*/temp2_input", "hwmon/hwmon*/temp1_input"),
        1e3,
    ),  # junction, edge
    "clock_mhz": ("clocks.sm", 1, ("hwmon/hwmon*/freq1_input",), 1e6),
    "memory_clock_mhz": ("clocks.mem", 1, ("hwmon/hwmon*/freq2_input",), 1e6),
    "memory_gib": ("memory.used", 2**10, ("mem_info_vram_used",), 2**30),
    "utilization_percent": ("utilization.gpu", 1, ("gpu_busy_percent",), 1),
    "uncorrected_errors": (
        "ecc.errors.uncorrected.volatile.total",
        1,
        (),
        1,
    ),  # of memory, since the driver was loaded
    "corrected_errors": ("ecc.errors.corrected.volatile.total", 1, (), 1),
}
AMD_ERRORS = {
    "uncorrected_errors": "ue",
    "corrected_errors": "ce",
}  # in each block's file: `ue: 0` and `ce: 0`
HEALTH = ("utilization_percent", *AMD_ERRORS)  # what preflight asks for
SAMPLED = tuple(name for name in VALUES if name not in AMD_ERRORS)  # once a second during a run
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
# amdgpu's binary file gpu_metrics (kgd_pp_interface.h): revision -> (size of the file, offset of the first of five counters in 32 bits, which
# grow while a limit holds the clock down). Newer revisions list attributes instead; they are not read.
AMD_METRICS: dict[tuple[int, int], tuple[int | None, int]] = {
    (1, 6): (1664, 36),
    (1, 7): (2208, 44),
    (1, 8): (None, 44),
}
AMD_LIMITS = (
    "hardware slowdown",
    "power cap",
    "thermal (socket)",
    "thermal (voltage regulator)",
    "thermal (HBM)",
)
# Throttling beyond the power limit, which a healthy card reaches under full load.
FAULTS = (
    *("hardware slowdown", "thermal (driver)", "thermal (hardware)", "power brake"),
    *("thermal (socket)", "thermal (voltage regulator)", "thermal (HBM)"),
)


class DriverError(Exception):
    """nvidia-smi is missing, fails, hangs, or answers something else; the message is its first line of output."""


def read_gpus(vendor: str, addresses: Sequence[str], names: Sequence[str]) -> list[dict]:
    """The values `names` and `throttle`, a list of reasons, of each GPU of `addresses` (Device.address). Raises DriverError.

    None where the driver does not say; {} for a GPU that it no longer lists. An AMD GPU counts how long each limit held: its reasons come from
    two readings (`with_throttling`), and until then `throttle_counters` stands in their place.
    """
    if vendor == "amd":
        return [
            {name: _amd_value(Path(card), name) for name in names}
            | {"throttle_counters": amd_throttle_counters(Path(card))}
            for card in addresses
        ]
    fields = ["uuid", "clocks_event_reasons.active", *(VALUES[name][0] for name in names)]
    found: dict[str, dict] = {}
    for uuid, reasons, *texts in ask_nvidia_smi(",".join(fields), os.environ):
        values = {
            name: _scaled(text, VALUES[name][1]) for name, text in zip(names, texts, strict=True)
        }
        bits = (
            int(reasons, 16) if reasons.startswith("0x") else None
        )  # such as 0x0000000000000004; None for [N/A]
        throttle = (
            None
            if bits is None
            else [name for bit, name in NVML_THROTTLE_REASONS.items() if bits & bit]
        )
        found[uuid] = {**values, "throttle": throttle}
    return [found.get(address, {}) for address in addresses]


def amd_throttle_counters(card: Path) -> dict[str, int] | None:
    """The counter of each of AMD_LIMITS; None if gpu_metrics is missing, or of a revision that AMD_METRICS lacks."""
    try:
        content = (card / "gpu_metrics").read_bytes()
    except OSError:
        return None
    if len(content) < 4:
        return None
    size, *revision = struct.unpack_from("<HBB", content)
    expected, offset = AMD_METRICS.get((revision[0], revision[1]), (None, 0))
    if not offset or expected not in (None, size) or len(content) < offset + 4 * len(AMD_LIMITS):
        return None
    return dict(
        zip(AMD_LIMITS, struct.unpack_from(f"<{len(AMD_LIMITS)}I", content, offset), strict=True)
    )


def with_throttling(before: Sequence[dict], after: Sequence[dict]) -> list[dict]:
    """`after` with `throttle`, the limits that held between two readings of `read_gpus`; None where a counter is missing.

    Readings of NVIDIA GPUs, which have their reasons already, are returned as they are.
    """
    found = []
    for number, values in enumerate(after):
        if "throttle_counters" not in values:
            found.append(values)
            continue
        then = before[number].get("throttle_counters") if number < len(before) else None
        now = values["throttle_counters"]
        reasons = (
            None
            if then is None or now is None
            else [name for name in AMD_LIMITS if now[name] != then[name]]
        )
        found.append(
            {name: value for name, value in values.items() if name != "throttle_counters"}
            | {"throttle": reasons}
        )
    return found


def pci_folders(vendor: str, addresses: Sequence[str], sysfs: Path = Path("/sys")) -> list[Path]:
    """The folder of each GPU of `addresses` (Device.address) in /sys, as a PCI device. Raises DriverError."""
    if vendor == "amd":
        return [Path(card) for card in addresses]
    found = {
        uuid: bus.lower().split(":", 1)
        for uuid, bus in ask_nvidia_smi("uuid,pci.bus_id", os.environ)
    }  # 00000000:1A:00.0
    places = [found.get(address, ["0", ""]) for address in addresses]
    return [sysfs / f"bus/pci/devices/{int(domain, 16):04x}:{place}" for domain, place in places]


def ask_nvidia_smi(fields: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The values of `fields` (separated by commas), one row per GPU of the machine. Raises DriverError."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(str(error)) from None
    lines = answer.stdout.strip().splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    strange = [
        line for line, row in zip(lines, rows, strict=True) if len(row) != len(fields.split(","))
    ]  # a message between the rows
    if answer.returncode or strange or not rows:
        said = strange + lines + answer.stderr.strip().splitlines()
        raise DriverError(said[0] if said else f"no output, exit code {answer.returncode}")
    return rows


def _amd_value(card: Path, name: str) -> float | None:
    if name in AMD_ERRORS:
        texts = [read_text(path) for path in (card / "ras").glob("*_err_count")]
        return (
            sum(
                int(count)
                for text in texts
                for count in re.findall(rf"{AMD_ERRORS[name]}: (\d+)", text)
            )
            if texts
            else None
        )
    _, _, patterns, unit = VALUES[name]
    texts = [read_text(path) for pattern in patterns for path in sorted(card.glob(pattern))]
    return _scaled(next(filter(None, texts), ""), unit)


def _scaled(text: str, unit: float) -> float | None:
    """None for "[N/A]", and for a file that is not there."""
    try:
        return round(float(text) / unit, 2)
    except ValueError:
        return None


def read_text(path: Path) -> str:
    """The stripped text of a file in /proc or /sys; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # also what the kernel answers for a speed that it does not know
        return ""


def key_values(path: Path) -> dict[str, int]:
    """The lines `name number` of a file in /proc or /sys."""
    lines = [line.split() for line in read_text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}
