"""Triton kernels that emulate the formats of block_formats.py, for long studies.

Each element is read and written once. The results equal the plain torch emulation's bit for bit,
with three exceptions: stochastic rounding draws other random numbers, a Hadamard transform may add
in another order, and zeros lose their sign. Rows must be whole blocks.

500 steps in MXFP8 take 22 s on an H200, with torch.compile of the emulation 57 s, in bf16 21 s.
Inductor of torch 2.11 compiles it only with the blocks as one long column (CantSplit).
"""

from __future__ import annotations

from functools import cache

import block_formats
import torch
import triton
import triton.language as tl
from block_formats import (
    HADAMARD_SIZE,
    LARGEST_BLOCK_SCALE,
    LEAST_TENSOR_SCALE,
    BlockFormat,
    Element,
)
from torch import Tensor

ROWS, COLUMNS, WARPS = 64, 64, 4  # of a tile


@triton.jit
def _power_of_two(exponent):
    """Return 2^exponent in fp32.

    `exponent`: int32, from -127 to 127. 2^-127 is subnormal: the highest bit of its mantissa.
    """
    return tl.maximum((exponent + 127) << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _round(
    x,
    noise,
    MANTISSA: tl.constexpr,
    LEAST_STEP: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Round `x` to the nearest number of a format, ties to even.

    STOCHASTIC: round up where the remainder of a step is larger than `noise`, which is from 0 to 1.
    """
    binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(binade * (1.0 / (1 << MANTISSA)), LEAST_STEP)
    steps = tl.div_rn(x, step)
    if STOCHASTIC:
        below = tl.floor(steps)
        steps = below + tl.where(steps - below > noise, 1.0, 0.0)
    else:
        # 1.5 * 2^23: fp32 has no fractions near it, so adding it rounds to a whole number.
        steps = (steps + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(steps * step, -LARGEST), LARGEST)


@triton.jit
def _load(x, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile as fp32.

    Return it, the index of each element in a contiguous result, and a mask of the elements that
    exist.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < rows) & (column < columns)
    tile = tl.load(x + row * row_stride + column * column_stride, mask=there, other=0.0).to(
        tl.float32
    )
    return tile, row * columns + column, there


@triton.jit
def _emulate(
    x,
    out,
    tensor_scale,
    seed,
    rows,
    columns,
    row_stride,
    column_stride,
    SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST_STEP: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    NVFP4: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, index, there = _load(x, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    noise = tl.rand(seed, index) if STOCHASTIC else tile
    split: tl.constexpr = (ROWS // HEIGHT, HEIGHT, COLUMNS // SIZE, SIZE)
    blocks = tl.reshape(tile, split)
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of |x|: NaN above inf above all numbers
    amax = tl.max(tl.max(bits, 3, keep_dims=True), 1, keep_dims=True)
    if NVFP4:
        t = tl.load(tensor_scale)
        wanted = tl.div_rn(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST), t)
        # e4m3: 3 bits of mantissa, normal from 2^-6 to 448, subnormal numbers 2^-9 apart.
        scale = _round(
            tl.minimum(tl.maximum(wanted, 0.015625), 448.0), wanted, 3, 0.001953125, 448.0, False
        )
        scaled, factor = blocks * tl.div_rn(tl.div_rn(1.0, t), scale), scale * t
    else:
        exponent = tl.minimum(tl.maximum((amax >> 23) - 127 - MAX_EXPONENT, -127), 127)
        factor = tl.where(amax < 0x7F800000, _power_of_two(exponent), float("nan"))
        scaled = blocks * _power_of_two(-exponent)
    made = (
        _round(scaled, tl.reshape(noise, split), MANTISSA, LEAST_STEP, LARGEST, STOCHASTIC) * factor
    )
    tl.store(out + index, tl.reshape(made, (ROWS, COLUMNS)), mask=there)


@triton.jit
def _transform(
    x,
    out,
    matrix,
    rows,
    columns,
    row_stride,
    column_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, index, there = _load(x, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    groups = tl.reshape(tile, (ROWS * COLUMNS // SIZE, SIZE))
    matrix = tl.load(matrix + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    made = tl.dot(groups, matrix, input_precision="ieee")
    tl.store(out + index, tl.reshape(made, (ROWS, COLUMNS)), mask=there)


def tiles_of(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], ROWS), triton.cdiv(x.shape[1], COLUMNS)


@cache
def hadamard_matrix(device: torch.device, random_signs: bool) -> Tensor:
    return PLAIN_HADAMARD(torch.eye(HADAMARD_SIZE, device=device), random_signs)


def emulate(
    x: Tensor,
    block_format: BlockFormat,
    element: Element,
    dtype: torch.dtype,
    *,
    square: bool = False,
    stochastic: bool = False,
) -> Tensor:
    """Return the result of block_formats.emulate. `x` may be a transposed view."""
    assert x.shape[1] % block_format.block_size == 0 and not (
        square and x.shape[0] % block_format.block_size
    ), "blocks must be whole"
    out, tensor_scale = x.new_empty(x.shape, dtype=dtype), None
    if block_format.has_tensor_scale:
        least, most = x.aminmax()
        amax = torch.maximum(-least, most).float()
        tensor_scale = (amax / (LARGEST_BLOCK_SCALE * element.largest)).clamp(
            min=LEAST_TENSOR_SCALE
        )
    seed = int(torch.randint(2**31, ())) if stochastic else 0
    _emulate[tiles_of(x)](
        x,
        out,
        tensor_scale,
        seed,
        *x.shape,
        *x.stride(),
        block_format.block_size,
        block_format.block_size if square else 1,
        element.mantissa_bits,
        2.0 ** (element.min_exponent - element.mantissa_bits),
        element.largest,
        element.max_exponent,
        block_format.has_tensor_scale,
        stochastic,
        ROWS,
        COLUMNS,
        num_warps=WARPS,
    )
    return out


def hadamard(x: Tensor, random_signs: bool) -> Tensor:
    """Return the result of block_formats.hadamard."""
    assert x.shape[1] % HADAMARD_SIZE == 0, "blocks must be whole"
    out = x.new_empty(x.shape, dtype=torch.float32)
    _transform[tiles_of(x)](
        x,
        out,
        hadamard_matrix(x.device, random_signs),
        *x.shape,
        *x.stride(),
        HADAMARD_SIZE,
        ROWS,
        COLUMNS,
        num_warps=WARPS,
    )
    return out


PLAIN, PLAIN_HADAMARD = block_formats.emulate, block_formats.hadamard


def install(device: torch.device, side: int = 1024) -> str:
    """Let emulated_layers.py use these functions instead of the plain ones.

    Return a text with the number of elements that they round differently in each format, among
    side x side normal numbers, as they are and transformed.
    """
    x, found = torch.randn(side, side, device=device).bfloat16(), []
    for name, block_format in block_formats.BLOCK_FORMATS.items():
        made = [
            function(transform(x.t(), False), block_format, block_format.gradient_element, x.dtype)
            for function, transform in ((PLAIN, PLAIN_HADAMARD), (emulate, hadamard))
        ]
        plain = [
            function(x, block_format, block_format.gradient_element, x.dtype)
            for function in (PLAIN, emulate)
        ]
        found.append(
            f"{name} {int((plain[0] != plain[1]).sum())} and {int((made[0] != made[1]).sum())}"
        )
    block_formats.emulate, block_formats.hadamard = emulate, hadamard
    return (
        f"kernels; of {x.numel():,} elements they round differently, plain and transformed: "
        f"{', '.join(found)}"
    )
