"""Current driver readings of each GPU: power, clocks, memory, utilization, throttling, errors.

The GPU sampler and preflight use them. They come from nvidia-smi, or from amdgpu's files in /sys.
Neither needs root or a Python package. A call of nvidia-smi takes 0.03 s on an H200. The code for
amdgpu follows the kernel's documentation and was never tested on hardware, because no AMD GPU was
available. Standard library only.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ANSWER_S = 5.0  # a healthy card answers within milliseconds


class ValueSource(NamedTuple):
    """The drivers' sources of a value, with divisors that convert it to the unit in its name."""

    nvidia_field: str  # field of nvidia-smi
    nvidia_divisor: float = 1
    # Files of an AMD card. The first one that exists is read (kernel documentation, gpu/amdgpu).
    amd_files: tuple[str, ...] = ()
    amd_divisor: float = 1


VALUES = {
    "power_w": ValueSource(
        "power.draw",
        amd_files=("hwmon/hwmon*/power1_average", "hwmon/hwmon*/power1_input"),
        amd_divisor=1e6,
    ),
    "power_limit_w": ValueSource(
        "enforced.power.limit", amd_files=("hwmon/hwmon*/power1_cap",), amd_divisor=1e6
    ),
    "temperature_c": ValueSource(
        "temperature.gpu",
        amd_files=("hwmon/hwmon*/temp2_input", "hwmon/hwmon*/temp1_input"),  # junction, edge
        amd_divisor=1e3,
    ),
    "clock_mhz": ValueSource("clocks.sm", amd_files=("hwmon/hwmon*/freq1_input",), amd_divisor=1e6),
    "memory_clock_mhz": ValueSource(
        "clocks.mem", amd_files=("hwmon/hwmon*/freq2_input",), amd_divisor=1e6
    ),
    "memory_gib": ValueSource(
        "memory.used", 2**10, amd_files=("mem_info_vram_used",), amd_divisor=2**30
    ),
    "utilization_percent": ValueSource("utilization.gpu", amd_files=("gpu_busy_percent",)),
    # Memory errors since the driver was loaded. AMD cards report them elsewhere (AMD_ERRORS).
    "uncorrected_errors": ValueSource("ecc.errors.uncorrected.volatile.total"),
    "corrected_errors": ValueSource("ecc.errors.corrected.volatile.total"),
}
# Keys in the error file of each block of an AMD GPU, with lines such as `ue: 0` and `ce: 0`.
AMD_ERRORS = {
    "uncorrected_errors": "ue",
    "corrected_errors": "ce",
}
HEALTH = ("utilization_percent", *AMD_ERRORS)  # values that preflight reads
SAMPLED = tuple(name for name in VALUES if name not in AMD_ERRORS)  # once a second during a run
# Name -> field of nvidia-smi. The values depend on the card and its settings, not on its load.
NVIDIA_CONSTANTS = {
    "VBIOS": "vbios_version",
    "highest clock": "clocks.max.sm",
    "highest memory clock": "clocks.max.memory",
    "power limit": "enforced.power.limit",
    "PCIe width": "pcie.link.width.current",
}
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
# of five 32-bit counters). A counter grows while its limit lowers the clock. Newer revisions have
# another structure and are not supported.
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
# Reasons for throttling that a healthy card does not have. The power cap is not one of them.
FAULTS = (
    "hardware slowdown",
    "thermal (driver)",
    "thermal (hardware)",
    "power brake",
    "thermal (socket)",
    "thermal (voltage regulator)",
    "thermal (HBM)",
)


class DriverError(Exception):
    """A failed query: nvidia-smi is missing, fails, hangs, or prints something unexpected.

    The message is its first line of output, if there is any.
    """


def read_gpus(vendor: str, addresses: Sequence[str], names: Sequence[str]) -> list[dict]:
    """Return the values called `names` of each GPU, and the reasons for its throttling.

    `addresses`: Device.address of each GPU.

    A value is None if the driver does not report it. A GPU that the driver no longer lists is {}.
    `throttle` is a list of reasons. An AMD GPU counts how long each limit held, so it has
    `throttle_counters` instead. `with_throttling` computes the reasons from two readings. Raises
    DriverError.
    """
    if vendor == "amd":
        return _read_amd_gpus(addresses, names)
    fields = ["uuid", "clocks_event_reasons.active"]
    fields += [VALUES[name].nvidia_field for name in names]
    by_uuid: dict[str, dict] = {}
    for uuid, reasons, *texts in ask_nvidia_smi(",".join(fields), os.environ):
        values: dict = {}
        for name, text in zip(names, texts, strict=True):
            values[name] = _scaled(text, VALUES[name].nvidia_divisor)
        values["throttle"] = None  # for [N/A]
        if reasons.startswith("0x"):  # such as 0x0000000000000004
            bits = int(reasons, 16)
            values["throttle"] = [name for bit, name in NVML_THROTTLE_REASONS.items() if bits & bit]
        by_uuid[uuid] = values
    return [by_uuid.get(address, {}) for address in addresses]


def _read_amd_gpus(addresses: Sequence[str], names: Sequence[str]) -> list[dict]:
    """Read all cards at once, since a card in trouble may take seconds for each file.

    Raises DriverError, which names the first card that does not answer within ANSWER_S.
    """
    readings: dict[str, dict] = {}

    def read(card: str) -> None:
        readings[card] = _read_amd_gpu(Path(card), names)

    # Daemons, because a read that the kernel does not finish cannot be ended.
    threads = [threading.Thread(target=read, args=(card,), daemon=True) for card in addresses]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ANSWER_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for card in addresses:
        if card not in readings:
            name = Path(card).resolve().name  # the PCI address
            raise DriverError(f"card {name} does not answer within {ANSWER_S:g} s")
    return [readings[card] for card in addresses]


def _read_amd_gpu(card: Path, names: Sequence[str]) -> dict:
    values: dict = {name: _amd_value(card, name) for name in names}
    values["throttle_counters"] = amd_throttle_counters(card)
    return values


def amd_throttle_counters(card: Path) -> dict[str, int] | None:
    """Return the counter of each of AMD_LIMITS.

    Returns None if gpu_metrics is missing or its revision is not in AMD_METRICS.
    """
    try:
        content = (card / "gpu_metrics").read_bytes()
    except OSError:
        return None
    if len(content) < 4:
        return None
    size, format_revision, content_revision = struct.unpack_from("<HBB", content)
    expected, offset = AMD_METRICS.get((format_revision, content_revision), (None, 0))
    if not offset or expected not in (None, size) or len(content) < offset + 4 * len(AMD_LIMITS):
        return None
    counters = struct.unpack_from(f"<{len(AMD_LIMITS)}I", content, offset)
    return dict(zip(AMD_LIMITS, counters, strict=True))


def with_throttling(before: Sequence[dict], after: Sequence[dict]) -> list[dict]:
    """Return `after` with `throttle`, the limits that held between two readings of `read_gpus`.

    `throttle` is None if a counter is missing. Readings of NVIDIA GPUs already have `throttle` and
    are returned unchanged.
    """
    readings = []
    for number, values in enumerate(after):
        if "throttle_counters" not in values:
            readings.append(values)
            continue
        earlier = before[number].get("throttle_counters") if number < len(before) else None
        reading = dict(values)
        later = reading.pop("throttle_counters")
        reading["throttle"] = None
        if earlier is not None and later is not None:
            reading["throttle"] = [name for name in AMD_LIMITS if later[name] != earlier[name]]
        readings.append(reading)
    return readings


def read_constants(vendor: str, addresses: Sequence[str]) -> dict[str, str]:
    """Return name -> value of firmware, highest clocks, power limit and PCIe width of the GPUs.

    `addresses`: Device.address of each GPU.

    If the GPUs differ, the value lists all that occur. It is "unknown" where the driver does not
    report it. Clocks are in MHz, limits in W. Raises DriverError.
    """
    cards: list[dict[str, str]] = []
    if vendor == "amd":
        cards = [_amd_constants(Path(card)) for card in addresses]
    elif vendor == "nvidia":
        rows = ask_nvidia_smi(",".join(["uuid", *NVIDIA_CONSTANTS.values()]), os.environ)
        by_uuid = {uuid: dict(zip(NVIDIA_CONSTANTS, row, strict=True)) for uuid, *row in rows}
        cards = [by_uuid.get(address, {}) for address in addresses]
    names = dict.fromkeys(name for card in cards for name in card)
    constants = {}
    for name in names:
        values = {card.get(name) or "unknown" for card in cards}
        constants[name] = " and ".join(sorted(values))
    return constants


def _amd_constants(card: Path) -> dict[str, str]:
    """Return the constants of an AMD card (kernel documentation, gpu/amdgpu)."""
    constants = {"VBIOS": read_text(card / "vbios_version")}
    for path in sorted((card / "fw_version").glob("*_fw_version")):
        constants[f"firmware {path.name.removesuffix('_fw_version')}"] = read_text(path)
    for name, file in (("highest clock", "pp_dpm_sclk"), ("highest memory clock", "pp_dpm_mclk")):
        levels = re.findall(r"(\d+)Mhz", read_text(card / file))
        constants[name] = max(levels, key=int, default="")
    constants["power limit"] = str(_amd_value(card, "power_limit_w") or "")
    constants["PCIe width"] = read_text(card / "current_link_width")
    return constants


def pci_folders(vendor: str, addresses: Sequence[str], sysfs: Path = Path("/sys")) -> list[Path]:
    """Return the folder of each GPU as a PCI device in /sys.

    `addresses`: Device.address of each GPU.

    Raises DriverError.
    """
    if vendor == "amd":
        return [Path(card) for card in addresses]
    bus_ids = dict(ask_nvidia_smi("uuid,pci.bus_id", os.environ))
    folders = []
    for address in addresses:
        # nvidia-smi prints 00000000:1A:00.0 where /sys has 0000:1a:00.0.
        domain, _, device = bus_ids.get(address, "0:").lower().partition(":")
        folders.append(sysfs / f"bus/pci/devices/{int(domain, 16):04x}:{device}")
    return folders


def ask_nvidia_smi(fields: str, environment: Mapping[str, str]) -> list[list[str]]:
    """Return the values of `fields`, one row per GPU of the machine.

    `fields`: names of nvidia-smi, separated by commas.

    Raises DriverError.
    """
    query = [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = _nvidia_smi(query, environment)
    lines = answer.stdout.strip().splitlines()
    rows = []
    messages = []  # lines that are not rows of values
    for line in lines:
        row = [cell.strip() for cell in line.split(",")]
        rows.append(row)
        if len(row) != len(fields.split(",")):
            messages.append(line)
    if answer.returncode or messages or not rows:
        output = messages + lines + answer.stderr.strip().splitlines()
        raise DriverError(output[0] if output else f"no output, exit code {answer.returncode}")
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
    """Return (position, largest position) of the boost slider `vboost` of each NVIDIA GPU.

    `addresses`: Device.address of each GPU.

    The slider moves power from memory to the cores. Its default position is 0. An entry is None if
    the GPU has no such slider. Raises DriverError.
    """
    answer = _nvidia_smi(["boost-slider", "--list"], os.environ)
    # lines like `|   0     vboost           4              0       |`
    rows = re.findall(r"^\|\s*(\d+)\s+vboost\s+(\d+)\s+(\d+)\s*\|", answer.stdout, re.MULTILINE)
    by_index = {index: (int(current), int(largest)) for index, largest, current in rows}
    index_of = {uuid: index for index, uuid in ask_nvidia_smi("index,uuid", os.environ)}
    return [by_index.get(index_of.get(address, "")) for address in addresses]


def read_power_profiles() -> str:
    """Return the driver's description of the enforced workload power profiles, on one line.

    Returns "" if there are none, as on GPUs before Blackwell and with drivers before 570. Raises
    DriverError.
    """
    answer = _nvidia_smi(["power-profiles", "-ge"], os.environ)
    lines = [line.strip(" |+-=\t") for line in answer.stdout.splitlines()]
    description = "; ".join(dict.fromkeys(filter(None, lines)))
    if answer.returncode or "not supported" in description.lower():
        return ""
    return description


def _amd_value(card: Path, name: str) -> float | None:
    """Return the value called `name` of an AMD card, or None if the driver does not report it."""
    if name in AMD_ERRORS:
        return _amd_errors(card, AMD_ERRORS[name])
    source = VALUES[name]
    for pattern in source.amd_files:
        for path in sorted(card.glob(pattern)):
            text = read_text(path)
            if text:
                return _scaled(text, source.amd_divisor)
    return None


def _amd_errors(card: Path, key: str) -> int | None:
    """Return the sum of the memory errors of all blocks: "ue" or "ce", see AMD_ERRORS."""
    paths = list((card / "ras").glob("*_err_count"))
    if not paths:
        return None
    errors = 0
    for path in paths:
        errors += sum(map(int, re.findall(rf"{key}: (\d+)", read_text(path))))
    return errors


def _scaled(text: str, divisor: float) -> float | None:
    """Return the number in `text` divided by `divisor`, or None if it is not one ("[N/A]")."""
    try:
        return round(float(text) / divisor, 2)
    except ValueError:
        return None


def read_text(path: Path) -> str:
    """Return the stripped text of a file in /proc or /sys, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # also raised for some existing files, such as an unknown network speed
        return ""


def key_values(path: Path) -> dict[str, int]:
    """Return name -> number for all lines `name number` of a file in /proc or /sys."""
    lines = [line.split() for line in read_text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}
