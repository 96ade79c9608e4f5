"""The kinds of GPU that this package has configs for: memory, peaks, FP8 format. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU as a whole card: memory in bytes, dense peaks in TFLOP/s without sparsity."""

    name: str
    vendor: str  # "amd" or "nvidia"
    arch: str  # gfx942, gfx950, sm_90, sm_100
    compute_units: int  # CUs or SMs
    memory_bytes: int
    peak_bf16_tflops: float
    peak_fp8_tflops: float


# Compute units x clock x FLOP per clock and unit: MI300X = MI325X 304 x 2.1 GHz x 4096 (FP8), MI350X 256 x 2.2 x 8192,
# MI355X 256 x 2.4 x 8192, BF16 half of FP8 (AMD data sheets); MI308X: the MI300X's clock is assumed, as we found no data sheet. H100, H200 and
# B200 SXM from NVIDIA's data sheets. Boost clocks: no card holds them under load, so MFU against them stays well below 1 on every vendor.
KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("MI300X", "amd", "gfx942", 304, 192 * GIB, 1307.4, 2614.9),
        GpuKind("MI308X", "amd", "gfx942", 80, 192 * GIB, 344.06, 688.13),
        GpuKind("MI325X", "amd", "gfx942", 304, 256 * GIB, 1307.4, 2614.9),
        GpuKind("MI350X", "amd", "gfx950", 256, 288 * GIB, 2306.9, 4613.7),
        GpuKind("MI355X", "amd", "gfx950", 256, 288 * GIB, 2516.6, 5033.2),
        GpuKind("H100", "nvidia", "sm_90", 132, 80 * GIB, 989.4, 1978.9),
        GpuKind("H200", "nvidia", "sm_90", 132, 141 * GIB, 989.4, 1978.9),
        GpuKind("B200", "nvidia", "sm_100", 148, 180 * GIB, 2250.0, 4500.0),
    )
}


def fp8_family(arch: str) -> str:
    """`fnuz` on gfx942 (MI300X, MI308X, MI325X), `ocp` elsewhere. The bits of one read as the other give half the value."""
    return "fnuz" if arch.startswith("gfx942") else "ocp"
