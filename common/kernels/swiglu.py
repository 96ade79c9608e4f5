"""SwiGLU (Shazeer, arXiv:2002.05202): h = silu(gate) * up, with silu(z) = z * s and s = sigmoid(z).

Backward, for the upstream gradient dh: d_up = dh * z * s;  d_gate = dh * up * s * (1 + z * (1 - s)).

Triton, because Inductor writes the backward as a concatenation whose two halves are both computed for every element: on an
H200, 8,192 tokens and ffn 14,336, 1.18 ms where the bytes cost 0.34 ms (docs/log.md).
"""

from __future__ import annotations

from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from common.kernels.fp8 import (
    AMAX_FLOOR,
    PLAIN,
    STORE,
    QuantizedTensor,
    Quantizer,
    fill_columnwise,
    fp8_dtypes,
    launch_modes,
    new_quantized,
    quantize_reference,
    quantize_with,
    store_quantized,
    tile_mask,
)

BLOCK = 1024  # columns of one program: 2 KiB of bf16 from each half of a row
NUM_WARPS = 4
BLOCK_ROW, NUM_WARPS_ROW = 2048, 8  # of the kernel that takes a whole row


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 * ffn], gate first; result [..., ffn] in the same dtype, computed in fp32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


@triton.jit
def _swiglu_forward_kernel(gate_up_ptr, out_ptr, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 2**31 elements are reached at 74,898 tokens of ffn 14,336
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < ffn
    gate = tl.load(gate_up_ptr + row * 2 * ffn + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * ffn + ffn + column, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * ffn + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(d_out_ptr, gate_up_ptr, d_gate_up_ptr, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < ffn
    d_out = tl.load(d_out_ptr + row * ffn + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * 2 * ffn + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * ffn + ffn + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = d_out * up * s * (1.0 + gate * (1.0 - s))
    d_up = d_out * gate * s
    tl.store(d_gate_up_ptr + row * 2 * ffn + column, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(d_gate_up_ptr + row * 2 * ffn + ffn + column, d_up.to(d_gate_up_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("mlperf_llama::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor) -> Tensor:
    ffn = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], ffn)
    grid = (gate_up.numel() // (2 * ffn), triton.cdiv(ffn, BLOCK))
    _swiglu_forward_kernel[grid](gate_up, out, ffn, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@torch.library.custom_op("mlperf_llama::swiglu_backward", mutates_args=())
def _swiglu_backward(d_out: Tensor, gate_up: Tensor) -> Tensor:
    ffn = gate_up.shape[-1] // 2
    d_out, gate_up = d_out.contiguous(), gate_up.contiguous()
    d_gate_up = torch.empty_like(gate_up)
    grid = (gate_up.numel() // (2 * ffn), triton.cdiv(ffn, BLOCK))
    _swiglu_backward_kernel[grid](d_out, gate_up, d_gate_up, ffn, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return d_gate_up


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_swiglu_backward.register_fake
def _(d_out: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _save_input(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_out: Tensor) -> Tensor:
    return _swiglu_backward(d_out, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_save_input)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """As `swiglu_reference`, one kernel forward and one backward; saves gate_up only."""
    return _swiglu(gate_up)


# The same with its input kept for backward in 8 bits, one scale per row and half: 57 KB instead of 115 KB per token and layer of
# Llama 2 70B. The forward result is untouched; the gradient sees gate and up rounded to e4m3 (some 31 dB), as in AMD's and NVIDIA's
# MLPerf v5.1 submissions.


def quantize_rows_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, 2 * ffn] -> (e4m3 of the same shape, fp32 [rows, 2]: amax / max of e4m3 for each half): value = stored * scale."""
    dtype = fp8_dtypes(gate_up.device)[0]
    halves = gate_up.float().unflatten(-1, (2, -1))
    scale = halves.abs().amax(-1).clamp(min=AMAX_FLOOR) / torch.finfo(dtype).max
    largest = torch.finfo(dtype).max
    return (halves / scale[..., None]).clamp(-largest, largest).to(dtype).flatten(-2), scale


class _StoredInFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(*quantize_rows_reference(gate_up.flatten(0, -2)))
        return swiglu_reference(gate_up)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        stored, scale = ctx.saved_tensors
        gate_up = (stored.float().unflatten(-1, (2, -1)) * scale[..., None]).flatten(-2)
        with torch.enable_grad():
            gate_up.requires_grad_()
            swiglu_reference(gate_up).backward(d_out.flatten(0, -2).float())
        return gate_up.grad.view(*d_out.shape[:-1], -1).to(d_out.dtype)


def swiglu_fp8_reference(gate_up: Tensor) -> Tensor:
    """As `swiglu_reference`; backward sees gate_up as e4m3 kept it."""
    return _StoredInFp8.apply(gate_up)


@triton.jit
def _swiglu_forward_fp8_kernel(
    gate_up_ptr, out_ptr, stored_ptr, scale_ptr, ffn: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: a pass for both amaxes, a second one, out of the L2 cache, for the result and the 8-bit copy."""
    row = tl.program_id(0).to(tl.int64)
    gate_up_ptr += row * 2 * ffn
    gate_amax = tl.zeros((BLOCK,), tl.float32)
    up_amax = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, ffn, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < ffn
        gate_amax = tl.maximum(gate_amax, tl.abs(tl.load(gate_up_ptr + column, mask=mask, other=0.0).to(tl.float32)))
        up_amax = tl.maximum(up_amax, tl.abs(tl.load(gate_up_ptr + ffn + column, mask=mask, other=0.0).to(tl.float32)))
    gate_scale = tl.maximum(tl.max(gate_amax, 0), FLOOR) / LARGEST
    up_scale = tl.maximum(tl.max(up_amax, 0), FLOOR) / LARGEST
    tl.store(scale_ptr + row * 2, gate_scale)
    tl.store(scale_ptr + row * 2 + 1, up_scale)
    for start in range(0, ffn, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < ffn
        gate = tl.load(gate_up_ptr + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + ffn + column, mask=mask, other=0.0).to(tl.float32)
        out = gate * tl.sigmoid(gate) * up
        tl.store(out_ptr + row * ffn + column, out.to(out_ptr.dtype.element_ty), mask=mask)
        gate = tl.minimum(tl.maximum(gate / gate_scale, -LARGEST), LARGEST)
        up = tl.minimum(tl.maximum(up / up_scale, -LARGEST), LARGEST)
        tl.store(stored_ptr + row * 2 * ffn + column, gate.to(stored_ptr.dtype.element_ty), mask=mask)
        tl.store(stored_ptr + row * 2 * ffn + ffn + column, up.to(stored_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_fp8_kernel(d_out_ptr, stored_ptr, scale_ptr, d_gate_up_ptr, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < ffn
    d_out = tl.load(d_out_ptr + row * ffn + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(stored_ptr + row * 2 * ffn + column, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr + row * 2)
    up = tl.load(stored_ptr + row * 2 * ffn + ffn + column, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr + row * 2 + 1)
    s = tl.sigmoid(gate)
    d_gate = d_out * up * s * (1.0 + gate * (1.0 - s))
    d_up = d_out * gate * s
    tl.store(d_gate_up_ptr + row * 2 * ffn + column, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(d_gate_up_ptr + row * 2 * ffn + ffn + column, d_up.to(d_gate_up_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("mlperf_llama::swiglu_fp8", mutates_args=())
def _swiglu_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ffn, dtype = gate_up.shape[-1] // 2, fp8_dtypes(gate_up.device)[0]
    gate_up = gate_up.contiguous()
    rows = gate_up.numel() // (2 * ffn)
    out = gate_up.new_empty(*gate_up.shape[:-1], ffn)
    stored = torch.empty_like(gate_up, dtype=dtype)
    scale = gate_up.new_empty(rows, 2, dtype=torch.float32)
    largest = torch.finfo(dtype).max
    _swiglu_forward_fp8_kernel[(rows,)](
        gate_up, out, stored, scale, ffn, LARGEST=largest, FLOOR=AMAX_FLOOR, BLOCK=BLOCK_ROW, num_warps=NUM_WARPS_ROW
    )
    return out, stored, scale


@torch.library.custom_op("mlperf_llama::swiglu_fp8_backward", mutates_args=())
def _swiglu_fp8_backward(d_out: Tensor, stored: Tensor, scale: Tensor) -> Tensor:
    ffn = stored.shape[-1] // 2
    d_out = d_out.contiguous()
    d_gate_up = torch.empty_like(stored, dtype=d_out.dtype)
    grid = (stored.numel() // (2 * ffn), triton.cdiv(ffn, BLOCK))
    _swiglu_backward_fp8_kernel[grid](d_out, stored, scale, d_gate_up, ffn, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return d_gate_up


@_swiglu_fp8.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = gate_up.numel() // gate_up.shape[-1]
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return out, torch.empty_like(gate_up, dtype=fp8_dtypes(gate_up.device)[0]), gate_up.new_empty(rows, 2, dtype=torch.float32)


@_swiglu_fp8_backward.register_fake
def _(d_out: Tensor, stored: Tensor, scale: Tensor) -> Tensor:
    return d_out.new_empty(stored.shape)


def _save_fp8(ctx, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, stored, scale = output
    ctx.mark_non_differentiable(stored, scale)
    ctx.save_for_backward(stored, scale)


def _backward_fp8(ctx, d_out: Tensor, d_stored: None, d_scale: None) -> Tensor:
    return _swiglu_fp8_backward(d_out, *ctx.saved_tensors)


_swiglu_fp8.register_autograd(_backward_fp8, setup_context=_save_fp8)


def swiglu_fp8_triton(gate_up: Tensor) -> Tensor:
    """As `swiglu_fp8_reference`; the result and the 8-bit copy come from one kernel."""
    return _swiglu_fp8(gate_up)[0]


# [kernels][input kept in 8 bits]
ENGINES = {
    "reference": {False: swiglu_reference, True: swiglu_fp8_reference},
    "triton": {False: swiglu_triton, True: swiglu_fp8_triton},
}


# The operands of FP8 products: h and the gradient of gate_up leave their kernels in FP8, in both layouts, with one scale per tensor.
# What the backward reads is gate_up itself or, half as large, gate_up in the FP8 of a quantizer of its own.

TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 64, 64, 4
TILE_ROWS_BACKWARD, TILE_COLUMNS_BACKWARD, TILE_WARPS_BACKWARD = 32, 64, 4  # of 19 tried on an H200 the fastest (docs/log.md)


def swiglu_operand_reference(
    gate_up: Tensor, quantizer: Quantizer | None, stored: Quantizer | None = None
) -> tuple[QuantizedTensor, Tensor | QuantizedTensor]:
    """gate_up: [rows, 2 * ffn], gate first -> (h [rows, ffn] as `quantizer` says, what backward needs of gate_up, as `stored` says).

    Without `quantizer` h is in gate_up's dtype; without `stored` gate_up itself is kept.
    """
    h = quantize_reference(swiglu_reference(gate_up.float() if quantizer else gate_up), quantizer)
    return h, quantize_reference(gate_up, stored) if stored else gate_up


def swiglu_operand_backward_reference(d_h: Tensor, kept: Tensor | QuantizedTensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """d_h: [rows, ffn], `kept` of the forward -> the gradient of gate_up, [rows, 2 * ffn]. Without `quantizer` in d_h's dtype."""
    if isinstance(kept, QuantizedTensor):
        assert kept.scale is not None
        kept = kept.rowwise.float() * kept.scale
    gate, up = kept.float().chunk(2, dim=1)
    s = torch.sigmoid(gate)
    d_gate_up = torch.cat((d_h.float() * up * s * (1 + gate * (1 - s)), d_h.float() * gate * s), dim=1)
    return quantize_reference(d_gate_up if quantizer else d_gate_up.to(d_h.dtype), quantizer)


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)), with 1 / y as rsqrt(y)^2: 5 instructions, exact to a few ulp.

    tl.sigmoid is 13 on NVIDIA and 25 on AMD, most of them for a division at the edges of fp32's range; with those a kernel of this
    file has more to issue than to move.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def _swiglu_operand_kernel(
    gate_up_ptr, rows_ptr, state_ptr, kept_ptr, kept_state_ptr, num_rows,
    ffn: tl.constexpr, MODE: tl.constexpr, LARGEST: tl.constexpr, KEPT_MODE: tl.constexpr, KEPT_LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = tile_mask(row, column, num_rows, ffn, BLOCK_COLUMNS)
    gate_ptr = gate_up_ptr + row[:, None] * (2 * ffn) + column[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + ffn, mask=mask, other=0.0).to(tl.float32)
    if kept_ptr is not None:
        store_quantized(gate, row, column, mask, kept_ptr, 2 * ffn, kept_state_ptr, KEPT_MODE, KEPT_LARGEST)
        store_quantized(up, row, column + ffn, mask, kept_ptr, 2 * ffn, kept_state_ptr, KEPT_MODE, KEPT_LARGEST)
    h = gate * _sigmoid(gate) * up
    store_quantized(h, row, column, mask, rows_ptr, ffn, state_ptr, MODE, LARGEST)


@triton.jit
def _swiglu_operand_backward_kernel(
    d_h_ptr, kept_ptr, kept_scale_ptr, rows_ptr, state_ptr, num_rows,
    ffn: tl.constexpr, MODE: tl.constexpr, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = tile_mask(row, column, num_rows, ffn, BLOCK_COLUMNS)
    d_h = tl.load(d_h_ptr + row[:, None] * ffn + column[None, :], mask=mask, other=0.0).to(tl.float32)
    gate_ptr = kept_ptr + row[:, None] * (2 * ffn) + column[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + ffn, mask=mask, other=0.0).to(tl.float32)
    if kept_scale_ptr is not None:
        scale = tl.load(kept_scale_ptr)
        gate *= scale
        up *= scale
    s = _sigmoid(gate)
    d_h_s = d_h * s
    d_gate = d_h_s * up * (1.0 + gate * (1.0 - s))
    d_up = d_h_s * gate
    store_quantized(d_gate, row, column, mask, rows_ptr, 2 * ffn, state_ptr, MODE, LARGEST)
    store_quantized(d_up, row, column + ffn, mask, rows_ptr, 2 * ffn, state_ptr, MODE, LARGEST)


def _arguments(quantizer: Quantizer | None) -> tuple[Tensor | None, float]:
    """What a kernel needs to know of a quantizer: its state, LARGEST."""
    return (quantizer.state, quantizer.largest) if quantizer else (None, 0.0)


def swiglu_operand_triton(
    gate_up: Tensor, quantizer: Quantizer | None, stored: Quantizer | None = None
) -> tuple[QuantizedTensor, Tensor | QuantizedTensor]:
    """As `swiglu_operand_reference`; gate_up contiguous, `stored` not transposed.

    h and the kept copy come from the same launches: one, or two where a quantizer wants its amax first.
    """
    assert not (stored and stored.transposed), "no product reads the kept copy: a transposed one is not written"
    num_rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    grid = (triton.cdiv(ffn, TILE_COLUMNS), triton.cdiv(num_rows, TILE_ROWS))
    h = new_quantized(quantizer, (num_rows, ffn), gate_up)
    kept = new_quantized(stored, (num_rows, 2 * ffn), gate_up) if stored else None
    state, largest = _arguments(quantizer)
    kept_rows = kept.rowwise if kept else None
    kept_state, kept_largest = _arguments(stored)
    # Where one of the two needs two passes and the other one, the second pass stores the other's same bytes again.
    again = STORE if quantizer else PLAIN
    for mode, kept_mode in zip_longest(launch_modes(quantizer), launch_modes(stored), fillvalue=again):
        _swiglu_operand_kernel[grid](
            gate_up, h.rowwise, state, kept_rows, kept_state, num_rows, ffn,
            mode, largest, kept_mode, kept_largest, TILE_ROWS, TILE_COLUMNS, num_warps=TILE_WARPS,
        )  # fmt: skip
    fill_columnwise(h)
    return h, gate_up if kept is None else kept


def swiglu_operand_backward_triton(d_h: Tensor, kept: Tensor | QuantizedTensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """As `swiglu_operand_backward_reference`; all contiguous."""
    num_rows, ffn = d_h.shape
    kept_rows, kept_scale = (kept.rowwise, kept.scale) if isinstance(kept, QuantizedTensor) else (kept, None)
    grid = (triton.cdiv(ffn, TILE_COLUMNS_BACKWARD), triton.cdiv(num_rows, TILE_ROWS_BACKWARD))

    def launch(operand: QuantizedTensor, mode: tl.constexpr) -> None:
        _swiglu_operand_backward_kernel[grid](
            d_h, kept_rows, kept_scale, operand.rowwise, _arguments(quantizer)[0], num_rows, ffn,
            mode, _arguments(quantizer)[1], TILE_ROWS_BACKWARD, TILE_COLUMNS_BACKWARD, num_warps=TILE_WARPS_BACKWARD,
        )  # fmt: skip

    return quantize_with(quantizer, (num_rows, 2 * ffn), d_h, launch)
