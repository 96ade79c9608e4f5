"""Description of this machine's hardware and software, from what Linux shows to every user.

It needs no torch, no root and no program except the GPU's own nvidia-smi. Every reader takes the
root of the file system as an argument, so that other machines are fixtures in the tests. A value
that cannot be read is missing from the result: nothing is guessed. Sources: /proc/cpuinfo
(proc(5)), /sys/devices/system (the kernel's ABI/stable and ABI/testing), /sys/block,
/sys/class/net, /etc/os-release (os-release(5)). Standard library only.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections import Counter
from pathlib import Path

from common.errors import PreflightError
from common.gpu_kinds import DESCRIPTION_KEYS, GIB, KINDS
from common.known_issues import installed
from common.machine.gpu_stats import read_text
from common.machine.hardware import Probe, identify
from common.packages import version_of

SECTOR = 512  # bytes: the unit of /sys/block/*/size, independent of the disk's sector size
NO_DISKS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd)\d")
DISKS = {"nvme": "NVMe SSD", "vd": "virtual disk", "xvd": "virtual disk"}
# (implementer, part) of /proc/cpuinfo on Arm -> name in lscpu (util-linux, sys-utils/lscpu-arm.c).
# Grace has Neoverse V2 cores.
ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
}
PACKAGES = {
    "triton": "Triton",
    "amd-aiter": "AITER",
    "flash-attn-4": "FlashAttention-4",
    "quack-kernels": "QuACK",
    "transformer-engine": "Transformer Engine",
}


def facts(root: Path, gpus: Probe, gpu_kind: str = "") -> dict[str, str]:
    """Return key of the system description -> text, for every value that this machine reports.

    `gpus`: result of common.machine.hardware.probe.
    `gpu_kind`: the environment variable GPU_KIND, for GPUs that do not report their kind.
    """
    cpuinfo = read_text(root / "proc/cpuinfo")
    description = {
        **processors(root, cpuinfo),
        **memory(root),
        **storage(root),
        **network(root),
        **product(root, cpuinfo),
        **accelerators(gpus, gpu_kind),
        **software(root, gpus),
        "number_of_nodes": "1",
        "host_networking_topology": "N/A (single node)",
        "system_type": "datacenter",
    }
    return {key: text for key, text in description.items() if text}


def processors(root: Path, cpuinfo: str) -> dict[str, str]:
    """Return name, sockets and cores of the CPUs.

    On x86, all values come from cpuinfo. On Arm, cpuinfo has only a part number, and the kernel's
    topology has the rest.
    """
    blocks = [block for block in map(_key_values, cpuinfo.split("\n\n")) if "processor" in block]
    if not blocks:
        return {}
    first = blocks[0]
    part = first.get("CPU part")
    if part:
        folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology")
        cores = {
            (read_text(folder / "physical_package_id"), read_text(folder / "core_id"))
            for folder in folders
        }
        sockets = len({socket for socket, _ in cores})
        return {
            "host_processor_model_name": ARM_PARTS.get(
                (first.get("CPU implementer", ""), part), ""
            ),
            "host_processors_per_node": str(sockets or ""),
            "host_processor_core_count": str(len(cores) // sockets) if sockets else "",
            "host_processor_vcpu_count": str(len(blocks)),
        }
    return {
        "host_processor_model_name": " ".join(first.get("model name", "").split()),
        "host_processors_per_node": str(len({block.get("physical id", "0") for block in blocks})),
        "host_processor_core_count": first.get("cpu cores", "").removeprefix("0"),
        "host_processor_vcpu_count": str(len(blocks)),  # of the whole node
    }


def memory(root: Path) -> dict[str, str]:
    """Return capacity and modules of the host's memory, such as `24 x 64 GB Registered-DDR5`.

    The capacity is the sum of the hot-pluggable blocks, as in lsmem. MemTotal lacks the memory
    reserved by the kernel and the firmware. The modules come from EDAC, because reading the
    firmware's table needs root.
    """
    folder = root / "sys/devices/system/memory"
    online = sum(read_text(block / "online") != "0" for block in folder.glob("memory[0-9]*"))
    installed = online * int(read_text(folder / "block_size_bytes") or "0", 16)
    modules: Counter[str] = Counter()
    for module in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*"):
        size_mib = int(read_text(module / "size") or 0)
        if size_mib:
            modules[f"{size_mib // 1024} GB {read_text(module / 'dimm_mem_type')}".strip()] += 1
    capacity = f"{installed // GIB} GB" if installed else ""
    return {"host_memory_capacity": capacity, "host_memory_configuration": _counted(modules)}


def storage(root: Path) -> dict[str, str]:
    """Return kinds and capacities of the disks, without removable and virtual ones."""
    kinds: set[str] = set()
    sizes: Counter[str] = Counter()
    for disk in sorted((root / "sys/block").glob("*")):
        size = int(read_text(disk / "size") or 0) * SECTOR
        if NO_DISKS.match(disk.name) or not size or read_text(disk / "removable") == "1":
            continue
        kind = "hard disk" if read_text(disk / "queue/rotational") == "1" else "SATA/SAS SSD"
        for prefix, name in DISKS.items():
            if disk.name.startswith(prefix):
                kind = name
        kinds.add(kind)
        # Disks are sold in powers of ten.
        sizes[f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"] += 1
    return {"host_storage_type": ", ".join(sorted(kinds)), "host_storage_capacity": _counted(sizes)}


def network(root: Path) -> dict[str, str]:
    """Return the number of physical ports by speed. Virtual interfaces have no device file."""
    ports: Counter[str] = Counter()
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        # Ports with link layer Ethernet are also in /sys/class/net.
        if read_text(port / "link_layer") == "InfiniBand":
            ports[f"InfiniBand {read_text(port / 'rate').split(' (')[0]}".strip()] += 1
    for card in sorted((root / "sys/class/net").glob("*")):
        # ib0 is an InfiniBand port, which is already counted.
        if (card / "device").exists() and not card.name.startswith("ib"):
            # Mb/s; -1 or an error if the link is down or virtual
            speed = read_text(card / "speed")
            ports[f"Ethernet {int(speed) / 1000:g} Gb/s" if speed.isdigit() else "Ethernet"] += 1
    return {
        "host_networking": _counted(ports),
        "host_network_card_count": str(ports.total()) if ports else "",
    }


def accelerators(gpus: Probe, gpu_kind: str = "") -> dict[str, str]:
    """Return count and names of the GPUs from the driver.

    If their kind is known, the other values come from common/gpu_kinds.py.
    """
    count = len(gpus.devices)
    if not count:
        return {}
    kind = None
    with contextlib.suppress(PreflightError):
        kind = identify(gpus, gpu_kind)
    if kind is None or kind.name not in KINDS:
        names = sorted({device.name for device in gpus.devices if device.name})
        values = {
            "model_name": ", ".join(names),
            "memory_capacity": f"{gpus.devices[0].memory_bytes / GIB:.0f} GB",
        }
    else:
        values = dict(zip(DESCRIPTION_KEYS, kind.description, strict=True))
        values["host_interconnect"] = "PCIe Gen5 x16"
        if count == 1:
            values["interconnect"] = "N/A (one accelerator)"
        if count != 8:  # GpuKind has topologies of 8 GPUs only
            values["interconnect_topology"] = ""
    description = {f"accelerator_{key}": value for key, value in values.items()}
    return {"accelerators_per_node": str(count), **description}


def software(root: Path, gpus: Probe) -> dict[str, str]:
    """Return the operating system, the version of torch, and the rest of the software stack."""
    system = _key_values(read_text(root / "etc/os-release"), "=")
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    name = system.get("PRETTY_NAME", "").strip('"')
    torch = version_of("torch")
    # torch's ROCm. Its wheels bring it, and /opt/rocm may then be missing or of another version.
    libraries = installed()
    rocm = libraries.get("rocm") or read_text(root / "opt/rocm/.info/version")
    stack = []
    if gpus.driver:
        driver = "amdgpu" if gpus.vendor == "amd" else "NVIDIA"
        stack.append(f"{driver} driver {gpus.driver}")
    if rocm:
        stack.append(f"ROCm {rocm}")
    if "aotriton" in libraries:
        stack.append(f"AOTriton {libraries['aotriton']}")
    cuda = re.search(r"\+cu(\d+)(\d)$", torch)  # torch's wheel includes its own CUDA
    if cuda:
        stack.append(f"CUDA {cuda[1]}.{cuda[2]}")
    for package, label in PACKAGES.items():
        version = version_of(package)
        if version:
            stack.append(f"{label} {version}")
    return {
        "operating_system": f"{name}, Linux {kernel}" if name and kernel else name,
        "framework": f"PyTorch {torch}" if torch else "",
        "other_software_stack": ", ".join([*stack, f"Python {platform.python_version()}"]),
    }


def product(root: Path, cpuinfo: str) -> dict[str, str]:
    """Return vendor and name of the machine, and whether it is virtual."""
    dmi = root / "sys/class/dmi/id"
    vendor = read_text(dmi / "sys_vendor")
    name = read_text(dmi / "product_name")
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    system_type = ""  # unknown without flags, as on Arm
    if flags:
        is_virtual = "hypervisor" in flags[1].split()
        system_type = "virtual machine" if is_virtual else "bare metal"
    return {
        "system_name": f"{vendor} {name}".strip(),
        "system_type_detail": system_type,
    }


def _key_values(text: str, separator: str = ":") -> dict[str, str]:
    """Return the pairs of lines such as `key: value`. Other lines are skipped."""
    pairs = {}
    for line in text.splitlines():
        if separator in line:
            key, _, value = line.partition(separator)
            pairs[key.strip()] = value.strip()
    return pairs


def _counted(things: Counter[str]) -> str:
    """Return the counts as text, such as "2 x 3.2 TB, 1 x 480 GB"."""
    return ", ".join(f"{count} x {thing}" for thing, count in things.items())
