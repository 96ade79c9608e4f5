"""Network interfaces and RDMA ports of this host.

Files in /sys are described in Linux, Documentation/ABI. Standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from pathlib import Path

from common.machine.gpu_stats import read_text

# Requests of linux/sockios.h: SIOCGIFADDR and SIOCGIFNETMASK.
GET_ADDRESS = 0x8915
GET_MASK = 0x891B


def interfaces(root: Path = Path("/")) -> dict[str, dict]:
    """Return the network interfaces that are up, except the loopback, by their names.

    Each has its `address` with the prefix length, such as "10.0.0.7/24" ("" if it has no IPv4
    address), its speed `gbit_s` (0 if unknown), its `mtu`, and whether it is a `card`, and not a
    bridge or another virtual interface.
    """
    found = {}
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or read_text(folder / "operstate") == "down":
            continue
        speed = read_text(folder / "speed")  # Mb/s, -1 for most virtual interfaces
        found[folder.name] = {
            "address": _ipv4_address(folder.name),
            "gbit_s": int(speed) / 1000 if speed.isdigit() else 0,
            "mtu": read_text(folder / "mtu"),
            "card": (folder / "device").exists(),
        }
    return found


def _ipv4_address(interface: str) -> str:
    """Return the first IPv4 address of `interface` with its prefix length, "" if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            address, mask = (
                socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), number, request)[20:24])
                for number in (GET_ADDRESS, GET_MASK)
            )
        except OSError:
            return ""
    return str(ipaddress.IPv4Interface(f"{address}/{mask}"))


def rdma_ports(root: Path = Path("/")) -> dict[str, dict]:
    """Return the active RDMA ports by device:port, each with `gbit_s` and `link_layer`."""
    found = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" not in read_text(port / "state"):  # 4: ACTIVE
            continue
        rate = re.match(r"[\d.]+", read_text(port / "rate"))  # 400 Gb/sec (4X NDR)
        found[f"{port.parents[1].name}:{port.name}"] = {
            "gbit_s": float(rate[0]) if rate else 0,
            "link_layer": read_text(port / "link_layer"),
        }
    return found
