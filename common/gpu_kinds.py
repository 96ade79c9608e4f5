"""The GPU kinds that this package has configs for, one entry each. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30
CARD = re.compile(r"\b(PCIe|NVL)\b")  # in the names of cards that are no SXM modules

# Keys of a system description, after `accelerator_`, in the order of GpuKind.description.
DESCRIPTION_KEYS = (
    "model_name",
    "memory_capacity",
    "memory_configuration",
    "frequency",
    "on-chip_memories",
    "interconnect",
    "interconnect_topology",
)
# The last three values of DESCRIPTION_KEYS, which several kinds share.
_MESH = ("256 MB Infinity Cache", "AMD Infinity Fabric (XGMI)", "8 accelerators fully connected")
_NVLINK_4 = ("50 MB L2", "NVLink 4", "8 accelerators through NVSwitch")
_NVLINK_5 = ("", "NVLink 5", "8 accelerators through NVSwitch")
_NVLINK_RACK = ("", "NVLink 5", "")  # 4 GPUs of a tray, 72 of a rack through NVSwitch


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU, as a whole card."""

    name: str
    vendor: str  # "amd" or "nvidia"
    arch: str  # gfx942, gfx950, sm_90, sm_100, sm_103
    compute_units: int  # CUs or SMs; 0: unknown, and not compared
    memory_bytes: int
    peak_bf16_tflops: float  # dense, without sparsity
    peak_fp8_tflops: float  # dense
    efficiency: float = 0.0  # share of the dense peak that a whole FP8 step reaches, for `plan`
    # Values of DESCRIPTION_KEYS, most of which no driver reports.
    description: tuple[str, ...] = ()
    board_watts: int = 0  # power limit of the card, from its data sheet; 0: no source was found
    memory_tb_s: float = 0.0  # peak bandwidth of memory, from the data sheet; 0: unknown

    def peak_tflops(self, in_fp8: bool) -> float:
        """Return the dense peak of products in FP8 or, if not `in_fp8`, in bf16."""
        return self.peak_fp8_tflops if in_fp8 else self.peak_bf16_tflops

    @property
    def interconnect(self) -> str:
        """Name of the links between the GPUs of a node. The description must not be empty."""
        return self.description[DESCRIPTION_KEYS.index("interconnect")]


# Peaks are compute units x clock x FLOP per clock and unit. FP8 from AMD's data sheets: MI300X =
# MI325X 304 x 2.1 GHz x 4096, MI350X 256 x 2.2 GHz x 8192, MI355X 256 x 2.4 GHz x 8192. BF16 is
# half of FP8. MI308X: no data sheet was found, the MI300X's clock is assumed. H100, H200 and B200
# SXM: NVIDIA's data sheets. All clocks are boost clocks, which no card holds under load, so MFU
# against them stays well below 1 on every vendor. GB200, B300 and GB300: memory as their drivers
# report it; peaks as others quote NVIDIA's data sheets (B300: nvidia-cosmos/cosmos-framework#114).
# Their SM counts, reported as 152, 148 and 152, are not confirmed by a device query.
#
# Efficiency: the fits are in tests/launch/plan/test_plan.py. AMD: fitted to the scores of AMD's
# MLPerf v5.1 submissions, and so to the speed of AMD's software. MI308X: the MI300X's, assumed.
# H200: fitted to this project's FP8 runs of both benchmarks. H100, the same chip: assumed equal.
# B200: fitted to the only FP8 8B result of MLPerf v5.1 on 8 of them, by the University of Florida.
# GB200 and GB300: the B200's, scaled by NVIDIA's own FP8 rates of the 8B, 31,508 and 37,556
# tokens/s/GPU against the B200's 30,624 (NVIDIA-NeMo/Megatron-Bridge, performance summaries). B300:
# the GB300's, assumed.
#
# Description, from data sheets. AMD: "Peak Engine Clock", "Infinity Cache", "Infinity Fabric
# Links". NVIDIA: H100 and H200 SXM, and the Hopper architecture white paper (L2 cache, NVLink 4).
# Empty: no source was found.
KINDS = {
    kind.name: kind
    for kind in (
        GpuKind(
            name="MI300X",
            vendor="amd",
            arch="gfx942",
            compute_units=304,
            memory_bytes=192 * GIB,
            memory_tb_s=5.3,
            peak_bf16_tflops=1307.4,
            peak_fp8_tflops=2614.9,
            board_watts=750,
            efficiency=0.326,
            description=("AMD Instinct MI300X", "192 GB", "HBM3", "2100 MHz", *_MESH),
        ),
        GpuKind(
            name="MI308X",
            vendor="amd",
            arch="gfx942",
            compute_units=80,
            memory_bytes=192 * GIB,
            memory_tb_s=5.3,
            peak_bf16_tflops=344.06,
            peak_fp8_tflops=688.13,
            efficiency=0.326,
            description=("AMD Instinct MI308X", "192 GB", "HBM3", "", *_MESH),
        ),
        GpuKind(
            name="MI325X",
            vendor="amd",
            arch="gfx942",
            compute_units=304,
            memory_bytes=256 * GIB,
            memory_tb_s=6.0,
            peak_bf16_tflops=1307.4,
            peak_fp8_tflops=2614.9,
            board_watts=1000,
            efficiency=0.393,
            description=("AMD Instinct MI325X", "256 GB", "HBM3e", "2100 MHz", *_MESH),
        ),
        GpuKind(
            name="MI350X",
            vendor="amd",
            arch="gfx950",
            compute_units=256,
            memory_bytes=288 * GIB,
            memory_tb_s=8.0,
            peak_bf16_tflops=2306.9,
            peak_fp8_tflops=4613.7,
            board_watts=1000,
            efficiency=0.377,
            description=("AMD Instinct MI350X", "288 GB", "HBM3e", "2200 MHz", *_MESH),
        ),
        GpuKind(
            name="MI355X",
            vendor="amd",
            arch="gfx950",
            compute_units=256,
            memory_bytes=288 * GIB,
            memory_tb_s=8.0,
            peak_bf16_tflops=2516.6,
            peak_fp8_tflops=5033.2,
            board_watts=1400,
            efficiency=0.423,
            description=("AMD Instinct MI355X", "288 GB", "HBM3e", "2400 MHz", *_MESH),
        ),
        GpuKind(
            name="H100",
            vendor="nvidia",
            arch="sm_90",
            compute_units=132,
            memory_bytes=80 * GIB,
            memory_tb_s=3.35,
            peak_bf16_tflops=989.4,
            peak_fp8_tflops=1978.9,
            board_watts=700,
            efficiency=0.570,
            description=("NVIDIA H100 SXM", "80 GB", "HBM3", "1980 MHz", *_NVLINK_4),
        ),
        GpuKind(
            name="H200",
            vendor="nvidia",
            arch="sm_90",
            compute_units=132,
            memory_bytes=141 * GIB,
            memory_tb_s=4.8,
            peak_bf16_tflops=989.4,
            peak_fp8_tflops=1978.9,
            board_watts=700,
            efficiency=0.570,
            description=("NVIDIA H200 SXM", "141 GB", "HBM3e", "1980 MHz", *_NVLINK_4),
        ),
        GpuKind(
            name="B200",
            vendor="nvidia",
            arch="sm_100",
            compute_units=148,
            memory_bytes=180 * GIB,
            memory_tb_s=8.0,
            peak_bf16_tflops=2250.0,
            peak_fp8_tflops=4500.0,
            board_watts=1000,
            efficiency=0.431,
            description=("NVIDIA B200 SXM", "180 GB", "HBM3e", "", *_NVLINK_5),
        ),
        GpuKind(
            name="GB200",
            vendor="nvidia",
            arch="sm_100",
            compute_units=0,
            memory_bytes=185 * GIB,
            memory_tb_s=8.0,
            peak_bf16_tflops=2500.0,
            peak_fp8_tflops=5000.0,
            board_watts=1200,
            efficiency=0.399,
            description=("NVIDIA GB200", "185 GB", "HBM3e", "", *_NVLINK_RACK),
        ),
        GpuKind(
            name="B300",
            vendor="nvidia",
            arch="sm_103",
            compute_units=0,
            memory_bytes=268 * GIB,
            memory_tb_s=8.0,
            peak_bf16_tflops=2250.0,
            peak_fp8_tflops=4500.0,
            efficiency=0.476,
            description=("NVIDIA B300 SXM", "268 GB", "HBM3e", "", *_NVLINK_5),
        ),
        GpuKind(
            name="GB300",
            vendor="nvidia",
            arch="sm_103",
            compute_units=0,
            memory_bytes=277 * GIB,
            memory_tb_s=8.0,
            peak_bf16_tflops=2500.0,
            peak_fp8_tflops=5000.0,
            efficiency=0.476,
            description=("NVIDIA GB300", "277 GB", "HBM3e", "", *_NVLINK_RACK),
        ),
    )
}


# GPUs that are known by name but have no configs -> (peak bf16, peak FP8, efficiency) of the kind
# that is derived from the driver. GH200: the chip of the H100 SXM, with 96 or 144 GB (NVIDIA's data
# sheet).
DERIVED_SPEEDS = {
    "GH200": (989.4, 1978.9, 0.570),
}


def fp8_family(arch: str) -> str:
    """Return the FP8 family: `fnuz` on gfx942 (MI300X, MI308X, MI325X), `ocp` elsewhere.

    The same bits have half the value in `fnuz` that they have in `ocp`.
    """
    return "fnuz" if arch.startswith("gfx942") else "ocp"


def kind_in(product: str) -> str:
    """Return the kind that a product name contains, in any case, or "" if there is none.

    Also returns "" for PCIe cards, which have a lower clock, power and peak than SXM modules.
    """
    if CARD.search(product):
        return ""
    return next((kind for kind in KINDS if re.search(rf"\b{kind}\b", product, re.I)), "")
