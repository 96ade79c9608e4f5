"""Operations of a LoRA adapter on a frozen linear layer, y = n W^T + s T B^T.

    down           T = D(n) A^T / q, with n = x * rstd * weight after a norm, else n = x
    up_            y += s T B^T
    up_backward    P = (s / q) g B;  dB = s g^T T, with g the gradient of y. With a quantizer, g is
                   also quantized.
    down_backward_ dA = P^T D(n);  d_n += D(P A)

x, n and d_n are [M, K], y and g [M, N], T and P [M, R], W [N, K], A [R, K] and B [N, R]. M is the
number of tokens and R the rank of the adapter. s is alpha / R, the argument `scale`.

D is dropout without its factor: it zeroes elements with probability 1 - q. The factor 1 / q is
applied to the result of a sum instead of to each element. Each kernel reads its large tensor once
and recomputes n and the mask in registers, so that neither is kept for the backward, which saves 33
KB per token and layer of the 70B. Programs write partial sums over rows, which a second sum adds
up, without atomics and with the same bits in every run.

The mask is a function of (seed, row, column), with the row that the token has in the whole
micro-batch if several ranks share it. It compares a 16-bit random number with the dropout
probability in steps of 2^-16 (0.1 becomes 0.10001). The generator is Philox4x32-7 (Salmon et al.,
SC 2011) with key `seed` and counter (row, column // 8, 0, 0). It yields eight such numbers; the one
at column % 8 is used. With one call per element, the generator would limit the speed instead of
memory. `keep_mask` computes the same mask in plain torch.

Another 0.5 ms of a layer's 33 ms could be saved (70B, H200): each mask is computed twice, and
`up_backward` takes twice the time of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.architecture import (
    Tile,
    architecture,
    assert_contiguous,
    pipeline_stages,
)
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.kernels.quantize import (
    UNQUANTIZED,
    quantize_reference,
    quantize_with,
    state_and_largest,
    store_quantized,
)

ROUNDS = tl.constexpr(7)  # Philox rounds: the fewest that pass BigCrush
STEPS = 1 << 16  # number of values of a random number


class Norm(NamedTuple):
    """The RMS norm before an adapter: its rstd from the forward, and its weight."""

    rstd: Tensor  # fp32, M elements
    weight: Tensor  # [K]


class Dropout(NamedTuple):
    """Dropout of an adapter's input, with probability `p` of zeroing an element."""

    seed: Tensor  # int64 [1], not negative, on the tensors' device
    p: float
    row_numbers: Tensor | None = None  # int32 [M], the row of each token in the mask; None: its own

    @property
    def threshold(self) -> int:
        """Elements whose random number is below this are zeroed."""
        return round(self.p * STEPS)

    @property
    def kept(self) -> float:
        """The probability q that an element is kept."""
        return 1.0 - self.threshold / STEPS


def kept_share(dropout: Dropout | None) -> float:
    """Return q, which is 1 without dropout."""
    return dropout.kept if dropout else 1.0


# --- plain torch


def keep_mask(rows: int, columns: int, dropout: Dropout) -> Tensor:
    """Return a mask, bool [rows, columns], that is True for elements that are kept."""
    low = 0xFFFFFFFF
    device = dropout.seed.device
    groups = -(-columns // 8)
    numbers = dropout.row_numbers
    if numbers is None:
        numbers = torch.arange(rows, device=device)
    c0 = numbers.long()[:, None].expand(rows, groups)
    c1 = torch.arange(groups, device=device)[None, :].expand(rows, groups)
    c2 = c3 = torch.zeros_like(c0)
    k0 = dropout.seed & low
    k1 = (dropout.seed >> 32) & low
    for _ in range(ROUNDS.value):
        # The product of two 32-bit numbers may wrap in int64, but its 64 bits are right.
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0 = ((b >> 32) & low) ^ c1 ^ k0
        c1 = b & low
        c2 = ((a >> 32) & low) ^ c3 ^ k1
        c3 = a & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), dim=-1)
    random = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(1)
    return random[:, :columns] >= dropout.threshold


def adapter_input(x: Tensor, norm: Norm | None, dropout: Dropout | None) -> Tensor:
    """Return D(n), [M, K] in x's dtype."""
    if norm is not None:
        x = (x.float() * norm.rstd.view(-1, 1) * norm.weight.float()).to(x.dtype)
    return _dropped(x, dropout)


def _dropped(x: Tensor, dropout: Dropout | None) -> Tensor:
    """Return D(x)."""
    if dropout is None:
        return x
    return torch.where(keep_mask(x.shape[0], x.shape[1], dropout), x, 0.0)


def down_reference(x: Tensor, norm: Norm | None, lora_a: Tensor, dropout: Dropout | None) -> Tensor:
    """Return T, [M, R], of `x` [M, K] and `lora_a` [R, K]. All three have one dtype."""
    return (adapter_input(x, norm, dropout) @ lora_a.t()) / kept_share(dropout)


def up_(y: Tensor, t: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Add scale * t lora_b^T to `y` in place and return y.

    `y`: [M, N].
    `t`: [M, R].
    `lora_b`: [N, R].
    """
    return y.addmm_(t, lora_b.t(), alpha=scale)


def up_backward_reference(
    g: Tensor,
    t: Tensor,
    lora_b: Tensor,
    scale: float,
    dropout: Dropout | None,
    quantizer: Quantizer | None,
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    """Return (P [M, R] in g's dtype, dB fp32 [N, R], g as an operand of matrix products).

    `g`: [M, N], the gradient of the layer's result.
    `t`: [M, R].
    `lora_b`: [N, R].
    `quantizer`: quantizer of g. Without one, g is returned unquantized.
    """
    p = (g @ lora_b) * (scale / kept_share(dropout))
    d_b = (g.float().t() @ t.float()) * scale
    return p, d_b, quantize_reference(g, quantizer)


def down_backward_reference_(
    d_n: Tensor, x: Tensor, norm: Norm | None, p: Tensor, lora_a: Tensor, dropout: Dropout | None
) -> Tensor:
    """Add the adapter's part of the gradient to `d_n` in place and return dA, fp32 [R, K].

    `d_n`: [M, K], the gradient of n.
    `x`, `norm`, `lora_a`, `dropout`: as in the forward.
    `p`: [M, R], from `up_backward`.
    """
    d_n += _dropped(p @ lora_a, dropout)
    return p.float().t() @ adapter_input(x, norm, dropout).float()


# --- Triton


@triton.jit
def input_tile(
    x_ptr,
    rstd_ptr,
    weight_ptr,
    seed_ptr,
    numbers_ptr,
    row,
    first_column,
    num_rows,
    num_columns,
    THRESHOLD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return a tile of D(n), 0 outside of the matrix, and the mask of elements that dropout keeps.

    The tile has the rows `row` (int64) and COLUMNS columns from `first_column`, a multiple of 8.

    Loads and stores must not use the mask: with masks that differ between neighboring elements,
    they could not be 16 bytes wide.
    """
    column = first_column + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    n = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=mask, other=0.0)
    if rstd_ptr is not None:
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        weight = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)
        n = (n.to(tl.float32) * rstd[:, None] * weight[None, :]).to(x_ptr.dtype.element_ty)
    if seed_ptr is not None:
        group = first_column // 8 + tl.arange(0, COLUMNS // 8)
        seed = tl.load(seed_ptr)
        zeros = tl.zeros((row.shape[0], COLUMNS // 8), tl.int32)
        if numbers_ptr is not None:
            number = tl.load(numbers_ptr + row, mask=row < num_rows, other=0)
        else:
            number = row.to(tl.int32)
        row_number = number[:, None] + zeros
        a, b, c, d = tl.philox(seed, row_number, group[None, :] + zeros, zeros, zeros, ROUNDS)
        words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        keep = tl.interleave(words & 0xFFFF, words >> 16) >= THRESHOLD  # as in `keep_mask`
        n = tl.where(keep, n, 0.0)
    else:
        keep = mask
    return n, keep


@triton.jit
def _down_kernel(
    x_ptr,
    rstd_ptr,
    weight_ptr,
    a_ptr,
    seed_ptr,
    numbers_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    columns_per_part,
    factor,
    THRESHOLD: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute partial sums of T for ROWS rows. A program sums over `columns_per_part` columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, BLOCK_RANK)
    part = tl.program_id(1)
    t = tl.zeros((ROWS, BLOCK_RANK), tl.float32)
    start = part * columns_per_part
    end = tl.minimum((part + 1) * columns_per_part, num_columns)
    for first in tl.range(start, end, COLUMNS, num_stages=STAGES):
        n, _ = input_tile(
            x_ptr,
            rstd_ptr,
            weight_ptr,
            seed_ptr,
            numbers_ptr,
            row,
            first,
            num_rows,
            num_columns,
            THRESHOLD,
            COLUMNS,
        )
        column = first + tl.arange(0, COLUMNS)
        a_mask = (rank < RANK)[:, None] & (column < num_columns)[None, :]
        a = tl.load(a_ptr + rank[:, None] * num_columns + column[None, :], mask=a_mask, other=0.0)
        t = tl.dot(n, tl.trans(a), t, input_precision="ieee")
    place = (part * num_rows + row)[:, None] * RANK + rank[None, :]
    tl.store(
        partial_ptr + place, t * factor, mask=(row < num_rows)[:, None] & (rank < RANK)[None, :]
    )


@triton.jit
def _up_backward_kernel(
    g_ptr,
    t_ptr,
    b_ptr,
    p_partial_ptr,
    b_partial_ptr,
    quantized_ptr,
    state_ptr,
    num_rows,
    num_columns,
    rows_per_part,
    p_factor,
    b_factor,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute partial sums of P and dB.

    A program reads COLUMNS columns x `rows_per_part` rows of g. It writes partial sum program_id(0)
    of P, and partial sum program_id(1) of dB.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, BLOCK_RANK)
    part = tl.program_id(1)
    b_mask = (column < num_columns)[:, None] & (rank < RANK)[None, :]
    b = tl.load(b_ptr + column[:, None] * RANK + rank[None, :], mask=b_mask, other=0.0)
    d_b = tl.zeros((BLOCK_RANK, COLUMNS), tl.float32)  # transposed: its rows are stored whole
    start = part * rows_per_part
    end = tl.minimum((part + 1) * rows_per_part, num_rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        t_mask = (row < num_rows)[:, None] & (rank < RANK)[None, :]
        g = tl.load(g_ptr + row[:, None] * num_columns + column[None, :], mask=mask, other=0.0)
        t = tl.load(t_ptr + row[:, None] * RANK + rank[None, :], mask=t_mask, other=0.0)
        d_b = tl.dot(tl.trans(t), g, d_b, input_precision="ieee")
        p = tl.dot(g, b, input_precision="ieee") * p_factor
        p_row = tl.program_id(0) * num_rows + row
        p_ptrs = p_partial_ptr + p_row[:, None] * RANK + rank[None, :]
        tl.store(p_ptrs, p, mask=t_mask)
        if quantized_ptr is not None:
            store_quantized(
                g.to(tl.float32),
                row,
                column,
                mask,
                quantized_ptr,
                None,
                num_rows,
                num_columns,
                state_ptr,
                MODE,
                LARGEST,
            )
    place = (part * RANK + rank)[:, None].to(tl.int64) * num_columns + column[None, :]
    tl.store(b_partial_ptr + place, d_b * b_factor, mask=tl.trans(b_mask))


@triton.jit
def _down_backward_kernel(
    d_n_ptr,
    x_ptr,
    rstd_ptr,
    weight_ptr,
    p_ptr,
    a_ptr,
    seed_ptr,
    numbers_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    rows_per_part,
    THRESHOLD: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Update d_n and compute partial sums of dA, with the same dropout mask.

    A program handles COLUMNS columns x `rows_per_part` rows of x and d_n.
    """
    first_column = tl.program_id(0) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    rank = tl.arange(0, BLOCK_RANK)
    part = tl.program_id(1)
    a_mask = (rank < RANK)[:, None] & (column < num_columns)[None, :]
    a = tl.load(a_ptr + rank[:, None] * num_columns + column[None, :], mask=a_mask, other=0.0)
    d_a = tl.zeros((BLOCK_RANK, COLUMNS), tl.float32)
    start = part * rows_per_part
    end = tl.minimum((part + 1) * rows_per_part, num_rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        p = tl.load(
            p_ptr + row[:, None] * RANK + rank[None, :],
            mask=(row < num_rows)[:, None] & (rank < RANK)[None, :],
            other=0.0,
        )
        n, keep = input_tile(
            x_ptr,
            rstd_ptr,
            weight_ptr,
            seed_ptr,
            numbers_ptr,
            row,
            first_column,
            num_rows,
            num_columns,
            THRESHOLD,
            COLUMNS,
        )
        d_a = tl.dot(tl.trans(p), n, d_a, input_precision="ieee")
        d_n_ptrs = d_n_ptr + row[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        d_n = tl.load(d_n_ptrs, mask=mask, other=0.0).to(tl.float32)
        d_n += tl.where(keep, tl.dot(p, a, input_precision="ieee"), 0.0)
        tl.store(d_n_ptrs, d_n.to(d_n_ptr.dtype.element_ty), mask=mask)
    place = (part * RANK + rank)[:, None].to(tl.int64) * num_columns + column[None, :]
    tl.store(partial_ptr + place, d_a, mask=a_mask)


# Tiles of the large tensor, [M, K] or [M, N]. With these `parts`, there are enough programs for
# every GPU if M is 8192. tests/kernels verify that no register is spilled.


def down_settings(arch: str) -> Tile:
    # On an H200 it takes 77 µs. 64 x 256 in 4 warps takes 67 µs, but spills registers on all GPUs.
    # 32 x 256 in 4 warps takes 68 µs without spills, but its results were never checked on a GPU.
    return Tile(rows=64, columns=128, warps=8, stages=pipeline_stages(arch, 3), parts=4)


def up_backward_settings(arch: str) -> Tile:
    # sm_90: the fastest of 80 tried on an H200. With three stages sm_89 spills. On gfx942, 64 rows
    # spill three registers with Triton 3.8.0, which ROCm 10 brings.
    stages = pipeline_stages(arch, 2 if arch == "sm_89" else 3)
    return Tile(32 if arch == "gfx942" else 64, 128, warps=8, stages=stages, parts=32)


def down_backward_settings(arch: str) -> Tile:
    # sm_90: the fastest of 80 tried on an H200. On gfx942, 64 rows spill with dropout and a norm.
    return Tile(
        rows=32 if arch == "gfx942" else 64,
        columns=64,
        warps=4,
        stages=pipeline_stages(arch, 3),
        parts=16,
    )


def _part_size(size: int, tile: int, parts: int) -> int:
    """Return the number of elements per partial sum, a multiple of the tile's size."""
    return triton.cdiv(triton.cdiv(size, tile), parts) * tile


def _block_rank(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))  # tl.dot requires at least 16


def _dropout_arguments(dropout: Dropout | None) -> tuple[Tensor | None, Tensor | None, int]:
    if dropout is None:
        return None, None, 0
    return dropout.seed, dropout.row_numbers, dropout.threshold


def down_triton(x: Tensor, norm: Norm | None, lora_a: Tensor, dropout: Dropout | None) -> Tensor:
    """Triton version of `down_reference`. All tensors must be contiguous."""
    assert_contiguous("the adapter", x, *(norm or ()), lora_a)
    num_rows, num_columns = x.shape
    rank = lora_a.shape[0]
    tile = down_settings(architecture(x.device))
    part_size = _part_size(num_columns, tile.columns, tile.parts)
    parts = triton.cdiv(num_columns, part_size)
    partial = x.new_empty(parts, num_rows, rank, dtype=torch.float32)
    rstd, weight = norm or (None, None)
    seed, numbers, threshold = _dropout_arguments(dropout)
    _down_kernel[(triton.cdiv(num_rows, tile.rows), parts)](
        x,
        rstd,
        weight,
        lora_a,
        seed,
        numbers,
        partial,
        num_rows,
        num_columns,
        part_size,
        1.0 / kept_share(dropout),
        threshold,
        rank,
        _block_rank(rank),
        tile.rows,
        tile.columns,
        tile.stages,
        **tile.options,
    )
    return partial.sum(0).to(x.dtype)


def up_backward_triton(
    g: Tensor,
    t: Tensor,
    lora_b: Tensor,
    scale: float,
    dropout: Dropout | None,
    quantizer: Quantizer | None,
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    """Triton version of `up_backward_reference`. All tensors must be contiguous.

    `quantizer`: must not be `transposed`. g is read once, or twice if the quantizer needs its amax
        first.
    """
    assert_contiguous("the adapter's backward", g, t, lora_b)
    assert quantizer is None or not quantizer.transposed, "the transpose is not written"
    num_rows, num_columns = g.shape
    rank = lora_b.shape[1]
    tile = up_backward_settings(architecture(g.device))
    part_size = _part_size(num_rows, tile.rows, tile.parts)
    parts = triton.cdiv(num_rows, part_size)
    column_parts = triton.cdiv(num_columns, tile.columns)
    p_partial = g.new_empty(column_parts, num_rows, rank, dtype=torch.float32)
    b_partial = g.new_empty(parts, rank, num_columns, dtype=torch.float32)
    state, largest = state_and_largest(quantizer)

    def launch(out: QuantizedTensor | None, mode: tl.constexpr) -> None:
        quantized_rowwise = out.rowwise if out else None
        _up_backward_kernel[(column_parts, parts)](
            g,
            t,
            lora_b,
            p_partial,
            b_partial,
            quantized_rowwise,
            state,
            num_rows,
            num_columns,
            part_size,
            scale / kept_share(dropout),
            scale,
            mode,
            largest,
            rank,
            _block_rank(rank),
            tile.rows,
            tile.columns,
            tile.stages,
            **tile.options,
        )

    quantized = QuantizedTensor(g)
    if quantizer:
        quantized = quantize_with(quantizer, (num_rows, num_columns), g, launch)
    else:
        launch(None, UNQUANTIZED)
    return p_partial.sum(0).to(g.dtype), b_partial.sum(0).t().contiguous(), quantized


def down_backward_triton_(
    d_n: Tensor, x: Tensor, norm: Norm | None, p: Tensor, lora_a: Tensor, dropout: Dropout | None
) -> Tensor:
    """Triton version of `down_backward_reference_`. All tensors must be contiguous."""
    assert_contiguous("the adapter's backward", d_n, x, *(norm or ()), p, lora_a)
    num_rows, num_columns = x.shape
    rank = lora_a.shape[0]
    tile = down_backward_settings(architecture(x.device))
    part_size = _part_size(num_rows, tile.rows, tile.parts)
    parts = triton.cdiv(num_rows, part_size)
    partial = x.new_empty(parts, rank, num_columns, dtype=torch.float32)
    rstd, weight = norm or (None, None)
    seed, numbers, threshold = _dropout_arguments(dropout)
    _down_backward_kernel[(triton.cdiv(num_columns, tile.columns), parts)](
        d_n,
        x,
        rstd,
        weight,
        p,
        lora_a,
        seed,
        numbers,
        partial,
        num_rows,
        num_columns,
        part_size,
        threshold,
        rank,
        _block_rank(rank),
        tile.rows,
        tile.columns,
        tile.stages,
        **tile.options,
    )
    return partial.sum(0)


@dataclass(frozen=True)
class LoraEngine:
    """The functions of this file in one of their two implementations."""

    down: Callable[[Tensor, Norm | None, Tensor, Dropout | None], Tensor]
    up_backward: Callable[
        [Tensor, Tensor, Tensor, float, Dropout | None, Quantizer | None],
        tuple[Tensor, Tensor, QuantizedTensor],
    ]
    down_backward_: Callable[[Tensor, Tensor, Norm | None, Tensor, Tensor, Dropout | None], Tensor]


IMPLEMENTATIONS = {
    "reference": LoraEngine(down_reference, up_backward_reference, down_backward_reference_),
    "triton": LoraEngine(down_triton, up_backward_triton, down_backward_triton_),
}
