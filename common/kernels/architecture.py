"""The architecture of a GPU, and the tunable launch settings of kernels.

Each kernel has a function `<kernel>_settings(architecture)` in the same file, which returns a Tile.
To tune a kernel for another GPU, compute the setting from the property that decides it, such as the
number of compute units, or branch on the architecture's name there. Then run tests/kernels.
They compile every kernel with these settings for every supported architecture. They fail if a
kernel spills registers or needs more shared memory than the GPU has. `throughput tiles` times
other settings.

No setting was ever timed on an AMD GPU. Kernels for AMD have one stage, except on gfx942, because
those with more compute wrong results on gfx950 with Triton 3.7 and 3.8 (aiter#4163, aiter#5428).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from common.gpu_kinds import KINDS

# Architecture whose settings are used without a GPU, in Triton's interpreter.
DEFAULT = "sm_90"
AMD_CACHE_LINE = 128  # bytes, in the L2 cache of CDNA 3 and 4


class Tile(NamedTuple):
    """The division of a kernel's work into programs. Kernels on vectors have tiles of one row."""

    rows: int  # height of a tile
    columns: int
    warps: int  # per program; 32 threads each on NVIDIA, 64 on AMD
    stages: int = 1  # of software pipelining, in kernels with a loop over memory
    repeats: int = 1  # tiles per program, in kernels that sum over rows
    parts: int = 1  # number of partial sums, in kernels that split the summed dimension
    # AMD only: number of waves that must fit on one SIMD, which limits the registers of each. 0:
    # the compiler decides.
    waves_per_eu: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The launch options of Triton, which are not arguments of the kernel itself."""
        options = {"num_warps": self.warps}
        if self.waves_per_eu:
            options["waves_per_eu"] = self.waves_per_eu
        return options


class Abilities(NamedTuple):
    """Features that are safe to use on an architecture. See `abilities`."""

    pipelined_loops: bool  # Triton's loops with several stages compute right
    stream_priorities: bool  # a stream of high priority precedes the others, and costs nothing


def abilities(arch: str) -> Abilities:
    """Return the features that are safe on an architecture. An unknown one of AMD has none.

    On HIP, a stream of high priority is one more hardware queue, and ROCm 10 has no priorities.
    """
    is_nvidia = arch.startswith("sm_")
    return Abilities(
        pipelined_loops=is_nvidia or arch == "gfx942",
        stream_priorities=is_nvidia,
    )


def pipeline_stages(arch: str, stages: int) -> int:
    """Return `stages`, or 1 on an architecture on which pipelined loops may be wrong."""
    return stages if abilities(arch).pipelined_loops else 1


def high_priority(device: torch.device) -> int:
    """Return the priority of a stream that should precede others: -1, or 0 where that costs."""
    return -1 if abilities(architecture(device)).stream_priorities else 0


def row_repeats(arch: str, measured: int) -> int:
    """Return the number of tiles of a program that sums over rows, a power of two.

    `measured`: the best number on an H200.

    Each compute unit gets as many programs as one of an H200, and twice as many where no loop is
    pipelined: there, only other programs hide the latency of memory.
    """
    units = max((kind.compute_units for kind in KINDS.values() if kind.arch == arch), default=0)
    repeats = measured * KINDS["H200"].compute_units / (units or KINDS["H200"].compute_units)
    if not abilities(arch).pipelined_loops:
        repeats /= 2
    return 2 ** max(0, round(math.log2(repeats)))


def assert_contiguous(kernel: str, *tensors: Tensor | None) -> None:
    """Raise AssertionError if a tensor is not contiguous.

    `kernel`: its name, for the message.

    A kernel would read wrong elements of such a tensor, or memory outside of it.
    """
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), (
            f"{kernel} reads contiguous tensors; one of them has strides {tensor.stride()}"
        )


@cache
def architecture(device: torch.device) -> str:
    """Return the compiler's name of the architecture, such as "gfx942" or "sm_90".

    Returns DEFAULT for a CPU.
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
