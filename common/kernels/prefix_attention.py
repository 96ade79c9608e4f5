"""Attention of the last queries of a sequence to all its keys, by kernels without such a mask.

The keys are a prefix, which every query sees whole, and as many keys as there are queries, with the
usual causal mask. Both parts are computed apart and merged by their log-sum-exps, as in ring
attention (Liu et al., arXiv:2310.01889):

    lse = log(exp(lse_1) + exp(lse_2));   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

A flash kernel's backward computes the probabilities from the log-sum-exp that it is given. With
that of all keys, each part's backward gives its part of the gradients.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


class AttentionKernels(Protocol):
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
    `k`, `v`: [batch, keys, kv_heads, head_dim], with more keys than queries.
    """

    @staticmethod
    def forward(ctx: Any, kernels: AttentionKernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [k.shape[1] - q.shape[1], q.shape[1]]
        parts = zip(k.split(sizes, 1), v.split(sizes, 1), (False, True), strict=True)
        (out_1, lse_1, further_1), (out_2, lse_2, further_2) = (
            kernels.forward(q, keys, values, causal) for keys, values, causal in parts
        )
        lse = torch.logaddexp(lse_1, lse_2)
        out = torch.empty_like(out_1)  # with the strides that the backward expects
        torch.add(_weight(lse_1, lse, out_1) * out_1, _weight(lse_2, lse, out_2) * out_2, out=out)
        ctx.kernels = kernels
        ctx.further = further_1, further_2
        ctx.save_for_backward(q, k, v, out, torch.empty_like(lse_1).copy_(lse))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        sizes = [k.shape[1] - q.shape[1], q.shape[1]]
        gradients = []
        parts = zip(k.split(sizes, 1), v.split(sizes, 1), (False, True), ctx.further, strict=True)
        for keys, values, causal, further in parts:
            tensors = (q, keys, values, out, lse)
            gradients.append(ctx.kernels.backward(d_out, tensors, causal, further))
        (d_q_1, d_k_1, d_v_1), (d_q_2, d_k_2, d_v_2) = gradients
        return None, d_q_1 + d_q_2, torch.cat([d_k_1, d_k_2], 1), torch.cat([d_v_1, d_v_2], 1)


def _weight(part: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Return exp(part - lse), fp32 [batch, queries, heads, 1] for `out` of these dimensions."""
    return (part - lse).exp().view(len(out), out.shape[2], out.shape[1], 1).transpose(1, 2)


class TorchKernels:
    """The kernels of torch's SDPA: cuDNN's and flash kernels of a GPU, and those of a CPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        if not q.is_cuda:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, is_causal=causal)
            return out.transpose(1, 2), lse, ()
        chosen = SDPBackend(torch._fused_sdp_choice(*heads, is_causal=causal, enable_gqa=True))
        if chosen == SDPBackend.CUDNN_ATTENTION:
            out, lse, *further, _ = aten._scaled_dot_product_cudnn_attention(
                *heads, None, True, is_causal=causal
            )
        elif chosen == SDPBackend.FLASH_ATTENTION:
            out, lse, *further, _ = aten._scaled_dot_product_flash_attention(
                *heads, is_causal=causal
            )
        else:
            raise RuntimeError(
                f"no flash kernel takes {q.dtype} {tuple(q.shape)}, {k.shape[1]} keys"
            )
        return out.transpose(1, 2), lse, (chosen, *further)

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
