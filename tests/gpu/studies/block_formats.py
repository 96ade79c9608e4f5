"""Emulation of block formats in plain torch: few bits per element, and one scale per block.

A block is a group of elements along the dimension over which a product sums.

    MX (Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, section
    6.3)
        32 elements share a scale 2^s with s = floor(log2(amax)) - emax. amax is the largest |x| of
        the block, emax the exponent of the element format's largest number. s is stored as E8M0:
        -127 to 127, or NaN. An element is x / 2^s, rounded to its format. A value beyond the
        format's largest number becomes that number.
    NVFP4 (NVIDIA, arXiv:2509.25149)
        Elements are e2m1, and 16 of them share a scale in e4m3. The tensor has an fp32 scale
        t = amax of the tensor / (448 * 6). A block's scale is amax / 6 / t, rounded to e4m3, and at
        least 2^-6, the smallest normal number of e4m3, as in torchao.

Only elements along the summed dimension may share a scale. Therefore the two layouts of a tensor
(common/kernels/fp8.py) have different values, and each is quantized from the tensor itself. The
exception is a weight with one scale per square of 32 x 32 elements, or 16 x 16 in NVFP4.

`quantize` returns the elements and scales that a GPU with these formats would store, in fp32.
`Blocks.dequantize` converts them to a tensor that any GPU can multiply in its compute dtype.
`emulate` does both. A native implementation would replace the latter two. The dequantized values
are exact in bf16, which has 8 significant bits, except NVFP4's: they are multiples of t and are
rounded to bf16.

If an element is NaN or infinite, its whole block becomes NaN, and in NVFP4 the whole tensor. The
loss or the gradient norm then shows it, and the run stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# NVFP4's block scales, in e4m3: its smallest normal number and its largest number.
LEAST_BLOCK_SCALE = 2.0**-6
LARGEST_BLOCK_SCALE = 448.0
# NVFP4's smallest tensor scale t, also used for zeros. 1 / t / 2^-6 must be finite in fp32.
LEAST_TENSOR_SCALE = 2.0**-120
HADAMARD_SIZE = 16
# Random signs that were drawn once, because both factors of a product need the same.
SIGNS = (1, -1, -1, 1, 1, 1, 1, -1, -1, 1, 1, 1, -1, 1, 1, -1)


@dataclass(frozen=True)
class Element:
    """A floating-point format of few bits: a sign, an exponent and a mantissa, without infinities.

    Numbers below 2^min_exponent are subnormal.
    """

    mantissa_bits: int
    min_exponent: int
    largest: float

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1


E4M3 = Element(3, -6, 448.0)
E5M2 = Element(2, -14, 57344.0)
E2M3 = Element(3, 0, 7.5)
E3M2 = Element(2, -2, 28.0)
E2M1 = Element(1, 0, 6.0)


@dataclass(frozen=True)
class BlockFormat:
    """A block format: its elements, and how they are scaled."""

    element: Element  # of weights and activations
    gradient_element: Element
    block_size: int = 32  # elements per scale
    has_tensor_scale: bool = False  # the two scales of NVFP4 instead of E8M0


BLOCK_FORMATS = {  # by their names in a config
    "mxfp8": BlockFormat(E4M3, E4M3),
    "mxfp8_hybrid": BlockFormat(E4M3, E5M2),
    "mxfp6_e2m3": BlockFormat(E2M3, E2M3),
    "mxfp6_e3m2": BlockFormat(E3M2, E3M2),
    "mxfp4": BlockFormat(E2M1, E2M1),
    "nvfp4": BlockFormat(E2M1, E2M1, 16, has_tensor_scale=True),
}


class Blocks(NamedTuple):
    """A quantized matrix [rows, columns], padded with zeros to whole blocks of r x c elements.

    Its fields, all tensors in fp32:
        `elements`: [R, r, C, c], numbers of the element format.
        `scales`: [R, 1, C, 1], numbers of E8M0 or, in NVFP4, of e4m3.
        `tensor_scale`: [], NVFP4's t. None in MX.
        `shape`: (rows, columns).
    """

    elements: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the values as a contiguous matrix [rows, columns] of `dtype`."""
        scales = self.scales if self.tensor_scale is None else self.scales * self.tensor_scale
        padded = (self.elements * scales).to(dtype).flatten(2).flatten(0, 1)
        return padded[: self.shape[0], : self.shape[1]].contiguous()


def emulate(
    x: Tensor,
    block_format: BlockFormat,
    element: Element,
    dtype: torch.dtype,
    *,
    square: bool = False,
    stochastic: bool = False,
) -> Tensor:
    """Quantize and dequantize `x` [rows, columns]. The result is in `dtype`."""
    return quantize(x, block_format, element, square=square, stochastic=stochastic).dequantize(
        dtype
    )


def quantize(
    x: Tensor,
    block_format: BlockFormat,
    element: Element,
    *,
    square: bool = False,
    stochastic: bool = False,
) -> Blocks:
    """Quantize `x` [rows, columns] of any float dtype in blocks along its rows.

    `square`: one scale per square of b x b elements, instead of one per b elements of a row, with
        b = `block_format.block_size`. The last block of a row or column can be shorter.
    `stochastic`: round up or down at random, so that the mean is exact, instead of to the nearest
        number, ties to even. Draws from the default generator of x's device.
    """
    size = block_format.block_size
    height = size if square else 1
    padded = x
    if x.shape[1] % size or x.shape[0] % height:
        padded = F.pad(x, (0, -x.shape[1] % size, 0, -x.shape[0] % height))
    block_shape = (padded.shape[0] // height, height, padded.shape[1] // size, size)
    blocks = padded.float().contiguous().view(block_shape)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    tensor_scale = None
    if block_format.has_tensor_scale:
        # As a tensor, because a GPU divides by a Python number inexactly, by multiplication with
        # its inverse.
        largest = amax.new_full((), element.largest)
        tensor_scale = (amax.max() / (LARGEST_BLOCK_SCALE * largest)).clamp(min=LEAST_TENSOR_SCALE)
        wanted = (amax / largest / tensor_scale).clamp(LEAST_BLOCK_SCALE, LARGEST_BLOCK_SCALE)
        scales = round_to(wanted, E4M3)
        scaled = blocks * ((1.0 / tensor_scale) / scales)
    else:
        exponent = (_exponent(amax) - element.max_exponent).clamp(-127, 127)
        scales = torch.where(amax.isfinite(), _power_of_two(exponent), math.nan)
        scaled = blocks * _power_of_two(-exponent)
    return Blocks(round_to(scaled, element, stochastic), scales, tensor_scale, x.shape)


def round_to(x: Tensor, element: Element, stochastic: bool = False) -> Tensor:
    """Round `x`, fp32 and contiguous, to numbers of the format.

    Rounds to the nearest number, ties to even, or with `stochastic` to one of the two neighbors.
    Values beyond the largest number become the largest number. NaN and inf become NaN.

    The two neighbors of x in the format differ by `step`, a power of two, so all operations but the
    rounding are exact.
    """
    # 2^floor(log2(|x|)): x with only the bits of its exponent.
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = binade.clamp_(min=2.0**element.min_exponent).mul_(2.0**-element.mantissa_bits)
    steps = x / step
    if stochastic:
        below = steps.floor()
        steps = below.add_(steps.sub_(below) > torch.rand_like(steps))
    else:
        steps.round_()  # ties to even
    return steps.mul_(step).clamp_(-element.largest, element.largest)


def _exponent(x: Tensor) -> Tensor:
    """Return floor(log2(x)) in int32: -127 for zero and subnormal numbers, 128 for inf and NaN.

    `x`: fp32, contiguous, not negative.
    """
    return (x.view(torch.int32) >> 23) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, exactly. `exponent`: int32, -127 to 127 (128 becomes inf)."""
    # 2^-127 is subnormal: only the highest bit of its mantissa is set.
    return ((exponent + 127) << 23).clamp(min=1 << 22).view(torch.float32)


def hadamard(x: Tensor, random_signs: bool) -> Tensor:
    """Multiply each 16 elements of a row of `x` [rows, columns] by the Hadamard matrix / 4.

    `random_signs`: multiply the elements by SIGNS first.

    Returns fp32, with columns padded by zeros to a multiple of 16. The matrix is orthogonal. So the
    product of two factors that are transformed along the summed dimension does not change. But
    outliers are spread over 16 elements (NVIDIA, arXiv:2509.25149; Tseng et al., arXiv:2502.20586).
    """
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < HADAMARD_SIZE:  # Sylvester's construction
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    if random_signs:
        matrix = torch.tensor(SIGNS, dtype=torch.float32, device=x.device)[:, None] * matrix
    groups = F.pad(x.float(), (0, -x.shape[1] % HADAMARD_SIZE)).unflatten(1, (-1, HADAMARD_SIZE))
    return (groups @ (matrix / math.sqrt(HADAMARD_SIZE))).flatten(1)
