"""Describe every Instinct kind as its driver and torch would.

The values come from reports and from AMD's PCI device numbers, not from machines of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.gpu_kinds import GIB, KINDS


@dataclass(frozen=True)
class Card:
    kind: str
    names: tuple[str, ...]  # as amdgpu reports them; "" if it reports none
    device_id: int
    target: int  # gfx_target_version of the kernel's topology
    gcn_arch: str  # torch's gcnArchName

    def topology(self, name: str) -> tuple:
        """Return the arguments of `kfd_tree` after the number of cards."""
        kind = KINDS[self.kind]
        return name, self.device_id, kind.memory_bytes // GIB, 4 * kind.compute_units, self.target


GFX942, GFX950 = "gfx942:sramecc+:xnack-", "gfx950:sramecc+:xnack-"
CARDS = (
    Card("MI300X", ("AMD Instinct MI300X OAM", "AMD Instinct MI300X"), 0x74A1, 90402, GFX942),
    Card("MI300X", ("", "AMD Instinct MI300X VF"), 0x74B5, 90402, GFX942),
    Card("MI308X", ("AMD Instinct MI308X", "AMD Radeon Graphics"), 0x74A2, 90402, GFX942),
    Card("MI300X", ("AMD Instinct MI300X HF", ""), 0x74A9, 90402, GFX942),
    Card("MI300X", ("",), 0x74BD, 90402, GFX942),
    Card("MI308X", ("",), 0x74B6, 90402, GFX942),
    Card("MI308X", ("",), 0x74A8, 90402, GFX942),
    Card("MI308X", ("",), 0x74BC, 90402, GFX942),
    Card("MI325X", ("AMD Radeon Graphics", "AMD Instinct MI325X"), 0x74A5, 90402, GFX942),
    # "Mi" is what amd-smi and rocm-smi print on DigitalOcean's machines.
    Card("MI325X", ("AMD Instinct Mi325X VF", ""), 0x74B9, 90402, GFX942),
    Card("MI350X", ("", "AMD Instinct MI350X"), 0x75A0, 90500, GFX950),
    Card("MI350X", ("",), 0x75B0, 90500, GFX950),
    Card("MI355X", ("", "AMD Instinct MI355X"), 0x75A3, 90500, GFX950),
    Card("MI355X", ("AMD Instinct MI355X VF", ""), 0x75B3, 90500, GFX950),
)


def kfd_tree(
    sys: Path,
    count: int,
    name: str,
    device_id: int,
    gib: int,
    simd: int,
    target: int,
    mode: str = "SPX",
) -> None:
    """Write the files under `sys` (for /sys) of a machine with `count` equal cards.

    `name`: the product name ("": no file). `gib`: memory of a card. `simd`: SIMD units, four for
    each compute unit. `target`: gfx_target_version. `mode`: the compute partition.
    """
    nodes = sys / "class/kfd/kfd/topology/nodes"
    (nodes / "0").mkdir(parents=True)
    (nodes / "0" / "properties").write_text("cpu_cores_count 96\nsimd_count 0\n")
    for i in range(1, count + 1):
        bank = nodes / str(i) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        bank.joinpath("properties").write_text(
            f"heap_type 1\nsize_in_bytes {gib * GIB}\nwidth 8192\n"
        )
        minor = 120 + 8 * i
        (nodes / str(i) / "properties").write_text(
            f"simd_count {simd}\nsimd_per_cu 4\ngfx_target_version {target}\n"
            f"device_id {device_id}\ndrm_render_minor {minor}\n"
        )
        card = sys / f"class/drm/renderD{minor}/device"
        card.mkdir(parents=True)
        if name:
            (card / "product_name").write_text(name + "\n")
        (card / "current_compute_partition").write_text(mode + "\n")
