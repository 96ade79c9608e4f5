"""RMSNorm of each query and key head (Qwen3, arXiv:2505.09388), followed by RoPE.

The kernels work on the packed projection of queries, keys and values:

    forward    y = RoPE(x * rstd * w), with rstd = 1 / sqrt(mean(x^2) + eps) and the mean over one
               head. w is [head_dim]: one for queries, one for keys.
    backward   d_n = RoPE^T(d_y);  g = d_n * w;  x_hat = x * rstd
               d_x = rstd * (g - x_hat * mean(g * x_hat))
               d_w = sum of d_n * x_hat

In a model with these norms, these kernels replace kernels/rope.py. A program keeps whole heads in
registers. The backward recomputes rstd, which is cheaper than keeping it. It also needs x, which
the forward overwrites. Therefore the forward first copies the query and key heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.architecture import Tile, architecture, assert_contiguous, row_repeats
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.kernels.quantize import (
    AMAX_ONLY,
    quantize_reference,
    quantize_with,
    state_and_largest,
)
from common.kernels.rope import (
    assert_contiguous_heads,
    load_halves,
    rope_reference,
    rotate_back,
    store_halves,
)

# Gradients of the rotated queries [batch, sequence, heads, head_dim], and of the rotated keys and
# the values, each [batch, sequence, kv_heads, head_dim].
Gradients = tuple[Tensor, Tensor, Tensor]
# Weights of the queries' norm and of the keys' norm, each [head_dim].
Weights = tuple[Tensor, Tensor]


def qk_norm_rope_reference_(
    qkv: Tensor,
    weights: Weights,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    keep: bool,
) -> Tensor | None:
    """Normalize and rotate the query and key heads of qkv in place.

    `qkv`: [M, (heads + 2 * kv_heads) * head_dim], M = batch * sequence.
    `cos`, `sin`: fp32 [sequence, head_dim / 2].
    `keep`: return a copy of these heads before the norm, [M, (heads + kv_heads) * head_dim].
        Otherwise return None.

    Computes in fp32 and rounds once.
    """
    sequence, half = cos.shape
    rotated = qkv.view(-1, sequence, heads + 2 * kv_heads, 2 * half)[:, :, : heads + kv_heads]
    before = rotated.flatten(2).flatten(0, 1).clone() if keep else None
    x_hat, _ = _normalized(rotated, eps)
    normalized = x_hat * _weight_of_heads(weights, heads, kv_heads)
    rotated.copy_(rope_reference(normalized, cos, sin))
    return before


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x_hat and rstd in fp32."""
    x = x.float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def _weight_of_heads(weights: Weights, heads: int, kv_heads: int) -> Tensor:
    """Return the weight of each query and key head, fp32 [heads + kv_heads, head_dim]."""
    q_weight, k_weight = weights
    q_weights = q_weight.float().expand(heads, -1)
    k_weights = k_weight.float().expand(kv_heads, -1)
    return torch.cat([q_weights, k_weights])


def qk_norm_rope_backward_reference(
    gradients: Gradients,
    before: Tensor,
    weights: Weights,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    quantizer: Quantizer | None,
    weight_grad: bool = True,
) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
    """Return (gradient of the packed projection, gradients of the two weights).

    `before`: result of the forward.
    `quantizer`: quantizer of the packed gradient. Without one, it has the dtype of `gradients`.
    `weight_grad`: without it, the second result is ().
    """
    d_q, d_k, d_v = gradients
    heads = d_q.shape[2]
    kv_heads = d_k.shape[2]
    x_hat, rstd = _normalized(before.view(*d_q.shape[:2], heads + kv_heads, -1), eps)
    d_n = torch.cat([rope_reference(d.float(), cos, -sin) for d in (d_q, d_k)], dim=2)
    g = d_n * _weight_of_heads(weights, heads, kv_heads)
    d_x = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    d_qkv = torch.cat((d_x, d_v.float()), dim=2).flatten(2).flatten(0, 1)
    d_weights: tuple[Tensor, ...] = ()
    if weight_grad:
        d_w_q, d_w_k = (d_n * x_hat).flatten(0, 1).split([heads, kv_heads], dim=1)
        q_weight, k_weight = weights
        d_weights = (
            d_w_q.sum((0, 1)).to(q_weight.dtype),
            d_w_k.sum((0, 1)).to(k_weight.dtype),
        )
    return quantize_reference(d_qkv if quantizer else d_qkv.to(d_q.dtype), quantizer), d_weights


@triton.jit
def _head_rstd(first, second, EPS: tl.constexpr, HALF: tl.constexpr):
    """Return rstd of one head of R rows, fp32 [R, 1].

    `first`, `second`: the halves of x, fp32 [R, HALF].
    """
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]


@triton.jit
def _load_x_hat(x_ptr, mask, EPS: tl.constexpr, HALF: tl.constexpr):
    """Load one head of R rows and return (first and second half of x_hat, rstd), all fp32.

    `x_ptr`: [R, HALF], pointers to the first half.

    The halves are [R, HALF], rstd is [R, 1].
    """
    first, second = load_halves(x_ptr, mask, HALF)
    rstd = _head_rstd(first, second, EPS, HALF)
    return first * rstd, second * rstd, rstd


@triton.jit
def _head_norm_gradient(g_first, g_second, x_hat_first, x_hat_second, rstd, HALF: tl.constexpr):
    """Return both halves of rstd * (g - x_hat * mean(g * x_hat)), the gradient of one head.

    Both halves of g, x_hat and the result are fp32 [R, HALF]. rstd is fp32 [R, 1].
    """
    products = tl.sum(g_first * x_hat_first, 1) + tl.sum(g_second * x_hat_second, 1)
    mean = (products / (2 * HALF))[:, None]
    return rstd * (g_first - x_hat_first * mean), rstd * (g_second - x_hat_second * mean)


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    before_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    num_pairs,
    sequence,
    heads,
    kv_heads,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize and rotate BLOCK (row, head) pairs, in memory order as in kernels/rope.py.

    One program per such block.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = pair // (heads + kv_heads)
    head = pair % (heads + kv_heads)
    column = tl.arange(0, HALF)
    mask = (pair < num_pairs)[:, None] & (column < HALF)[None, :]
    first_ptr = (
        qkv_ptr
        + (row.to(tl.int64) * (heads + 2 * kv_heads) + head)[:, None] * (2 * HALF)
        + column[None, :]
    )
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0)
    if before_ptr is not None:
        kept_ptr = before_ptr + pair.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
        tl.store(kept_ptr, first, mask=mask)
        tl.store(kept_ptr + HALF, second, mask=mask)
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    rstd = _head_rstd(first, second, EPS, HALF)
    # Chooses between values, because a choice between pointers does not compile for AMD.
    of_query = (head < heads)[:, None]
    q_first = tl.load(q_weight_ptr + column)[None, :]
    q_second = tl.load(q_weight_ptr + HALF + column)[None, :]
    k_first = tl.load(k_weight_ptr + column)[None, :]
    k_second = tl.load(k_weight_ptr + HALF + column)[None, :]
    first *= rstd * tl.where(of_query, q_first, k_first).to(tl.float32)
    second *= rstd * tl.where(of_query, q_second, k_second).to(tl.float32)
    angle = (row % sequence)[:, None] * HALF + column[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    tl.store(first_ptr, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=mask)


def qk_norm_rope_settings(arch: str, half: int) -> Tile:
    """Return the kernel's tile: its rows are (row, head) pairs, its columns half of a head."""
    return Tile(rows=16, columns=half, warps=4)


def qk_norm_rope_triton_(
    qkv: Tensor,
    weights: Weights,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    keep: bool,
) -> Tensor | None:
    """Triton version of `qk_norm_rope_reference_`. head_dim must be a power of two.

    All tensors must be contiguous. Reads 2 bytes and writes 2 per element, or 4 with `keep`.
    """
    assert_contiguous("the head norms", qkv, *weights, cos, sin)
    sequence, half = cos.shape
    num_pairs = qkv.shape[0] * (heads + kv_heads)
    before = qkv.new_empty(qkv.shape[0], (heads + kv_heads) * 2 * half) if keep else None
    tile = qk_norm_rope_settings(architecture(qkv.device), half)
    _qk_norm_rope_kernel[(triton.cdiv(num_pairs, tile.rows),)](
        qkv,
        before,
        *weights,
        cos,
        sin,
        num_pairs,
        sequence,
        heads,
        kv_heads,
        eps,
        half,
        tile.rows,
        **tile.options,
    )
    return before


@triton.jit
def _qk_norm_rope_backward_kernel(
    d_ptr,
    before_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    d_qkv_ptr,
    columnwise_ptr,
    d_weight_ptr,
    state_ptr,
    num_rows,
    sequence,
    batch_stride,
    position_stride,
    head_stride,
    first_head,
    rotated_heads,
    all_heads,
    EPS: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    REPEATS: tl.constexpr,
):
    """Compute the packed gradient of REPEATS x BLOCK_ROWS rows of one head. One program each.

    `d_ptr`: the gradient of the queries, of the keys or, if `weight_ptr` is None, of the values.
    `first_head`: index of its first head in the packed projection.
    `d_weight_ptr`: fp32 [heads, programs of a head, head_dim], the partial sum of each program.
    """
    head = first_head + tl.program_id(0)
    column = tl.arange(0, HALF)
    d_w_first = tl.zeros((HALF,), tl.float32)
    d_w_second = tl.zeros((HALF,), tl.float32)
    for block in tl.range(REPEATS):
        row = (tl.program_id(1) * REPEATS + block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None] & (column < HALF)[None, :]
        batch = (row // sequence).to(tl.int64)
        position = (row % sequence).to(tl.int64)
        row = row.to(tl.int64)
        offset = batch * batch_stride + position * position_stride
        head_ptr = d_ptr + tl.program_id(0).to(tl.int64) * head_stride
        first_ptr = head_ptr + offset[:, None] + column[None, :]
        first, second = load_halves(first_ptr, mask, HALF)
        if weight_ptr is not None:
            d_n_first, d_n_second = rotate_back(
                first, second, cos_ptr, sin_ptr, position, column, mask, HALF
            )
            x_ptr = (
                before_ptr + (row * rotated_heads + head)[:, None] * (2 * HALF) + column[None, :]
            )
            x_hat_first, x_hat_second, rstd = _load_x_hat(x_ptr, mask, EPS, HALF)
            d_w_first += tl.sum(d_n_first * x_hat_first, 0)
            d_w_second += tl.sum(d_n_second * x_hat_second, 0)
            g_first = d_n_first * tl.load(weight_ptr + column).to(tl.float32)[None, :]
            g_second = d_n_second * tl.load(weight_ptr + HALF + column).to(tl.float32)[None, :]
            first, second = _head_norm_gradient(
                g_first, g_second, x_hat_first, x_hat_second, rstd, HALF
            )
        out_column = head * (2 * HALF) + column
        num_columns = all_heads * (2 * HALF)
        store_halves(
            first,
            second,
            row,
            out_column,
            mask,
            d_qkv_ptr,
            columnwise_ptr,
            num_rows,
            num_columns,
            state_ptr,
            MODE,
            LARGEST,
        )
    if d_weight_ptr is not None and MODE != AMAX_ONLY:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        partial_ptr = d_weight_ptr + program * (2 * HALF) + column
        tl.store(partial_ptr, d_w_first)
        tl.store(partial_ptr + HALF, d_w_second)


def qk_norm_rope_backward_settings(arch: str, half: int) -> Tile:
    """Return the kernel's tile: its columns are half of a head.

    A program does both halves of `repeats` tiles of rows: 16 on an H200.
    """
    return Tile(rows=16, columns=half, warps=4, repeats=row_repeats(arch, 16))


def _partial_sums(gradients: Gradients, programs: int) -> list[Tensor]:
    """Return uninitialized partial sums of d_w of the queries' and of the keys' norm.

    They are fp32 [heads, programs, head_dim] and fp32 [kv_heads, programs, head_dim].
    """
    partials = []
    for gradient in gradients[:2]:
        _, _, heads, head_dim = gradient.shape
        partials.append(gradient.new_empty(heads, programs, head_dim, dtype=torch.float32))
    return partials


def _weight_gradients(partials: list[Tensor], weights: Weights) -> tuple[Tensor, ...]:
    """Return the gradient of each weight, [head_dim] in its dtype, or () without partial sums."""
    return tuple(
        partial.sum((0, 1)).to(weight.dtype)
        for partial, weight in zip(partials, weights, strict=False)
    )


def qk_norm_rope_backward_triton(
    gradients: Gradients,
    before: Tensor,
    weights: Weights,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    quantizer: Quantizer | None,
    weight_grad: bool = True,
) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
    """Triton version of `qk_norm_rope_backward_reference`. Reads 4 bytes per element.

    `gradients` must be contiguous along head_dim, and may have any other strides.

    Programs write partial sums of d_w, which torch adds up, with the same bits in every run.
    """
    assert_contiguous_heads(*gradients)
    assert_contiguous("the head norms' backward", before, *weights, cos, sin)
    batch, sequence, heads, head_dim = gradients[0].shape
    kv_heads = gradients[1].shape[2]
    num_rows = batch * sequence
    all_heads = heads + 2 * kv_heads
    tile = qk_norm_rope_backward_settings(architecture(before.device), head_dim // 2)
    repeats = min(tile.repeats, triton.cdiv(num_rows, tile.rows))
    programs = triton.cdiv(num_rows, tile.rows * repeats)
    partials = _partial_sums(gradients, programs) if weight_grad else []
    state, largest = state_and_largest(quantizer)

    def launch(out: QuantizedTensor, mode: tl.constexpr) -> None:
        sums = (*partials, None) if weight_grad else (None, None, None)
        launches = zip(gradients, (*weights, None), sums, (0, heads, heads + kv_heads), strict=True)
        for gradient, weight, partial, first_head in launches:
            _qk_norm_rope_backward_kernel[(gradient.shape[2], programs)](
                gradient,
                before,
                weight,
                cos,
                sin,
                out.rowwise,
                out.columnwise,
                partial,
                state,
                num_rows,
                sequence,
                *gradient.stride()[:3],
                first_head,
                heads + kv_heads,
                all_heads,
                eps,
                mode,
                largest,
                head_dim // 2,
                tile.rows,
                repeats,
                **tile.options,
            )

    size = (num_rows, all_heads * head_dim)
    quantized = quantize_with(quantizer, size, before, launch, tiled=True)
    return quantized, _weight_gradients(partials, weights)


@dataclass(frozen=True)
class QkNormEngine:
    """The functions of this file in one of their two implementations."""

    norm_rope_: Callable[
        [Tensor, Weights, float, Tensor, Tensor, int, int, bool],
        Tensor | None,
    ]
    norm_rope_backward: Callable[
        [Gradients, Tensor, Weights, float, Tensor, Tensor, Quantizer | None, bool],
        tuple[QuantizedTensor, tuple[Tensor, ...]],
    ]


IMPLEMENTATIONS = {
    "reference": QkNormEngine(qk_norm_rope_reference_, qk_norm_rope_backward_reference),
    "triton": QkNormEngine(qk_norm_rope_triton_, qk_norm_rope_backward_triton),
}
