"""The GPU architecture that a kernel is launched on, and its tunable launch settings.

Each kernel has a function `<kernel>_settings(architecture)` in the same file, which returns a Tile.
To tune a kernel for another GPU, branch on the architecture's name there. Then run tests/kernels,
which compile every kernel with these settings for every shipped architecture. They fail if a kernel
spills registers or needs more shared memory than the GPU has. `throughput settings` times other
settings.

No setting was ever timed on an AMD GPU. gfx950 has one stage: Triton 3.7 and 3.8 compute wrong
results with more (aiter#4163, aiter#5428).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Used without a GPU: Triton's interpreter runs kernels with these settings.
DEFAULT = "sm_90"


class Tile(NamedTuple):
    """The division of a kernel's work into programs. Kernels on vectors have one row."""

    rows: int  # height of a tile
    columns: int
    warps: int  # per program; 32 threads each on NVIDIA, 64 on AMD
    stages: int = 1  # of software pipelining, in kernels with a loop over memory
    repeats: int = 1  # tiles per program, in kernels that sum over rows
    parts: int = 1  # the number of partial sums that a summed dimension is cut into
    # AMD only: waves that must fit on one SIMD, which bounds the registers of each. 0: the compiler
    # decides.
    waves_per_eu: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Return the launch options for Triton, passed besides the kernel's own arguments."""
        return {"num_warps": self.warps} | (
            {"waves_per_eu": self.waves_per_eu} if self.waves_per_eu else {}
        )


def assert_contiguous(kernel: str, *tensors: Tensor | None) -> None:
    """Raise AssertionError if a tensor is not contiguous.

    `kernel` would read wrong elements of such a tensor, or memory outside of it.
    """
    strides = [
        tensor.stride() for tensor in tensors if tensor is not None and not tensor.is_contiguous()
    ]
    assert not strides, f"{kernel} reads contiguous tensors; one of them has strides {strides[0]}"


@cache
def architecture(device: torch.device) -> str:
    """Return the compiler's name for the architecture of `device`, DEFAULT for a CPU.

    Examples: "gfx942", "gfx950", "sm_90", "sm_100".
    """
    if device.type != "cuda":
        return DEFAULT
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def gpu_architecture(device: torch.device) -> str:
    """Return the architecture of a GPU, "" for a CPU."""
    return architecture(device) if device.type == "cuda" else ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bf16", "fp8", or torch's name of another dtype."""
    if dtype == torch.bfloat16:
        return "bf16"
    return "fp8" if dtype.itemsize == 1 else str(dtype).removeprefix("torch.")
