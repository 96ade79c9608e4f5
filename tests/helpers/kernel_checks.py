"""Shared functions of the kernel tests.

They run on a GPU where there is one, and in Triton's interpreter on a CPU (tests/conftest.py).
"""

import pytest
import torch
from signal_to_noise import sqnr_db  # noqa: F401  (for the kernel tests)

from common.kernels.fp8 import Quantizer
from common.model.linear_layers import DelayedScaling

NO_AMD = pytest.mark.skipif(
    torch.version.hip is not None, reason="formats of a CPU or of NVIDIA; an AMD GPU has others"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape, seed=0, dtype=torch.float32, size=1.0):
    """Return normal random numbers, drawn on the CPU so that every device gets the same ones."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * size
    return numbers.to(DEVICE, dtype)


def error(value, truth):
    """Return the L2 norm of the difference, relative to the norm of `truth`."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def same_up_to_rounding(value, other):
    """Return whether two compiled forms of a kernel agree: within 4 units of the largest value.

    A compiler may contract a product and a sum to one instruction in one form alone, as LLVM does
    for AMD GPUs. The interpreter never does.
    """
    unit = torch.finfo(other.dtype).eps * float(other.abs().max())
    return float((value.double() - other.double()).abs().max()) <= 4 * unit


class UnroundedQuantizer(Quantizer):
    """Quantizer that stores the scaled and clamped value in fp32.

    Triton's interpreter rounds wrongly to e4m3 (127 becomes 64).
    """

    largest = 2.0


def unrounded(*kinds, largest=2.0):
    """Return a DelayedScaling and its UnroundedQuantizers, which saturate at `largest`.

    `kinds`: the arguments of each quantizer, as dictionaries.
    """
    scaling = DelayedScaling()
    scaling.quantizers = [UnroundedQuantizer(**kind) for kind in kinds]
    for quantizer in scaling.quantizers:
        quantizer.largest = largest
    scaling.allocate(DEVICE)
    for quantizer in scaling.quantizers:
        quantizer.dtype = torch.float32
    return scaling, scaling.quantizers
