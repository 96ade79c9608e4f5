"""Rotary position embedding (Su et al., arXiv:2104.09864) with Llama 3.1's frequency scaling.

Rotate-half convention: (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the first and
second half of a head.

The packed functions work on the packed projection qkv: [M, (heads + 2 * kv_heads) * head_dim], with
M = batch * sequence. The position of a row is row % sequence.

In the epilogue of QuACK's product (0.6.5), with the same bits, the 8B's forward rotation takes 24
µs a layer and sequence less on an H200: 3 of 1,863 ms. The halves of each head would have to
alternate in the weights, from loading to saving, and QuACK's own epilogues take no scales of FP8.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import ConfigError
from common.kernels.architecture import Tile, architecture, assert_contiguous
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.kernels.quantize import (
    quantize_reference,
    quantize_with,
    state_and_largest,
    store_quantized,
)
from common.model.shapes import ModelShape


def rope_frequencies(shape: ModelShape) -> Tensor:
    """Return the rotation frequencies in radians per position, fp32 [head_dim / 2], on the CPU.

    They are base^(-2i / head_dim). If the shape has `rope_scaling`, they are scaled as in Llama 3.1
    (model card; rope type `llama3` of transformers). Wavelengths above original_context /
    low_frequency_factor are multiplied by `factor`. Those below original_context /
    high_frequency_factor do not change. In between, the two frequencies are blended linearly.
    """
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu")
    exponents = pairs / shape.head_dim
    frequencies = 1.0 / shape.rope_base**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_context / wavelengths
    keep = (rotations - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    keep = keep.clamp(0.0, 1.0)  # 1: unchanged, 0: divided by `factor`
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def require_triton_shape(shape: ModelShape) -> None:
    """Raise ConfigError if the head dimension is not a power of two, as Triton's tiles require."""
    if shape.head_dim & (shape.head_dim - 1):
        raise ConfigError(
            f"the Triton kernels do not support a head dimension of {shape.head_dim}",
            "it must be a power of two",
            "choose another shape",
        )


def rope_tables(
    shape: ModelShape, sequence_length: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of the angles of every position, each fp32 [sequence_length, head_dim / 2].

    They are computed on the CPU and copied, so that all devices get the same bits.
    """
    positions = torch.arange(sequence_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rope_frequencies(shape))
    return angles.cos().to(device), angles.sin().to(device)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [batch, sequence, heads, head_dim] in fp32 and return the result in x's dtype.

    `cos`, `sin`: fp32 [sequence, head_dim / 2].
    """
    first, second = x.float().chunk(2, dim=-1)
    cos = cos[:, None, :]
    sin = sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_packed_reference_(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """Rotate the query and key heads of qkv in place, computed in fp32, and return qkv.

    `cos`, `sin`: fp32 [sequence, head_dim / 2].
    """
    sequence, half = cos.shape
    rotated = qkv.view(-1, sequence, heads + 2 * kv_heads, 2 * half)[:, :, : heads + kv_heads]
    rotated.copy_(rope_reference(rotated, cos, sin))
    return qkv


def rope_packed_backward_reference(
    d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, quantizer: Quantizer | None
) -> QuantizedTensor:
    """Return the gradient of the packed projection.

    `d_q`: [batch, sequence, heads, head_dim].
    `d_k`, `d_v`: [batch, sequence, kv_heads, head_dim].
    `quantizer`: quantizer of the result. Without one, the result is in d_q's dtype.

    The gradient of a rotation is the inverse rotation, that is the rotation with -sin. d_v is only
    copied.
    """
    rotated = [rope_reference(x.float(), cos, -sin) for x in (d_q, d_k)]
    d_qkv = torch.cat((*rotated, d_v.float()), dim=2).flatten(2).flatten(0, 1)
    return quantize_reference(d_qkv if quantizer else d_qkv.to(d_q.dtype), quantizer)


def assert_contiguous_heads(*gradients: Tensor) -> None:
    """Raise AssertionError if a gradient [..., head_dim] is not contiguous along head_dim."""
    assert all(gradient.stride(-1) == 1 for gradient in gradients), (
        "attention's gradients must be contiguous along head_dim"
    )


@triton.jit
def load_halves(first_ptr, mask, HALF: tl.constexpr):
    """Load both halves of one head of R rows and return them in fp32, [R, HALF] each.

    `first_ptr`: [R, HALF], pointers to the first half.
    """
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def rotate_back(first, second, cos_ptr, sin_ptr, position, column, mask, HALF: tl.constexpr):
    """Return both halves of a head, fp32 [R, HALF] each, after the inverse rotation.

    `cos_ptr`, `sin_ptr`: fp32 [sequence, HALF].
    `position`: int64 [R], the position of each row in its sequence.
    `column`: int [HALF].
    """
    angle = position[:, None] * HALF + column[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def store_halves(
    first,
    second,
    row,
    column,
    mask,
    out_ptr,
    columnwise_ptr,
    num_rows,
    num_columns,
    state_ptr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store both halves of one head, fp32 [R, HALF] each, by `store_quantized`.

    `column`: int [HALF], the columns of the first half. The second half follows it.

    For the other arguments, see `store_quantized`.
    """
    HALF: tl.constexpr = first.shape[1]
    store_quantized(
        first,
        row,
        column,
        mask,
        out_ptr,
        columnwise_ptr,
        num_rows,
        num_columns,
        state_ptr,
        MODE,
        LARGEST,
    )
    store_quantized(
        second,
        row,
        column + HALF,
        mask,
        out_ptr,
        columnwise_ptr,
        num_rows,
        num_columns,
        state_ptr,
        MODE,
        LARGEST,
    )


@triton.jit
def _rope_packed_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    num_pairs,
    sequence,
    rotated_heads,
    all_heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate BLOCK (row, head) pairs, in memory order. One program per such block.

    In this order, the cos and sin of a row are still in the cache for the next head.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = pair // rotated_heads
    column = tl.arange(0, HALF)
    mask = (pair < num_pairs)[:, None] & (column < HALF)[None, :]
    angle = (row % sequence)[:, None] * HALF + column[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    first_ptr = (
        qkv_ptr
        + (row.to(tl.int64) * all_heads + pair % rotated_heads)[:, None] * (2 * HALF)
        + column[None, :]
    )
    first, second = load_halves(first_ptr, mask, HALF)
    tl.store(first_ptr, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=mask)


def rope_packed_settings(arch: str, half: int) -> Tile:
    """Return the kernel's tile: its rows are (row, head) pairs, its columns half of a head."""
    return Tile(rows=32, columns=half, warps=4)


def rope_packed_triton_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Triton version of `rope_packed_reference_`. Value heads are neither read nor written.

    qkv, cos and sin must be contiguous, and head_dim must be a power of two.
    """
    assert_contiguous("RoPE", qkv, cos, sin)
    sequence, half = cos.shape
    num_pairs = qkv.shape[0] * (heads + kv_heads)
    tile = rope_packed_settings(architecture(qkv.device), half)
    _rope_packed_kernel[(triton.cdiv(num_pairs, tile.rows),)](
        qkv,
        cos,
        sin,
        num_pairs,
        sequence,
        heads + kv_heads,
        heads + 2 * kv_heads,
        half,
        tile.rows,
        **tile.options,
    )
    return qkv


@triton.jit
def _rope_packed_backward_kernel(
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    cos_ptr,
    sin_ptr,
    d_qkv_ptr,
    columnwise_ptr,
    state_ptr,
    num_rows,
    sequence,
    heads,
    kv_heads,
    q_batch,
    q_position,
    q_head,
    k_batch,
    k_position,
    k_head,
    v_batch,
    v_position,
    v_head,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Rotate one head of BLOCK_ROWS rows back. One program per such tile.

    `q_batch` ... `v_head`: strides of the inputs, in elements.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, HALF)
    mask = (row < num_rows)[:, None] & (column < HALF)[None, :]
    # Divided in 32 bits, because a 64-bit division is a subroutine.
    batch = (row // sequence).to(tl.int64)
    position = (row % sequence).to(tl.int64)
    row = row.to(tl.int64)
    # Each branch loads by its own pointer. A choice between pointers at run time does not compile
    # for AMD with Triton 3.6, nor with later versions if d_q has 2 GiB and d_k less (triton#9859).
    if head < heads:
        place = head.to(tl.int64) * q_head + batch * q_batch + position * q_position
        first, second = load_halves(d_q_ptr + (place[:, None] + column[None, :]), mask, HALF)
    elif head < heads + kv_heads:
        place = (head - heads).to(tl.int64) * k_head + batch * k_batch + position * k_position
        first, second = load_halves(d_k_ptr + (place[:, None] + column[None, :]), mask, HALF)
    else:
        place = (
            (head - heads - kv_heads).to(tl.int64) * v_head
            + batch * v_batch
            + position * v_position
        )
        first, second = load_halves(d_v_ptr + (place[:, None] + column[None, :]), mask, HALF)
    if head < heads + kv_heads:
        first, second = rotate_back(first, second, cos_ptr, sin_ptr, position, column, mask, HALF)
    num_columns = (heads + 2 * kv_heads) * (2 * HALF)
    column += head * (2 * HALF)
    store_halves(
        first,
        second,
        row,
        column,
        mask,
        d_qkv_ptr,
        columnwise_ptr,
        num_rows,
        num_columns,
        state_ptr,
        MODE,
        LARGEST,
    )


def rope_packed_backward_settings(arch: str, half: int) -> Tile:
    """Return the kernel's tile: its columns are half of a head. A program does both halves."""
    return Tile(rows=64, columns=half, warps=4)


def rope_packed_backward_triton(
    d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, quantizer: Quantizer | None
) -> QuantizedTensor:
    """Triton version of `rope_packed_backward_reference`. head_dim must be a power of two.

    d_q, d_k and d_v must be contiguous along head_dim, and may have any other strides.
    """
    assert_contiguous_heads(d_q, d_k, d_v)
    assert_contiguous("RoPE's backward", cos, sin)
    batch, sequence, heads, head_dim = d_q.shape
    kv_heads = d_k.shape[2]
    num_rows = batch * sequence
    tile = rope_packed_backward_settings(architecture(d_q.device), head_dim // 2)
    grid = (heads + 2 * kv_heads, triton.cdiv(num_rows, tile.rows))
    state, largest = state_and_largest(quantizer)

    def launch(out: QuantizedTensor, mode: tl.constexpr) -> None:
        _rope_packed_backward_kernel[grid](
            d_q,
            d_k,
            d_v,
            cos,
            sin,
            out.rowwise,
            out.columnwise,
            state,
            num_rows,
            sequence,
            heads,
            kv_heads,
            *d_q.stride()[:3],
            *d_k.stride()[:3],
            *d_v.stride()[:3],
            mode,
            largest,
            head_dim // 2,
            tile.rows,
            **tile.options,
        )

    return quantize_with(
        quantizer, (num_rows, (heads + 2 * kv_heads) * head_dim), d_q, launch, tiled=True
    )
