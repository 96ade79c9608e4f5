"""Facts about this machine and its software, for a result. Facts that cannot be read are left out.

The sources are torch, the driver and Linux.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.errors import PreflightError
from common.gpu_kinds import GIB, KINDS
from common.known_issues import installed
from common.machine import inventory
from common.machine.gpu_stats import (
    DriverError,
    read_gpus,
    read_power_profiles,
    read_text,
    read_vboost,
)
from common.machine.hardware import Probe
from common.paths import ROOT
from launch import run_directory
from launch.selection.machine import Machine

LINUX_FACTS = {  # key of a system description -> key of `facts`
    "host_processor_model_name": "cpu",
    "host_processors_per_node": "cpu_sockets",
    "host_processor_core_count": "cpu_cores_per_socket",
    "host_memory_capacity": "host_memory",
    "operating_system": "os",
}


def facts(here: Machine, device: str) -> dict[str, Any]:
    """Return facts about the GPU (unless `device` is "cpu"), the CPU and the operating system.

    The GPU facts are name, kind, number, memory in GiB, dense peaks in TFLOP/s (of a kind in
    common/gpu_kinds.py), power limit in W, boost slider and power profiles, and the cards' UUIDs.
    """
    linux = inventory.facts(Path("/"), here.probe, here.gpu_kind)
    known: dict[str, Any] = {name: linux[key] for key, name in LINUX_FACTS.items() if key in linux}
    if device == "cpu":
        return {"gpu": "none: measured on the CPU", **known, "threads": torch.get_num_threads()}
    gpu: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "kind": kind_of(here),
        "gpus": torch.cuda.device_count(),
    } | uuids(here.probe)
    gpu["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
    if kind := KINDS.get(gpu["kind"]):
        gpu |= {
            "peak_tflops_16_bits": kind.peak_bf16_tflops,
            "peak_tflops_fp8": kind.peak_fp8_tflops,
        }
    return gpu | power_limit(here.probe) | power_settings(here.probe) | known


def kind_of(here: Machine) -> str:
    """Return the GPU kind as text. It is "unknown" for partitioned or mixed GPUs."""
    try:
        kind = here.kind
    except PreflightError:
        return "unknown"
    if kind is None:
        return "unknown"
    return kind.name if kind.name in KINDS else f"{kind.name}, derived from what its driver reports"


def uuids(detected: Probe) -> dict[str, str]:
    """Return the UUIDs of the cards, which tell whether two results are of one card."""
    known = [device.address for device in detected.devices]
    if detected.vendor == "amd":
        known = [read_text(Path(address) / "unique_id") for address in known]
    return {"uuid": ", ".join(known)} if any(known) else {}


def power_limit(detected: Probe) -> dict[str, float]:
    """Return the lowest power limit of the GPUs in W, {} if it cannot be read."""
    try:
        values = read_gpus(
            detected.vendor, [device.address for device in detected.devices], ["power_limit_w"]
        )
    except DriverError:
        return {}
    limits = [value["power_limit_w"] for value in values if value.get("power_limit_w")]
    return {"power_limit_w": min(limits)} if limits else {}


def power_settings(detected: Probe) -> dict[str, str]:
    """Return the positions of the boost slider and the power profiles, for NVIDIA GPUs only."""
    if detected.vendor != "nvidia":
        return {}
    try:
        sliders = read_vboost([device.address for device in detected.devices])
        profiles = read_power_profiles()
    except DriverError:
        return {}
    positions = dict.fromkeys(f"{slider[0]} of {slider[1]}" for slider in sliders if slider)
    known = {"vboost": ", ".join(positions), "power_profiles": profiles}
    return {name: text for name, text in known.items() if text}


def versions(detected: Probe) -> dict[str, Any]:
    """Return the commit and the versions of driver, Python, packages, and torch's CUDA or ROCm.

    The commit is followed by ", modified" if the working tree has changes.
    """
    known = run_directory.versions(ROOT, detected)
    commit = "unknown"
    if known["commit"]:
        commit = known["commit"][:12] + (", modified" if known["dirty"] else "")
    packages = {
        name: known["packages"][name]
        for name in ("torch", "triton", "pytorch-triton-rocm", "numpy")
        if name in known["packages"]
    }
    libraries = installed()
    named = {
        "commit": commit,
        "driver": known["driver"],
        "python": known["python"],
        **packages,
        "rocm": libraries.get("rocm"),
        "cuda": libraries.get("cuda"),
    }
    return {name: value for name, value in named.items() if value}
