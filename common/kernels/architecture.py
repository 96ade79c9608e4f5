"""The GPU architecture that a kernel is launched on, and what a launch can tune for it.

Each kernel file has one function `<kernel>_settings(architecture)` beside each kernel, which returns a Tile. This is the place to tune a
kernel for another GPU: branch on the name, and run tests/kernels, which compile every kernel with these settings for every shipped
architecture and fail if one spills registers or takes more shared memory than there is; `throughput settings` times others. None was ever timed on an AMD
GPU. gfx950 has one stage: Triton 3.7 and 3.8 compute wrongly with more (aiter#4163, aiter#5428).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT = "sm_90"  # where there is no GPU: Triton's interpreter runs kernels with these settings


class Tile(NamedTuple):
    """How a kernel is cut into programs. Kernels on vectors have one row."""

    rows: int  # of one tile
    columns: int
    warps: int  # per program; 32 threads each on NVIDIA, 64 on AMD
    stages: int = 1  # of software pipelining, in kernels with a loop over memory
    repeats: int = 1  # tiles per program, in kernels that sum over rows
    parts: int = 1  # the number of partial sums that a summed dimension is cut into
    waves_per_eu: int = 0  # AMD: waves that must find room on a SIMD, which bounds the registers of each; 0: the compiler decides

    @property
    def options(
        self,
    ) -> dict[str, int]:  # that Triton's launcher takes beside the kernel's own arguments
        return {"num_warps": self.warps} | (
            {"waves_per_eu": self.waves_per_eu} if self.waves_per_eu else {}
        )


def assert_contiguous(kernel: str, *tensors: Tensor | None) -> None:
    """Raise AssertionError for a tensor with gaps or another order: `kernel` would read other elements, or foreign memory."""
    strides = [
        tensor.stride() for tensor in tensors if tensor is not None and not tensor.is_contiguous()
    ]
    assert not strides, f"{kernel} reads contiguous tensors; one of them has strides {strides[0]}"


@cache
def architecture(device: torch.device) -> str:
    """The compiler's name for the architecture of `device`: "gfx942", "gfx950", "sm_90", "sm_100"; DEFAULT for a CPU."""
    if device.type != "cuda":
        return DEFAULT
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
