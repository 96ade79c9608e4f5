"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467).

    y = x * rstd * w, with rstd = 1 / sqrt(mean(x^2) + eps)

The norm is fused with the residual add before it and with the quantization of its result:

    forward    r = x + branch, rounded to their dtype
               n = r * rstd * w, computed in fp32 from the rounded r
    backward   g = d_n * w;  x_hat = r * rstd
               d_x = d_residual + rstd * (g - x_hat * mean(g * x_hat))
               d_w = sum over rows of d_n * x_hat

No element of a row can be stored before the whole row is summed. Therefore a program keeps whole
rows in registers and reads each element once. With the transposes of the results, 16,384 x 4,096
take 156 µs forward and 249 µs backward on an H200. A program that read 32 rows twice and stored
both layouts took 203 and 359 µs, with the best of 24 tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.architecture import (
    Tile,
    architecture,
    assert_contiguous,
    pipeline_stages,
    row_repeats,
)
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.kernels.quantize import (
    AMAX_ONLY,
    STORE,
    STORE_AND_RECORD,
    UNQUANTIZED,
    quantize_reference,
    quantize_with,
    raise_amax,
    state_and_largest,
    store_quantized,
    tile_mask,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of `x` [..., hidden] in its dtype, computed in fp32. `weight`: [hidden]."""
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return (x_fp32 * rstd * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, quantizer: Quantizer | None
) -> tuple[Tensor, QuantizedTensor, Tensor]:
    """Return (residual, norm of the residual, rstd).

    `x`, `branch`: [M, D]. The residual is x + branch, or x itself without a branch.
    `weight`: [D].
    `quantizer`: quantizer of the norm. Without one, the norm is in x's dtype.

    The residual and its norm are [M, D], rstd is fp32 [M].
    """
    residual = x if branch is None else x + branch
    r = residual.float()
    rstd = torch.rsqrt(r.pow(2).mean(-1) + eps)
    n = r * rstd[:, None] * weight.float()
    if quantizer is None:
        return residual, QuantizedTensor(n.to(x.dtype)), rstd
    return residual, quantize_reference(n, quantizer), rstd


def rms_norm_backward_reference(
    d_n: Tensor,
    residual: Tensor,
    rstd: Tensor,
    weight: Tensor,
    d_residual: Tensor | None,
    quantizer: Quantizer | None,
    weight_grad: bool = True,
) -> tuple[Tensor, QuantizedTensor | None, Tensor | None]:
    """Return (d_x, quantized d_x, d_weight).

    `d_n`: [M, D], the gradient of the norm.
    `residual`, `rstd`: [M, D] and fp32 [M], results of the forward.
    `weight`: [D].
    `d_residual`: [M, D], the gradient that reaches the residual without passing the norm. None: 0.
    `quantizer`: quantizer of d_x. Without one, the quantized d_x is None.
    `weight_grad`: without it, d_weight is None.

    d_x [M, D] is the gradient of the residual, rounded to d_n's dtype. The rounded values are
    quantized. d_weight is [D].
    """
    d_n_fp32 = d_n.float()
    x_hat = residual.float() * rstd[:, None]
    g = d_n_fp32 * weight.float()
    d_x = rstd[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if d_residual is not None:
        d_x = d_residual.float() + d_x
    d_x = d_x.to(d_n.dtype)
    quantized = None
    if quantizer is not None:
        quantized = quantize_reference(d_x, quantizer)
    d_weight = None
    if weight_grad:
        d_weight = (d_n_fp32 * x_hat).sum(0).to(weight.dtype)
    return d_x, quantized, d_weight


def _whole_rows(rows_of_4096: int, num_columns: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile of whole rows of `num_columns` elements.

    The tile has about as many elements as `rows_of_4096` rows of 4,096.
    """
    columns = triton.next_power_of_2(num_columns)
    return max(1, rows_of_4096 * 4096 // columns), columns


@triton.jit
def _load_once(ptr, mask):
    """Load a tile that no program reads again, and return it in fp32.

    Caches evict its lines first.
    """
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    residual_ptr,
    rstd_ptr,
    n_ptr,
    state_ptr,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add the branch to BLOCK_ROWS whole rows of x and normalize them. One program per such block.

    `rstd_ptr`: fp32 [num_rows].
    `residual_ptr`: [num_rows, NUM_COLUMNS], not written without a branch.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    mask = tile_mask(row, column, num_rows, NUM_COLUMNS, BLOCK_COLUMNS)
    offset = row[:, None] * NUM_COLUMNS + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < NUM_COLUMNS, other=0.0).to(tl.float32)
    if branch_ptr is None:
        r = tl.load(x_ptr + offset, mask=mask, other=0.0)
    else:
        x = _load_once(x_ptr + offset, mask)
        branch = _load_once(branch_ptr + offset, mask)
        r = (x + branch).to(x_ptr.dtype.element_ty)  # rounded as in torch
        if MODE != AMAX_ONLY:
            tl.store(residual_ptr + offset, r, mask=mask)
    r = r.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(r * r, 1) / NUM_COLUMNS + EPS)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    n = r * rstd[:, None] * weight[None, :]
    store_quantized(
        n, row, column, mask, n_ptr, None, num_rows, NUM_COLUMNS, state_ptr, MODE, LARGEST
    )


def add_rms_norm_settings(arch: str, num_columns: int) -> Tile:
    # sm_90: the fastest of those tried on an H200.
    rows, columns = _whole_rows(2, num_columns)
    return Tile(rows, columns, warps=8)


def add_rms_norm_triton(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, quantizer: Quantizer | None
) -> tuple[Tensor, QuantizedTensor, Tensor]:
    """Triton version of `add_rms_norm_reference`. All tensors must be contiguous.

    A launch that stores writes the norm. In bf16 it also reads 4 bytes per element and writes 2
    with a branch, or reads 2 without one.
    """
    assert_contiguous("the norm", x, branch, weight)
    num_rows, num_columns = x.shape
    residual = x if branch is None else torch.empty_like(x)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    state, largest = state_and_largest(quantizer)
    tile = add_rms_norm_settings(architecture(x.device), num_columns)

    def launch(out: QuantizedTensor, mode: tl.constexpr) -> None:
        _add_rms_norm_kernel[(triton.cdiv(num_rows, tile.rows),)](
            x,
            branch,
            weight,
            residual,
            rstd,
            out.rowwise,
            state,
            num_rows,
            num_columns,
            eps,
            mode,
            largest,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            **tile.options,
        )

    return residual, quantize_with(quantizer, (num_rows, num_columns), x, launch), rstd


@triton.jit
def _norm_gradient(g, x_hat, rstd, NUM_COLUMNS: tl.constexpr):
    """Return rstd * (g - x_hat * mean(g * x_hat)), the gradient of whole rows, fp32 [R, C].

    `g`, `x_hat`: fp32 [R, C], 0 in columns from NUM_COLUMNS on.
    `rstd`: fp32 [R].
    """
    mean = tl.sum(g * x_hat, 1) / NUM_COLUMNS
    return rstd[:, None] * (g - x_hat * mean[:, None])


@triton.jit
def _record_columns(amax, saturated, scale, state_ptr, MODE: tl.constexpr, LARGEST: tl.constexpr):
    """Record the amax of one program and its number of saturated elements, as MODE says.

    `amax`, `saturated`: fp32 [C], of each column.
    `scale`, `state_ptr`: the quantizer's scale and state, as in `store_quantized`.
    """
    if MODE != STORE and MODE != UNQUANTIZED:
        largest = tl.max(amax)
        raise_amax(largest, state_ptr)
        if MODE == STORE_AND_RECORD and largest * scale > LARGEST:
            tl.atomic_add(state_ptr + 3, tl.sum(saturated), sem="relaxed")


@triton.jit
def _rms_norm_backward_kernel(
    d_n_ptr,
    residual_ptr,
    rstd_ptr,
    weight_ptr,
    d_residual_ptr,
    d_x_ptr,
    d_weight_ptr,
    quantized_ptr,
    state_ptr,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    REPEATS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute d_x of REPEATS x BLOCK_ROWS whole rows, and d_weight's sum over them.

    `d_weight_ptr`: fp32 [programs, NUM_COLUMNS], the partial sum of each program, or None.
    `quantized_ptr`: the quantized d_x, [num_rows, NUM_COLUMNS], or None.
    """
    column = tl.arange(0, BLOCK_COLUMNS)
    d_weight = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    # The amax and the number of saturated elements are kept per column and recorded once per
    # program, which saves a sum and a load for each row.
    amax = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    saturated = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    scale = tl.load(state_ptr + 1) if MODE == STORE_AND_RECORD else 1.0
    for block in tl.range(REPEATS, num_stages=STAGES):
        first_row = (tl.program_id(0).to(tl.int64) * REPEATS + block) * BLOCK_ROWS
        row = first_row + tl.arange(0, BLOCK_ROWS)
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        mask = tile_mask(row, column, num_rows, NUM_COLUMNS, BLOCK_COLUMNS)
        offset = row[:, None] * NUM_COLUMNS + column[None, :]
        weight = tl.load(weight_ptr + column, mask=column < NUM_COLUMNS, other=0.0).to(tl.float32)
        d_n = _load_once(d_n_ptr + offset, mask)
        r = _load_once(residual_ptr + offset, mask)
        g = d_n * weight[None, :]
        x_hat = r * rstd[:, None]
        d_x = _norm_gradient(g, x_hat, rstd, NUM_COLUMNS)
        if d_residual_ptr is not None:
            d_x += _load_once(d_residual_ptr + offset, mask)
        rounded = d_x.to(d_x_ptr.dtype.element_ty)
        if MODE != AMAX_ONLY:
            tl.store(d_x_ptr + offset, rounded, mask=mask)
        d_x = rounded.to(tl.float32)  # the rounded value is quantized and recorded
        if quantized_ptr is not None and MODE != AMAX_ONLY:
            store_quantized(
                d_x,
                row,
                column,
                mask,
                quantized_ptr,
                None,
                num_rows,
                NUM_COLUMNS,
                state_ptr,
                STORE,
                LARGEST,
            )
        d_weight += tl.sum(d_n * x_hat, 0)
        if MODE != STORE and MODE != UNQUANTIZED:
            amax = tl.maximum(amax, tl.max(tl.abs(d_x), 0))
        if MODE == STORE_AND_RECORD:
            saturated += tl.sum((tl.abs(d_x) * scale > LARGEST).to(tl.float32), 0)
    _record_columns(amax, saturated, scale, state_ptr, MODE, LARGEST)
    if d_weight_ptr is not None and MODE != AMAX_ONLY:
        in_bounds = column < NUM_COLUMNS
        partial_ptr = d_weight_ptr + tl.program_id(0).to(tl.int64) * NUM_COLUMNS + column
        tl.store(partial_ptr, d_weight, mask=in_bounds)


@triton.jit
def _rms_norm_weight_grad_kernel(
    partial_ptr,
    out_ptr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add up all rows of BLOCK_COLUMNS columns of partial sums. One program per such block.

    `partial_ptr`: fp32 [num_rows, num_columns].
    `out_ptr`: [num_columns].
    """
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, num_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        total += tl.load(
            partial_ptr + row[:, None] * num_columns + column[None, :], mask=mask, other=0.0
        )
    tl.store(
        out_ptr + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < num_columns
    )


def rms_norm_backward_settings(arch: str, num_columns: int, weight_grad: bool) -> Tile:
    """Return the backward kernel's tile.

    With `weight_grad`, a program sums over several tiles of rows and writes one row of partial sums
    of d_weight.
    """
    # sm_90: the fastest of those tried on an H200. With 3 stages and 32 rows a program, 8,192 x
    # 4,096 take 98 µs instead of 117. Other GPUs: by their compute units. Not timed.
    rows, columns = _whole_rows(1, num_columns)
    return Tile(
        rows,
        columns,
        warps=8,
        stages=pipeline_stages(arch, 3) if weight_grad else 1,
        repeats=row_repeats(arch, 32) if weight_grad else 1,
    )


def rms_norm_weight_grad_settings(arch: str) -> Tile:
    return Tile(rows=64, columns=32, warps=4)


def _weight_grad(partial: Tensor, weight: Tensor) -> Tensor:
    """Return d_weight, [D] in weight's dtype, from partial sums, fp32 [programs, D]."""
    programs, num_columns = partial.shape
    d_weight = torch.empty_like(weight)
    tile = rms_norm_weight_grad_settings(architecture(partial.device))
    grid = (triton.cdiv(num_columns, tile.columns),)
    _rms_norm_weight_grad_kernel[grid](
        partial, d_weight, programs, num_columns, tile.rows, tile.columns, **tile.options
    )
    return d_weight


def rms_norm_backward_triton(
    d_n: Tensor,
    residual: Tensor,
    rstd: Tensor,
    weight: Tensor,
    d_residual: Tensor | None,
    quantizer: Quantizer | None,
    weight_grad: bool = True,
) -> tuple[Tensor, QuantizedTensor | None, Tensor | None]:
    """Triton version of `rms_norm_backward_reference`. All tensors must be contiguous.

    In bf16, a launch that stores reads 4 bytes per element, 6 with d_residual, and writes 2, in
    addition to the quantized d_x.

    d_weight has the same bits in every run: programs write partial sums, which a second kernel adds
    up. (torch's sum of 512 such rows takes 22 µs on an H200.)
    """
    assert_contiguous("the norm's backward", d_n, residual, rstd, weight, d_residual)
    num_rows, num_columns = d_n.shape
    state, largest = state_and_largest(quantizer)
    tile = rms_norm_backward_settings(architecture(d_n.device), num_columns, weight_grad)
    programs = triton.cdiv(num_rows, tile.rows * tile.repeats)
    d_x = torch.empty_like(d_n)
    partial = d_n.new_empty(programs, num_columns, dtype=torch.float32) if weight_grad else None

    def launch(out: QuantizedTensor | None, mode: tl.constexpr) -> None:
        quantized_rowwise = out.rowwise if out else None
        _rms_norm_backward_kernel[(programs,)](
            d_n,
            residual,
            rstd,
            weight,
            d_residual,
            d_x,
            partial,
            quantized_rowwise,
            state,
            num_rows,
            num_columns,
            mode,
            largest,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            REPEATS=tile.repeats,
            STAGES=tile.stages,
            **tile.options,
        )

    quantized = None
    if quantizer is None:
        launch(None, UNQUANTIZED)
    else:
        quantized = quantize_with(quantizer, (num_rows, num_columns), d_n, launch)
    d_weight = None
    if partial is not None:
        d_weight = _weight_grad(partial, weight)
    return d_x, quantized, d_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.flatten(0, -2).contiguous()
        _, normed, rstd = add_rms_norm_triton(flat, None, weight, eps, None)
        ctx.save_for_backward(flat, weight, rstd)
        return normed.rowwise.view(x.shape)

    @staticmethod
    def backward(ctx, d_n: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        d_x, _, d_weight = rms_norm_backward_triton(
            d_n.flatten(0, -2).contiguous(), x, rstd, weight, None, None, ctx.needs_input_grad[1]
        )
        return d_x.view(d_n.shape), d_weight, None


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Triton version of `rms_norm_reference`: one kernel forward, two backward.

    The second one adds up the weight's gradient, and is not launched for a frozen weight.
    If x or its gradient is not contiguous, it is copied first.
    """
    return _RMSNorm.apply(x, weight, eps)


IMPLEMENTATIONS = {"reference": rms_norm_reference, "triton": rms_norm_triton}
