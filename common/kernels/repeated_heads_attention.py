"""Causal attention by torch's flash kernels, with repeated key and value heads in the backward.

This engine is used on AMD GPUs without AITER and Transformer Engine (common/engines.py). We have
never run it on an AMD GPU. ATTENTION_ENGINE=sdpa uses grouped heads in both passes instead.

AOTriton, the library of torch's flash backend on ROCm, includes AITER's assembly kernels for the
backward. It never uses them if query heads share a key head (`RETURN_IF(args.num_head_q !=
args.num_head_k)` in aiter_bwd.cc, in all releases up to 0.13b). Therefore the backward gets K and V
repeated for each query head. dK and dV of a group are summed in fp32. The forward has grouped
heads, as in SDPA: without groups it is 2 to 3 times slower in AOTriton (aiter#2415).

Whether AOTriton then uses the assembly depends on its version, the GPU and the sequence length
(docs/gpus/README.md, "Attention on AMD GPUs"). On gfx942 with AOTriton 0.11, as in the image of the
Dockerfile, it does not at 8,192 positions: repeating costs time and memory and gains nothing.

On an H200, where torch's flash kernels are the same for both, repeating costs 4 %: 12,963 instead
of 12,437 µs for two sequences of the 8B. The gradients are as near to fp32.

The backward needs four more tensors of the size of Q, which `plan` does not count: 0.5 GiB for two
sequences of the 8B.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from common.kernels.prefix_attention import PrefixAttention, TorchKernels


def require() -> None:
    """Do nothing: torch has all functions."""


class RepeatedHeadsKernels(TorchKernels):
    """torch's flash kernels, with repeated heads in the backward."""

    def backend(self, heads: list[Tensor], causal: bool) -> SDPBackend:
        return SDPBackend.FLASH_ATTENTION

    def backward(
        self, d_out: Tensor, tensors: tuple[Tensor, ...], causal: bool, further: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = tensors
        group = q.shape[2] // k.shape[2]
        repeated = (k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))
        d_q, d_k, d_v = super().backward(
            d_out.contiguous(), (q.contiguous(), *repeated, out, lse), causal, further
        )
        return d_q, sum_of_groups(d_k, group), sum_of_groups(d_v, group)


def sum_of_groups(gradient: Tensor, group: int) -> Tensor:
    """Return the sum over each group of heads, computed in fp32.

    `gradient`: [batch, sequence, heads, head_dim].

    The result is [batch, sequence, heads / group, head_dim].
    """
    grouped = gradient.unflatten(2, (-1, group))
    return grouped.sum(3, dtype=torch.float32).to(gradient.dtype)


# Attention shaped like q. q: [batch, queries, heads, head_dim]; k, v: [batch, keys, kv_heads,
# head_dim].
causal_attention = partial(PrefixAttention.apply, RepeatedHeadsKernels())
