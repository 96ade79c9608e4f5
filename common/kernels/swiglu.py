"""SwiGLU (Shazeer, arXiv:2002.05202): h = silu(gate) * up, with silu(z) = z * s and s = sigmoid(z).

Backward, for the upstream gradient dh: d_up = dh * z * s;  d_gate = dh * up * s * (1 + z * (1 - s)).

Triton, because Inductor writes the backward as a concatenation whose two halves are both computed for every element: on an
H200, 8,192 tokens and ffn 14,336, 1.18 ms where the bytes cost 0.34 ms (docs/log.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1024  # columns of one program: 2 KiB of bf16 from each half of a row
NUM_WARPS = 4
BLOCK_ROW, NUM_WARPS_ROW = 2048, 8  # of the kernel that takes a whole row
AMAX_FLOOR = 1e-12  # a row of zeros has a scale too


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


def fp8_dtype(device: torch.device) -> torch.dtype:
    """e4m3 as the GPU has it: FNUZ on gfx94x, OCP elsewhere."""
    fnuz = device.type == "cuda" and torch.version.hip and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94")
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def quantise_rows_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, 2 * ffn] -> (e4m3 of the same shape, fp32 [rows, 2]: amax / max of e4m3 for each half): value = stored * scale."""
    dtype = fp8_dtype(gate_up.device)
    halves = gate_up.float().unflatten(-1, (2, -1))
    scale = halves.abs().amax(-1).clamp(min=AMAX_FLOOR) / torch.finfo(dtype).max
    largest = torch.finfo(dtype).max
    return (halves / scale[..., None]).clamp(-largest, largest).to(dtype).flatten(-2), scale


class _StoredInFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(*quantise_rows_reference(gate_up.flatten(0, -2)))
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
    ffn, dtype = gate_up.shape[-1] // 2, fp8_dtype(gate_up.device)
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
    return out, torch.empty_like(gate_up, dtype=fp8_dtype(gate_up.device)), gate_up.new_empty(rows, 2, dtype=torch.float32)


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
