"""The adapter's way down with dropout on its input: T = D(x) A^T, where D zeroes each element with probability p and scales by 1/(1-p).

Backward, for the upstream gradient dT:  dA = dT^T D(x);  dx = D(dT A), with the same mask.

The mask is a function of (seed, element number), Philox in Triton, and is made again wherever it is needed: nothing is saved but x,
which the layer keeps anyway. Plain dropout under torch.compile keeps D(x) of both adapters of a layer: 33 of 249 KB per token of Llama 2 70B (docs/log.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1024
NUM_WARPS = 4


def lora_down_reference(x: Tensor, lora_a: Tensor, p: float) -> Tensor:
    """x: [..., in], lora_a: [rank, in] in x's dtype; result [..., rank]. The mask comes from torch's generator."""
    return F.linear(F.dropout(x, p), lora_a)


@triton.jit
def _dropout_kernel(x_ptr, out_ptr, seed_ptr, num_elements, p, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    keep = tl.rand(tl.load(seed_ptr), offset) >= p
    out = tl.where(keep, x / (1.0 - p), 0.0)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """D(x) with the mask of `seed`, int64 [1] on x's device."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, seed, x.numel(), p, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@torch.library.custom_op("mlperf_llama::lora_down", mutates_args=())
def _lora_down(x: Tensor, lora_a: Tensor, seed: Tensor, p: float) -> Tensor:
    return F.linear(dropout(x, seed, p), lora_a)


@torch.library.custom_op("mlperf_llama::lora_down_backward", mutates_args=())
def _lora_down_backward(d_out: Tensor, x: Tensor, lora_a: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    d_lora_a = d_out.flatten(0, -2).t() @ dropout(x, seed, p).flatten(0, -2)
    return dropout(d_out @ lora_a, seed, p), d_lora_a


@_lora_down.register_fake
def _(x: Tensor, lora_a: Tensor, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], lora_a.shape[0])


@_lora_down_backward.register_fake
def _(d_out: Tensor, x: Tensor, lora_a: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(lora_a)


def _save(ctx, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
    x, lora_a, seed, ctx.p = inputs
    ctx.save_for_backward(x, lora_a, seed)


def _backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
    d_x, d_lora_a = _lora_down_backward(d_out, *ctx.saved_tensors, ctx.p)
    return d_x, d_lora_a, None, None


_lora_down.register_autograd(_backward, setup_context=_save)


def lora_down_triton(x: Tensor, lora_a: Tensor, p: float) -> Tensor:
    """As `lora_down_reference` in distribution; the seed of the mask is drawn from torch's generator of x's device."""
    seed = torch.randint(0, 2**31 - 1, (1,), dtype=torch.int64, device=x.device)
    return _lora_down(x, lora_a, seed, p)


ENGINES = {"reference": lora_down_reference, "triton": lora_down_triton}
