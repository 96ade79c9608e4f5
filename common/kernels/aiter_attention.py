"""Causal attention by AITER, AMD's kernel library.

AITER is an optional package (common/engines.py). This code follows the source code of ROCm/aiter
v0.1.9.post1 and e4048607. We have never run it on an AMD GPU.

In the forward, `flash_attn_func` chooses the kernel. The backward calls the assembly kernel
`fmha_v3_bwd` by name, because AITER's own backward silently uses another kernel where the assembly
kernel does not fit.

dQ is summed with 32-bit atomics, AITER's default on both gfx942 and gfx950. On gfx942, 16-bit
atomics overflow at 8,192 positions (common/known_issues.toml).

Fewer queries than keys are computed in two parts (prefix_attention.py). AITER's forward aligns the
mask to the last key, but of the assembly backward its source says both that it does and that it
does not.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.kernels.prefix_attention import PrefixAttention

# Rounding of fp32 to bf16. gfx950 has no other mode; gfx942 uses this one too.
NEAREST_EVEN = 0


def require() -> None:
    """Import the package. Raises ImportError, or AttributeError if it lacks a function."""
    # The Dockerfile leaves it empty without its argument AITER, and AITER would take "" for a path.
    if os.environ.get("AITER_JIT_DIR") == "":
        del os.environ["AITER_JIT_DIR"]
    aiter = importlib.import_module("aiter")
    for function in ("flash_attn_func", "fmha_v3_bwd"):
        getattr(aiter, function)


class AiterKernels:
    """AITER's forward and backward in bf16 (see `FlashKernels`)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
        import aiter

        out, lse = aiter.flash_attn_func(
            q, k, v, causal=causal, return_lse=True, how_v3_bf16_cvt=NEAREST_EVEN
        )
        return out, lse, None

    def backward(
        self, d_out: Tensor, tensors: tuple[Tensor, ...], causal: bool, further: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        import aiter

        q, k, v, out, lse = tensors
        gradients = {
            "dq": torch.zeros_like(q),
            "dk": torch.empty_like(k),
            "dv": torch.empty_like(v),
        }
        options = {
            "is_v3_atomic_fp32": True,
            "how_v3_bf16_cvt": NEAREST_EVEN,
            "deterministic": False,
            "dropout_p": 0.0,
            "softmax_scale": q.shape[-1] ** -0.5,
            "is_causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
        }
        # Not read without dropout, but the kernel requires its address.
        random = lse.new_zeros(2, dtype=torch.int64)
        aiter.fmha_v3_bwd(
            d_out.contiguous(), q, k, v, out, lse, **options, **gradients, rng_state=random
        )
        return gradients["dq"], gradients["dk"], gradients["dv"]


# Attention in bf16, shaped like q. q: [batch, queries, heads, head_dim]; k, v: [batch, keys,
# kv_heads, head_dim].
causal_attention = partial(PrefixAttention.apply, AiterKernels())
