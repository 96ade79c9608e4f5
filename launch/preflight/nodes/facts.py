"""Versions, kernel settings, network interfaces and RDMA devices of a node.

Files in /sys and /proc are described in Linux, Documentation/ABI and Documentation/admin-guide.
Standard library only.
"""

from __future__ import annotations

import fcntl
import platform
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from common.errors import PreflightError
from common.known_issues import installed
from common.machine.gpu_stats import read_text
from common.machine.hardware import Probe
from common.packages import version_of
from common.paths import ROOT
from common.repository import commit_of
from launch import system_settings
from launch.preflight.nodes import kernel_log
from launch.selection.machine import Machine

SETTINGS = {
    "TCP congestion control": "proc/sys/net/ipv4/tcp_congestion_control",
    "tcp_rmem": "proc/sys/net/ipv4/tcp_rmem",
    "tcp_wmem": "proc/sys/net/ipv4/tcp_wmem",
    "rmem_max": "proc/sys/net/core/rmem_max",
    "wmem_max": "proc/sys/net/core/wmem_max",
    "NUMA balancing": "proc/sys/kernel/numa_balancing",
    "huge pages": "sys/kernel/mm/transparent_hugepage/enabled",
    "CPU governor": "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "clock source": "sys/devices/system/clocksource/clocksource0/current_clocksource",
}
# Parameters of the kernel's command line that affect speed. Others, such as root=, differ between
# equal machines.
BOOT_WORDS = re.compile(r"iommu|pci=|numa|hugepage|mitigations|cstate|isolcpus|pstate")
GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


def read(environment: Mapping[str, str], root: Path = Path("/")) -> dict:
    """Return all facts about this node. Nothing is measured."""
    gpu_error = ""
    try:
        found = Machine.of(environment).probe
    except PreflightError as error:
        found = Probe("none")
        gpu_error = error.what
    lines, unreadable = kernel_log.read()
    return {
        "host": socket.gethostname(),
        "gpus": len(found.devices),
        "gpu_error": gpu_error,
        "versions": versions(found),
        "settings": settings(root),
        "interfaces": interfaces(root),
        "rdma": rdma_devices(root),
        "kernel_log": kernel_log.errors(lines),
        "kernel_log_unreadable": unreadable,
    }


def versions(found: Probe) -> dict[str, str]:
    """Return code, packages, driver and GPUs, which must be equal on all nodes of a run."""
    gpu_names = sorted({device.name or device.arch for device in found.devices})
    return {
        "code": (commit_of(ROOT) or "")[:12],
        "Python": platform.python_version(),
        **installed(found.driver),
        "numpy": version_of("numpy") or "",
        "GPUs": f"{len(found.devices)} x {', '.join(gpu_names)}" if gpu_names else "none",
    }


def settings(root: Path) -> dict[str, str]:
    """Return settings of the kernel and of `system-tuning`, which should be equal on all nodes."""
    boot = [word for word in read_text(root / "proc/cmdline").split() if BOOT_WORDS.search(word)]
    return {
        "kernel": platform.release(),
        **{name: " ".join(read_text(root / path).split()) for name, path in SETTINGS.items()},
        "kernel command line": " ".join(sorted(boot)),
        "nvidia_peermem": str((root / "sys/module/nvidia_peermem").exists()),
        **{f"system-tuning {name}": state for name, state in system_settings.state(root).items()},
    }


def interfaces(root: Path) -> dict[str, dict]:
    """Return name -> IPv4 address, speed in Gb/s (0 if unknown) and MTU of interfaces that are up.

    The loopback interface is left out.
    """
    found = {}
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or read_text(folder / "operstate") == "down":
            continue
        speed = read_text(folder / "speed")  # Mb/s, -1 for most virtual interfaces
        found[folder.name] = {
            "address": ipv4_address(folder.name),
            "gbit_s": int(speed) / 1000 if speed.isdigit() else 0,
            "mtu": read_text(folder / "mtu"),
        }
    return found


def ipv4_address(interface: str) -> str:
    """Return the first IPv4 address of `interface`, "" if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def rdma_devices(root: Path) -> dict[str, dict]:
    """Return device:port -> rate in Gb/s, link layer and network interface of active RDMA ports."""
    found = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" not in read_text(port / "state"):  # 4: ACTIVE
            continue
        rate = re.match(r"[\d.]+", read_text(port / "rate"))  # 400 Gb/sec (4X NDR)
        device = port.parents[1].name
        found[f"{device}:{port.name}"] = {
            "gbit_s": float(rate[0]) if rate else 0,
            "link_layer": read_text(port / "link_layer"),
            "interface": read_text(port / "gid_attrs/ndevs/0"),
        }
    return found


def interface_of(address: str, known: Mapping[str, dict]) -> str:
    """Return the interface with this address, "" if none of `known` has it."""
    return next((name for name, facts in known.items() if facts["address"] == address), "")
