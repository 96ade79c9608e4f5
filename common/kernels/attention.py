"""Causal attention with grouped query heads, through torch's scaled_dot_product_attention.

On Hopper cuDNN's kernel is 1.7x faster than torch's flash backend at sequence 8192 and head size 128 (552 against 315 TFLOP/s
forward, 474 against 279 backward; docs/results.md), so it comes first there. ROCm has the flash backend alone, behind which are AOTriton's
kernels with AITER's assembly for gfx942 and gfx950, or CK's (pytorch#161754). Never pass a mask: it loses the causal fast path and runs into a
NaN bug of cuDNN (pytorch#196678).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_backends(device_type: str, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager:
    """Context for a whole run in `dtype` that fixes the order in which SDPA tries its backends.

    In 16 bits on a GPU the math backend, which writes all scores, is no choice: SDPA raises where no other can run. fp32 has no other.
    """
    flash = [SDPBackend.FLASH_ATTENTION]
    order = [SDPBackend.CUDNN_ATTENTION, *flash] if device_type == "cuda" and not torch.version.hip else flash
    return sdpa_kernel(order if device_type == "cuda" and dtype.itemsize == 2 else [*order, SDPBackend.MATH], set_priority=True)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim]; result shaped like q."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)
