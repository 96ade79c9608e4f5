"""Detection of this host's GPUs: their kind, whether they are whole cards, and their config.

`probe()` asks the driver, without torch and without root. All other functions depend only on a
`Probe`, so that tests cover GPUs that are not available. A GPU that cannot be identified is an
error, never a guess. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError, PreflightError
from common.gpu_kinds import CARD, DERIVED_SPEEDS, GIB, KINDS, GpuKind, kind_in
from common.machine.gpu_stats import DriverError, ask_nvidia_smi, key_values, read_text
from common.suggestions import nearest, unknown

# PCI device ID -> product (pci.ids and libdrm's amdgpu.ids, vendor 1002), for drivers that report
# no product name. VF: virtual function, as seen by a virtual machine. HF: a variant in some clouds.
AMD_PRODUCTS = {
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74A8: "AMD Instinct MI308X HF",
    0x74A9: "AMD Instinct MI300X HF",
    0x74B5: "AMD Instinct MI300X VF",
    0x74B6: "AMD Instinct MI308X VF",
    0x74B9: "AMD Instinct MI325X VF",
    0x74BC: "AMD Instinct MI308X HF VF",
    0x74BD: "AMD Instinct MI300X HF VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
    0x75B0: "AMD Instinct MI350X VF",
    0x75B3: "AMD Instinct MI355X VF",
}

# A device with less than this share of its kind's memory is a partition. The largest partitions,
# DPX and 1/2 MIG, have half of the memory.
WHOLE_CARD = 0.75
PCI_ORDER = "PCI_BUS_ID"  # value of CUDA_DEVICE_ORDER; CUDA's default is FASTEST_FIRST
MAX_GPUS = 8  # per node in all supported systems; more devices are partitions


@dataclass(frozen=True)
class Device:
    """One visible GPU, as its driver describes it."""

    name: str  # name from the driver, "" if it reports none
    arch: str
    memory_bytes: int
    compute_units: int = 0  # 0: not reported by the driver (nvidia-smi)
    partition: str = ""  # "MIG", "CPX", "NPS4", ...; "" for a whole card
    # Where the driver's readings are found: NVIDIA's UUID, or the card's folder in /sys for AMD.
    address: str = field(default="", compare=False)

    def __str__(self) -> str:
        parts = [self.name or "no name", self.arch, f"{self.memory_bytes / GIB:.0f} GiB"]
        if self.compute_units:
            parts.append(f"{self.compute_units} compute units")
        if self.partition:
            parts.append(self.partition)
        return ", ".join(parts)


@dataclass(frozen=True)
class Probe:
    """The visible GPUs of this host."""

    vendor: str  # "amd", "nvidia" or "none"
    devices: tuple[Device, ...] = ()
    driver: str = ""
    hidden: str = ""  # the variable that hides all GPUs, and its value


# --- from a probe to a kind


def identify(gpus: Probe, override: str = "", forced: bool = False) -> GpuKind | None:
    """Return the kind of all visible GPUs, or None if there is no GPU.

    The kind of a GPU that is not in KINDS is derived. The driver reports memory, compute units and
    architecture. The peaks are 0 unless they are in DERIVED_SPEEDS.

    `override`: value of GPU_KIND, for GPUs that the driver does not name, or of --gpu-kind.
    `forced`: accept an override that contradicts the driver's name, as --gpu-kind does.

    Raises PreflightError if a GPU is partitioned, if the GPUs are of different kinds, or if
    `override` is not their kind. Raises ConfigError without a GPU if `override` is unknown.
    """
    if not gpus.devices:
        if override:
            require_known(override)
        return None
    for device in gpus.devices:
        if device.partition:
            raise _partitioned(f"partition mode {device.partition}")
    kinds = [_kind_of(device, gpus, override, forced) for device in gpus.devices]
    names = {kind.name for kind in kinds}
    if len(names) > 1:
        variable = "ROCR_VISIBLE_DEVICES" if gpus.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
        most = Counter(kind.name for kind in kinds).most_common(1)[0][0]
        indices = ",".join(str(i) for i, kind in enumerate(kinds) if kind.name == most)
        raise PreflightError(
            f"different kinds of GPU in one run: {', '.join(sorted(names))}",
            "MLPerf requires GPUs of one kind, and all would wait for the slowest",
            f"hide the others; of the visible GPUs, {variable}={indices} are {most}",
        )
    if len(kinds) > MAX_GPUS:
        raise _partitioned(f"{len(kinds)} devices in one node")
    # Devices of one derived kind may report slightly different memory.
    return min(kinds, key=lambda kind: kind.memory_bytes)


def require_known(name: str) -> None:
    """Raise ConfigError if `name`, the value of GPU_KIND, is not in KINDS."""
    if name not in KINDS:
        raise unknown(f"GPU_KIND={name} is unknown", name, KINDS, "correct or unset GPU_KIND")


def _kind_of(device: Device, gpus: Probe, override: str, forced: bool) -> GpuKind:
    """Return a kind of KINDS, or a kind derived from what the driver reports of `device`."""
    named = kind_in(device.name)
    known = next((name for name in DERIVED_SPEEDS if re.search(rf"\b{name}\b", device.name)), "")
    product = named or known or (device.name if CARD.search(device.name) else "")
    if override in KINDS and product and product != override and not forced:
        raise PreflightError(
            f"GPU_KIND={override}, but the driver names the GPU {device.name}",
            "config, memory, peak and the log would be those of another product",
            f"unset GPU_KIND, or force it with --gpu-kind {override} (not for submission)",
        )
    kind = KINDS.get(override or named)
    if kind is not None and device.arch.startswith(kind.arch):
        _refuse_less_than_whole(device, kind)
        return kind
    if override:
        raise _wrong_override(gpus, override)
    # Only characters that a config name may contain.
    driver_name = re.sub(r"\W+", "_", device.name or device.arch).strip("_")
    return GpuKind(
        known or driver_name,
        gpus.vendor,
        device.arch,
        device.compute_units,
        device.memory_bytes,
        *DERIVED_SPEEDS.get(known, (0.0, 0.0, 0.0)),
    )


def _refuse_less_than_whole(device: Device, kind: GpuKind) -> None:
    if device.compute_units != kind.compute_units and device.compute_units and kind.compute_units:
        raise _partitioned(
            f"{device.compute_units} of the {kind.compute_units} compute units of an {kind.name}"
        )
    if device.memory_bytes < WHOLE_CARD * kind.memory_bytes:
        raise _partitioned(
            f"{device.memory_bytes / GIB:.0f} of the {kind.memory_bytes / GIB:.0f} GiB "
            f"of an {kind.name}"
        )


def _partitioned(sign: str) -> PreflightError:
    return PreflightError(
        f"a GPU is partitioned: {sign}",
        "all configs and peaks are for whole cards",
        "undo the partitioning: SPX and NPS1 on AMD (amd-smi set --compute-partition SPX), "
        "MIG off on NVIDIA (nvidia-smi -mig 0)",
    )


def _wrong_override(gpus: Probe, override: str) -> PreflightError:
    return PreflightError(
        f"GPU_KIND={override} is not the kind of this GPU: {_listing(gpus)}",
        f"the known kinds are {', '.join(KINDS)} (H100 and H200 as SXM modules)",
        "correct or unset GPU_KIND; the kind of any other GPU is derived from its driver",
    )


def _listing(gpus: Probe) -> str:
    counts = Counter(map(str, gpus.devices))
    return "; ".join(f"{count} x ({text})" for text, count in counts.items())


# --- from a kind to a config


def config_names(root: Path, benchmark: str) -> list[str]:
    """Return the names of the files in configs/<benchmark>, without suffix, sorted."""
    return sorted(path.stem for path in (root / "configs" / benchmark).glob("*.toml"))


def node_size(root: Path, kind: GpuKind) -> int:
    """Return the number of GPUs of a whole node, by the kind's configs, 0 without any."""
    paths = (root / "configs").glob(f"*/{kind.name}_1x*.toml")
    return max((int(path.stem.rpartition("x")[2]) for path in paths), default=0)


def config_path(root: Path, benchmark: str, name: str) -> Path:
    """Return configs/<benchmark>/<name>.toml.

    Raises ConfigError, which lists the existing configs, if there is no such file.
    """
    path = root / "configs" / benchmark / f"{name}.toml"
    if not path.is_file():
        names = config_names(root, benchmark)
        similar = nearest(re.sub(r"(_\w*)?$", "_1x8", name, count=1), names)  # a whole node
        suggestion = f"did you mean {similar.ours}? Or " if similar else ""
        raise ConfigError(
            f"there is no config {name!r} for {benchmark}",
            f"configs/{benchmark} holds {', '.join(names) or 'none'}",
            f"{suggestion}set DGXSYSTEM to one of them, or DGXNGPU to a number of GPUs that has "
            "one, or give a file with --config",
        )
    return path


def config_name(kind: GpuKind | None, count: int, nodes: int = 1) -> str:
    """Return the config name: `H200_1x8` for one node with 8 H200, `CPU_1x1` without a GPU."""
    return f"{kind.name if kind else 'CPU'}_{nodes}x{count}"


# --- the probe


def probe(
    environment: Mapping[str, str] | None = None,
    sysfs: Path = Path("/sys"),
    dev: Path = Path("/dev"),
) -> Probe:
    """Return the GPUs that a process started now would see.

    nvidia-smi or the kernel's AMD topology list them, and *_VISIBLE_DEVICES may hide some. Raises
    PreflightError if a driver is installed but does not answer, or if AMD GPUs are selected by
    UUIDs, because neither must lead to a run on the CPU.
    """
    env = os.environ if environment is None else environment
    amd = probe_amd(env, sysfs, dev)
    return amd if amd.devices or amd.hidden else probe_nvidia(env, dev)


def probe_nvidia(env: Mapping[str, str], dev: Path) -> Probe:
    """Return the visible NVIDIA GPUs. CUDA_VISIBLE_DEVICES may hold indices or UUIDs."""
    if not (dev / "nvidiactl").exists() and not shutil.which("nvidia-smi", path=env.get("PATH")):
        return Probe("none")
    try:
        rows = ask_nvidia_smi(
            "uuid,name,memory.total,compute_cap,mig.mode.current,driver_version", env
        )
        for _, name, memory_mib, capability, *_ in rows:
            if not (name and memory_mib.isdecimal() and re.fullmatch(r"\d+\.\d+", capability)):
                raise DriverError(
                    f"it reports name {name!r}, memory {memory_mib!r}, "
                    f"compute capability {capability!r}"
                )
    except DriverError as error:
        if "No devices were found" in str(error):
            return Probe("none")
        raise PreflightError(
            f"nvidia-smi does not describe the GPUs: {error}",
            "an NVIDIA driver is installed, but does not work here",
            "repair it (see the kernel log), or run the miniature with --device cpu",
        ) from None
    devices = []
    for uuid, name, memory_mib, capability, mig, _ in rows:
        partition = "MIG" if mig == "Enabled" or " MIG " in name else ""
        devices.append(
            Device(
                name=name,
                arch="sm_" + capability.replace(".", ""),
                memory_bytes=int(memory_mib) * 2**20,
                partition=partition,
                address=uuid,
            )
        )
    if env.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        raise _partitioned("CUDA_VISIBLE_DEVICES names a MIG instance")
    order = env.get("CUDA_DEVICE_ORDER") or PCI_ORDER
    if order != PCI_ORDER:
        raise ConfigError(
            f"CUDA_DEVICE_ORDER={order} is not supported",
            "nvidia-smi and this project number GPUs by their PCI addresses",
            f"unset it, or set it to {PCI_ORDER}",
        )
    value = env.get("CUDA_VISIBLE_DEVICES")
    visible = visible_indices(len(devices), value, [device.address for device in devices])
    if not visible:
        hidden = f"CUDA_VISIBLE_DEVICES={value} hides all {len(devices)} GPUs"
        return Probe("none", driver=rows[0][5], hidden=hidden)
    return Probe("nvidia", tuple(devices[i] for i in visible), rows[0][5])


def probe_amd(env: Mapping[str, str], sysfs: Path, dev: Path) -> Probe:
    """Return the visible AMD GPUs of the kernel's kfd topology, in HIP's order."""
    nodes = sorted(
        (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*"), key=lambda path: int(path.name)
    )
    read = [_read_kfd_node(node, sysfs) for node in nodes]
    devices = [device for device in read if device]
    if not devices:
        return Probe("none")
    kfd = dev / "kfd"
    if not os.access(kfd, os.R_OK | os.W_OK):
        why = "the user is not in the groups render and video"
        if not kfd.exists():
            why = f"the container was started without the devices, or {why}"
        raise PreflightError(
            f"there are {len(devices)} AMD GPUs, but this process may not open {kfd}",
            why,
            "start the container with --device /dev/kfd --device /dev/dri and these groups, "
            "or run the miniature with --device cpu",
        )
    version = read_text(sysfs / "module/amdgpu/version")
    chosen = list(range(len(devices)))
    # ROCR_VISIBLE_DEVICES applies first. HIP_VISIBLE_DEVICES (default: CUDA_VISIBLE_DEVICES) then
    # indexes the remaining GPUs.
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
    for name, value in (
        ("ROCR_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES")),
        (hip, env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))),
    ):
        if value and "GPU-" in value:
            raise PreflightError(
                f"AMD GPUs are selected by their UUIDs: {value}",
                "this package reads the order of AMD GPUs, but not their UUIDs",
                "set the variable (ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES) to indices",
            )
        visible = [chosen[i] for i in visible_indices(len(chosen), value)]
        if not visible:
            hidden = f"{name}={value} hides all {len(chosen)} GPUs"
            return Probe("none", driver=version, hidden=hidden)
        chosen = visible
    return Probe("amd", tuple(devices[i] for i in chosen), version)


def _read_kfd_node(node: Path, sysfs: Path) -> Device | None:
    """Return the GPU of a kfd node, or None for a CPU and for a GPU hidden from this container.

    The kernel refuses to show the properties of a hidden GPU.
    """
    properties = key_values(node / "properties")
    if not properties.get("simd_count"):
        return None
    # 90402 is gfx942, 90010 is gfx90a: the last two digits are hexadecimal.
    target = properties.get("gfx_target_version", 0)
    banks = [key_values(path) for path in (node / "mem_banks").glob("*/properties")]
    hbm = [bank for bank in banks if bank.get("heap_type") in (1, 2)]  # public and private HBM
    card = sysfs / f"class/drm/renderD{properties.get('drm_render_minor', 0)}/device"
    name = read_text(card / "product_name")
    if not re.search(r"\bMI\d", name, re.IGNORECASE):
        name = AMD_PRODUCTS.get(properties.get("device_id", 0), name)
    modes = [
        read_text(card / "current_compute_partition"),
        read_text(card / "current_memory_partition"),
    ]
    return Device(
        name=name,
        arch=f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}",
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in hbm),
        compute_units=properties["simd_count"] // max(properties.get("simd_per_cu", 4), 1),
        partition=" ".join(mode for mode in modes if mode not in ("", "SPX", "NPS1")),
        address=str(card),
    )


def visible_indices(count: int, value: str | None, uuids: list[str] | None = None) -> list[int]:
    """Return the indices of the GPUs that a *_VISIBLE_DEVICES variable selects.

    `value`: the variable, or None if it is not set. An entry is an index, or the beginning of
        exactly one UUID. As in CUDA and HIP, the list ends at the first invalid entry.

    Raises PreflightError if an entry is repeated: libraries treat that differently.
    """
    if value is None:
        return list(range(count))
    chosen: list[int] = []
    for text in value.split(","):
        entry = text.strip()
        matches = []
        if entry.startswith("GPU-"):
            matches = [i for i, uuid in enumerate(uuids or []) if uuid.startswith(entry)]
        index = -1
        if len(matches) == 1:
            index = matches[0]
        elif entry.isdecimal():
            index = int(entry)
        if not 0 <= index < count:
            break
        if index in chosen:
            raise PreflightError(
                f"*_VISIBLE_DEVICES={value} names a GPU twice",
                "each process would need a GPU of its own",
                "name each GPU once",
            )
        chosen.append(index)
    return chosen
