"""Block formats: few bits per element under one scale for each block of elements along the summed dimension. Emulated in plain torch.

    MX (Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, section 6.3)
        32 elements share a scale 2^s, s = floor(log2(amax)) - emax: amax the largest |x| of the block, emax the exponent of the element
        format's largest number. s is stored as E8M0: -127 to 127, and NaN. An element is x / 2^s, rounded to its format; what exceeds the
        format's largest number becomes that number.
    NVFP4 (NVIDIA, arXiv:2509.25149)
        e2m1 elements, 16 of which share a scale in e4m3; above these, one fp32 scale t = amax of the tensor / (448 * 6). A block's scale
        is amax / 6 / t, rounded to e4m3, and at least 2^-6, its smallest normal number, as torchao has it.

A product sums along one dimension only, and only there elements may share a scale. So the two layouts of a tensor (kernels/fp8.py) hold
different numbers: each is quantized apart from the tensor itself. The exception is a weight with a scale per square: 32 x 32 elements, or
16 x 16 in NVFP4.

`quantize` returns what a GPU with these formats would store, elements and scales, in fp32; `Blocks.dequantize` turns them back into a
tensor that any GPU multiplies in its compute dtype, and `emulate` does both. A native path takes the place of the latter two. The dequantized numbers are exact in bf16,
which has 8 significant bits; but those of NVFP4, which are multiples of t, are rounded to bf16 once more.

A NaN makes its block NaN, and here an infinite element does so too, so that the loss or the gradient norm shows it and the run stops. In
NVFP4 it is the whole tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_BLOCK_SCALE, LARGEST_BLOCK_SCALE = (
    2.0**-6,
    448.0,
)  # of NVFP4, in e4m3: its smallest normal and its largest number
LEAST_TENSOR_SCALE = (
    2.0**-120
)  # of NVFP4, also of zeros: 1 / t / 2^-6 is still a finite fp32 number
HADAMARD_SIZE = 16
# A fixed random draw, the same in every run: the signs of both factors of a product must agree.
SIGNS = (1, -1, -1, 1, 1, 1, 1, -1, -1, 1, 1, 1, -1, 1, 1, -1)


@dataclass(frozen=True)
class Element:
    """A float of few bits without infinities: a sign, an exponent and `mantissa_bits`; below 2^min_exponent numbers are subnormal."""

    mantissa_bits: int
    min_exponent: int
    largest: float

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.largest)[1] - 1


E4M3, E5M2 = Element(3, -6, 448.0), Element(2, -14, 57344.0)
E2M3, E3M2 = Element(3, 0, 7.5), Element(2, -2, 28.0)
E2M1 = Element(1, 0, 6.0)


@dataclass(frozen=True)
class BlockFormat:
    element: Element
    gradient_element: Element
    block_size: int = 32
    has_tensor_scale: bool = False  # NVFP4's two scales, instead of E8M0


FORMATS = {  # by their names in a config
    "mxfp8": BlockFormat(E4M3, E4M3),
    "mxfp8_hybrid": BlockFormat(E4M3, E5M2),
    "mxfp6_e2m3": BlockFormat(E2M3, E2M3),
    "mxfp6_e3m2": BlockFormat(E3M2, E3M2),
    "mxfp4": BlockFormat(E2M1, E2M1),
    "nvfp4": BlockFormat(E2M1, E2M1, 16, has_tensor_scale=True),
}


class Blocks(NamedTuple):
    """A quantized matrix [rows, columns], filled up with zeros to whole blocks of r x c elements. All fp32."""

    elements: Tensor  # [R, r, C, c], numbers of the element format
    scales: (
        Tensor  # [R, 1, C, 1], what the elements are multiples of: E8M0 numbers, or e4m3 numbers
    )
    tensor_scale: Tensor | None  # [], NVFP4's t
    shape: torch.Size  # rows, columns

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns], contiguous."""
        scales = self.scales if self.tensor_scale is None else self.scales * self.tensor_scale
        padded = (self.elements * scales).to(dtype).flatten(2).flatten(0, 1)
        return padded[: self.shape[0], : self.shape[1]].contiguous()


def emulate(
    x: Tensor,
    form: BlockFormat,
    element: Element,
    dtype: torch.dtype,
    *,
    square: bool = False,
    stochastic: bool = False,
) -> Tensor:
    """x: [rows, columns] as it is after `quantize`, in `dtype`."""
    return quantize(x, form, element, square=square, stochastic=stochastic).dequantize(dtype)


def quantize(
    x: Tensor,
    form: BlockFormat,
    element: Element,
    *,
    square: bool = False,
    stochastic: bool = False,
) -> Blocks:
    """x: [rows, columns] of any float dtype, scaled in blocks of `form.block_size` elements of a row, or in squares.

    The last block of a row is short where the size does not divide. `stochastic`: round up with the probability that makes the mean exact,
    instead of to the nearest, ties to even; draws from the default generator of x's device.
    """
    size = form.block_size
    height = size if square else 1
    padded = (
        F.pad(x, (0, -x.shape[1] % size, 0, -x.shape[0] % height))
        if x.shape[1] % size or x.shape[0] % height
        else x
    )
    blocks = (
        padded.float()
        .contiguous()
        .view(padded.shape[0] // height, height, padded.shape[1] // size, size)
    )
    amax = blocks.abs().amax((1, 3), keepdim=True)
    tensor_scale = None
    if form.has_tensor_scale:
        largest = amax.new_full(
            (), element.largest
        )  # by a Python number a GPU divides inexactly: it multiplies by the inverse
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
    """x: fp32, contiguous -> the nearest number of the format, or one of the two beside it; beyond the largest number that one. NaN and inf become NaN.

    The numbers of the format beside x are a power of two apart, `step`: all of this is exact.
    """
    binade = (x.view(torch.int32) & 0x7F800000).view(
        torch.float32
    )  # 2^floor(log2(|x|)): the exponent's bits alone
    step = binade.clamp_(min=2.0**element.min_exponent).mul_(2.0**-element.mantissa_bits)
    steps = x / step
    if stochastic:
        below = steps.floor()
        steps = below.add_(steps.sub_(below) > torch.rand_like(steps))
    else:
        steps.round_()  # ties to even
    return steps.mul_(step).clamp_(-element.largest, element.largest)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2(x)), int32; -127 for zero and subnormal numbers, 128 for inf and NaN. x: fp32, contiguous and not negative."""
    return (x.view(torch.int32) >> 23) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, without rounding; exponent: int32, at least -127 and at most 127 (128 becomes inf)."""
    return (
        ((exponent + 127) << 23).clamp(min=1 << 22).view(torch.float32)
    )  # 2^-127 is subnormal: the highest bit of its mantissa


def hadamard(x: Tensor, random_signs: bool) -> Tensor:
    """Each 16 elements of a row of x [rows, columns] times the Hadamard matrix / 4, in fp32; `random_signs`: their signs changed before.

    The matrix is orthogonal: the product of two factors that are both transformed along the summed dimension is the same, but outliers are
    spread over 16 elements (NVIDIA, arXiv:2509.25149; Tseng et al., arXiv:2502.20586). Columns are filled up with zeros to a multiple of 16.
    """
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < HADAMARD_SIZE:  # Sylvester's construction
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    if random_signs:
        matrix = torch.tensor(SIGNS, dtype=torch.float32, device=x.device)[:, None] * matrix
    groups = F.pad(x.float(), (0, -x.shape[1] % HADAMARD_SIZE)).unflatten(1, (-1, HADAMARD_SIZE))
    return (groups @ (matrix / math.sqrt(HADAMARD_SIZE))).flatten(1)
