"""Current driver readings of each GPU: power, clocks, memory, use, throttling, memory errors. For
the sampler and preflight.

The readings come from nvidia-smi, or from amdgpu's files in /sys. Neither needs root or a Python
package. nvidia-smi was tested on an H200, where a call takes 0.03 s. amdgpu's files follow the
kernel's documentation and were never read on hardware, because no AMD GPU was available. Standard
library only.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Name of a value -> field of nvidia-smi and its divisor; files of an AMD card, of which the first
# that exists is read, and their divisor (kernel documentation, gpu/amdgpu).
VALUES: dict[str, tuple[str, float, tuple[str, ...], float]] = {
    "power_w": ("power.draw", 1, ("hwmon/hwmon*/power1_average", "hwmon/hwmon*/power1_input"), 1e6),
    "power_limit_w": ("enforced.power.limit", 1, ("hwmon/hwmon*/power1_cap",), 1e6),
    "temperature_c": (
        "temperature.gpu",
        1,
        # junction, edge
        ("hwmon/hwmon*/temp2_input", "hwmon/hwmon*/temp1_input"),
        1e3,
    ),
    "clock_mhz": ("clocks.sm", 1, ("hwmon/hwmon*/freq1_input",), 1e6),
    "memory_clock_mhz": ("clocks.mem", 1, ("hwmon/hwmon*/freq2_input",), 1e6),
    "memory_gib": ("memory.used", 2**10, ("mem_info_vram_used",), 2**30),
    "utilization_percent": ("utilization.gpu", 1, ("gpu_busy_percent",), 1),
    # Memory errors since the driver was loaded.
    "uncorrected_errors": (
        "ecc.errors.uncorrected.volatile.total",
        1,
        (),
        1,
    ),
    "corrected_errors": ("ecc.errors.corrected.volatile.total", 1, (), 1),
}
# Keys in each block's error file: `ue: 0` and `ce: 0`.
AMD_ERRORS = {
    "uncorrected_errors": "ue",
    "corrected_errors": "ce",
}
HEALTH = ("utilization_percent", *AMD_ERRORS)  # values that preflight reads
SAMPLED = tuple(name for name in VALUES if name not in AMD_ERRORS)  # once a second during a run
# nvml.h, nvmlClocksEventReasons. Bit 0 means idle and is not throttling.
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
# amdgpu's binary file gpu_metrics (kgd_pp_interface.h): revision -> (file size, offset of the first
# of five 32-bit counters). A counter grows while its limit holds the clock down. Newer revisions
# list attributes instead and are not read.
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
# Throttling other than at the power limit, which a healthy card reaches under full load.
FAULTS = (
    *("hardware slowdown", "thermal (driver)", "thermal (hardware)", "power brake"),
    *("thermal (socket)", "thermal (voltage regulator)", "thermal (HBM)"),
)


class DriverError(Exception):
    """A failed query: nvidia-smi is missing, fails, hangs, or gives an unexpected answer.

    The message is its first line of output.
    """


def read_gpus(vendor: str, addresses: Sequence[str], names: Sequence[str]) -> list[dict]:
    """Return the values `names` and `throttle`, a list of reasons, of each GPU of `addresses`
    (Device.address).

    A value is None if the driver does not report it. A GPU that the driver no longer lists is {}.
    An AMD GPU counts how long each limit held, so its reasons come from two readings
    (`with_throttling`). Until then `throttle_counters` replaces them. Raises DriverError.
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
        # such as 0x0000000000000004; None for [N/A]
        bits = int(reasons, 16) if reasons.startswith("0x") else None
        throttle = (
            None
            if bits is None
            else [name for bit, name in NVML_THROTTLE_REASONS.items() if bits & bit]
        )
        found[uuid] = {**values, "throttle": throttle}
    return [found.get(address, {}) for address in addresses]


def amd_throttle_counters(card: Path) -> dict[str, int] | None:
    """Return the counter of each of AMD_LIMITS, or None if gpu_metrics is missing or AMD_METRICS
    lacks its revision.
    """
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
    """Return `after` with `throttle`, the limits that held between two readings of `read_gpus`.

    `throttle` is None if a counter is missing. Readings of NVIDIA GPUs already have their reasons
    and are returned unchanged.
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
    """Return the folder in /sys of each GPU of `addresses` (Device.address), as a PCI device.
    Raises DriverError.
    """
    if vendor == "amd":
        return [Path(card) for card in addresses]
    # nvidia-smi prints addresses like 00000000:1A:00.0.
    found = {
        uuid: bus.lower().split(":", 1)
        for uuid, bus in ask_nvidia_smi("uuid,pci.bus_id", os.environ)
    }
    places = [found.get(address, ["0", ""]) for address in addresses]
    return [sysfs / f"bus/pci/devices/{int(domain, 16):04x}:{place}" for domain, place in places]


def ask_nvidia_smi(fields: str, environment: Mapping[str, str]) -> list[list[str]]:
    """Return the values of `fields` (separated by commas), one row per GPU of the machine. Raises
    DriverError.
    """
    query = [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = _nvidia_smi(query, environment)
    lines = answer.stdout.strip().splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    # lines that are messages, not rows
    strange = [
        line for line, row in zip(lines, rows, strict=True) if len(row) != len(fields.split(","))
    ]
    if answer.returncode or strange or not rows:
        said = strange + lines + answer.stderr.strip().splitlines()
        raise DriverError(said[0] if said else f"no output, exit code {answer.returncode}")
    return rows


def _nvidia_smi(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run nvidia-smi. Raises DriverError if it is missing or hangs."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(str(error)) from None


def read_vboost(addresses: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return the position of the boost slider `vboost` and its largest one, for each NVIDIA GPU of
    `addresses` (Device.address).

    The slider moves power from memory to the cores. Above 0 someone has set it. An entry is None if
    the GPU has no such slider. Raises DriverError.
    """
    answer = _nvidia_smi(["boost-slider", "--list"], os.environ)
    # lines like `|   0     vboost           4              0       |`
    rows = re.findall(r"^\|\s*(\d+)\s+vboost\s+(\d+)\s+(\d+)\s*\|", answer.stdout, re.MULTILINE)
    by_index = {index: (int(current), int(largest)) for index, largest, current in rows}
    index_of = {uuid: index for index, uuid in ask_nvidia_smi("index,uuid", os.environ)}
    return [by_index.get(index_of.get(address, "")) for address in addresses]


def read_power_profiles() -> str:
    """Return what the driver says of the workload power profiles in force, on one line.

    "" if it has none: GPUs before Blackwell, and drivers before 570. Raises DriverError.
    """
    answer = _nvidia_smi(["power-profiles", "-ge"], os.environ)
    lines = [line.strip(" |+-=\t") for line in answer.stdout.splitlines()]
    said = "; ".join(dict.fromkeys(filter(None, lines)))
    return "" if answer.returncode or "not supported" in said.lower() else said


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
    """Return the number in `text` divided by `unit`, or None for "[N/A]" and for a missing file."""
    try:
        return round(float(text) / unit, 2)
    except ValueError:
        return None


def read_text(path: Path) -> str:
    """Return the stripped text of a file in /proc or /sys, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # The kernel also raises it for a network speed that it does not know.
        return ""


def key_values(path: Path) -> dict[str, int]:
    """Return the lines `name number` of a file in /proc or /sys."""
    lines = [line.split() for line in read_text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}
