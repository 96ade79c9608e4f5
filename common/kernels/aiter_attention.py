"""Causal attention by AITER, AMD's kernel library: an optional package, chosen by ATTENTION_ENGINE = "aiter" in a config's [env].

Signatures and behaviour as read in ROCm/aiter v0.1.9.post1. `flash_attn_func` chooses the forward's kernel. Backward names its kernel itself,
`fmha_v3_bwd`, the assembly, since AITER's own backward takes another one without a word where that does not fit. It sums dQ with 32-bit atomics,
AITER's default on gfx942 and gfx950 alike: on gfx942 16 bits overflow at 8,192 positions (common/known_issues.toml). Never run on an AMD GPU by us.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.kernels.architecture import architecture
from common.kernels.attention import ENGINE

RELEASE = "0.1.9.post1"
FUNCTIONS = ("flash_attn_func", "fmha_v3_bwd")
NEAREST_EVEN = 0  # how fp32 becomes bf16: gfx950 has no other, gfx942 this one too


def load(device: torch.device) -> Any:
    """The package. Raises ConfigError for another engine's name, on another GPU than gfx942 and gfx950, and where the package does not have what
    is called here.
    """
    name, found, otherwise = os.environ[ENGINE], gpu(device), f"remove {ENGINE} from [env]: torch's SDPA then computes attention"
    if name != "aiter":
        raise ConfigError(f"{ENGINE} = {name!r} is no engine", 'known is "aiter"', f"write it so, or {otherwise}")
    if found not in ("gfx942", "gfx950"):
        raise ConfigError(f'{ENGINE} = "aiter" cannot be used here', f"its assembly is for gfx942 and gfx950, this is {found}", otherwise)
    try:
        import aiter

        for function in FUNCTIONS:
            getattr(aiter, function)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        why, do = f"{type(error).__name__}: {error}", f"install amd-aiter {RELEASE} or newer from github.com/ROCm/aiter, or {otherwise}"
        raise ConfigError(f'{ENGINE} = "aiter" needs AITER with {" and ".join(FUNCTIONS)}', why, do) from error
    return aiter


def gpu(device: torch.device) -> str:
    return architecture(device) if device.type == "cuda" else "no GPU"


class AiterAttention(torch.autograd.Function):
    """q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim]; in bf16; result shaped like q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        aiter = load(q.device)
        out, lse = aiter.flash_attn_func(q, k, v, causal=True, return_lse=True, how_v3_bf16_cvt=NEAREST_EVEN)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = {"dq": torch.zeros_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        options = {"is_v3_atomic_fp32": True, "how_v3_bf16_cvt": NEAREST_EVEN, "deterministic": False, "dropout_p": 0.0}
        options |= {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": True, "window_size_left": -1, "window_size_right": -1}
        random = lse.new_zeros(2, dtype=torch.int64)  # without dropout nothing reads it, but its address is taken
        load(q.device).fmha_v3_bwd(d_out.contiguous(), q, k, v, out, lse, **options, **gradients, rng_state=random)
        return gradients["dq"], gradients["dk"], gradients["dv"]
