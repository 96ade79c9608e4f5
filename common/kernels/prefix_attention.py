"""Attention of the last queries of a sequence to all its keys, by kernels without such a mask.

The keys are a prefix, which every query sees whole, and as many keys as there are queries, with the
usual causal mask. Both parts are computed apart and merged by their log-sum-exps, as in ring
attention (Liu et al., arXiv:2310.01889):

    lse = log(exp(lse_1) + exp(lse_2));   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

A flash kernel's backward computes the probabilities from the log-sum-exp that it is given. With
that of all keys, each part's backward gives its part of the gradients. Without a prefix, there is
one part.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


class FlashKernels(Protocol):
    """Flash kernels for tensors [batch, sequence, heads, head_dim], with or without causal mask.

    The log-sum-exp is fp32 [batch, heads, queries], or with a last dimension of 1.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
        """Return (output, log-sum-exp, further arguments of the backward)."""

    def backward(
        self, d_out: Tensor, tensors: tuple[Tensor, ...], causal: bool, further: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `tensors`: q, k, v, output, log-sum-exp."""


class PrefixAttention(torch.autograd.Function):
    """Attention of q to k and v, with the last query aligned to the last key, shaped like q.

    `q`: [batch, queries, heads, head_dim].
    `k`, `v`: [batch, keys, kv_heads, head_dim], with at least as many keys as queries.
    """

    @staticmethod
    def forward(ctx: Any, kernels: FlashKernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kernels = kernels
        *prefix, (out, lse, further) = (kernels.forward(q, *part) for part in _parts(q, k, v))
        ctx.further = [further]
        for out_1, lse_1, further_1 in prefix:
            whole = torch.logaddexp(lse_1, lse)
            parts = _weight(lse_1, whole, q) * out_1, _weight(lse, whole, q) * out
            # Into tensors of the kernel, which have the strides that its backward expects.
            torch.add(*parts, out=out)
            lse.copy_(whole)
            ctx.further.insert(0, further_1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = []
        for (keys, values, causal), further in zip(_parts(q, k, v), ctx.further, strict=True):
            tensors = (q, keys, values, out, lse)
            gradients.append(ctx.kernels.backward(d_out, tensors, causal, further))
        if len(gradients) == 1:
            return None, *gradients[0]
        (d_q_1, d_k_1, d_v_1), (d_q_2, d_k_2, d_v_2) = gradients
        return None, d_q_1 + d_q_2, torch.cat([d_k_1, d_k_2], 1), torch.cat([d_v_1, d_v_2], 1)


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (keys, values, whether they are masked) of the prefix, if there is one, and of q's."""
    prefix = k.shape[1] - q.shape[1]
    own = (k[:, prefix:], v[:, prefix:], True)
    return [(k[:, :prefix], v[:, :prefix], False), own] if prefix else [own]


def _weight(part: Tensor, lse: Tensor, q: Tensor) -> Tensor:
    """Return exp(part - lse), fp32 [batch, queries, heads, 1]."""
    batch, queries, heads, _ = q.shape
    return (part - lse).exp().view(batch, heads, queries, 1).transpose(1, 2)


class TorchKernels:
    """The kernels of torch's SDPA: cuDNN's or flash kernels of a GPU, and those of a CPU."""

    def backend(self, heads: list[Tensor], causal: bool) -> SDPBackend:
        """Return the backend for q, k and v, each [batch, heads, sequence, head_dim]."""
        q, k, v = heads
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=True))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        if not q.is_cuda:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, is_causal=causal)
            return out.transpose(1, 2), lse, ()
        backend = self.backend(heads, causal)
        if backend == SDPBackend.CUDNN_ATTENTION:
            out, lse, *further, _ = aten._scaled_dot_product_cudnn_attention(
                *heads, None, True, is_causal=causal
            )
        elif backend == SDPBackend.FLASH_ATTENTION:
            out, lse, *further, _ = aten._scaled_dot_product_flash_attention(
                *heads, is_causal=causal
            )
        else:
            raise RuntimeError(f"no flash kernel takes {q.dtype} {tuple(q.shape)}")
        return out.transpose(1, 2), lse, (backend, *further)

    def backward(
        self, d_out: Tensor, tensors: tuple[Tensor, ...], causal: bool, further: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        *heads, lse = tensors
        arguments = [x.transpose(1, 2) for x in (d_out, *heads)]
        if not d_out.is_cuda:
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *arguments, lse, 0.0, causal
            )
        else:
            backend, *lengths, seed, offset = further
            if backend == SDPBackend.CUDNN_ATTENTION:
                gradients = aten._scaled_dot_product_cudnn_attention_backward(
                    *arguments, lse, seed, offset, None, *lengths, 0.0, causal
                )
            else:
                gradients = aten._scaled_dot_product_flash_attention_backward(
                    *arguments, lse, *lengths, 0.0, causal, seed, offset
                )
        d_q, d_k, d_v = (gradient.transpose(1, 2) for gradient in gradients)
        return d_q, d_k, d_v
