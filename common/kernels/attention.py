"""Causal attention with grouped query heads, through torch's scaled_dot_product_attention.

On Hopper cuDNN's kernel is 1.7x faster than torch's flash backend at sequence 8192 and head size 128 (552 against 315 TFLOP/s forward, 474 against 279
backward; docs/results.md), so it comes first there. Behind flash on ROCm: docs/gpus/README.md. Other engines:
attention_engines.py. Never pass a mask: it loses the causal fast path and runs into a NaN bug of cuDNN (pytorch#196678).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import ConfigError
from common.kernels.engines import ATTENTION_ENGINE, REPEATED_HEADS, SDPA

PREFER_CK = "TORCH_ROCM_FA_PREFER_CK"  # torch's own variable


def attention_engine(device_type: str, dtype: torch.dtype) -> str:
    """Return the name of the engine: ATTENTION_ENGINE's, else repeated heads in bf16 on AMD, else SDPA."""
    on_amd = device_type == "cuda" and torch.version.hip is not None
    return os.environ.get(
        ATTENTION_ENGINE, REPEATED_HEADS if on_amd and dtype == torch.bfloat16 else SDPA
    )


def attention_backends(
    device_type: str, dtype: torch.dtype = torch.bfloat16
) -> AbstractContextManager:
    """Context for a whole run in `dtype`: the order in which SDPA tries its backends. In 16 bits on a GPU math is none: SDPA then raises.

    Raises ConfigError where ATTENTION_ENGINE asks for what this machine cannot do.
    """
    if ATTENTION_ENGINE in os.environ:
        from common.kernels.attention_engines import (
            require_engine,
        )  # imports optional packages: only where one is chosen

        require_engine(torch.device(device_type), dtype)
    if device_type == "cuda" and torch.version.hip:
        require_preferred_library()
    order = [SDPBackend.CUDNN_ATTENTION] * (device_type == "cuda" and not torch.version.hip) + [
        SDPBackend.FLASH_ATTENTION
    ]
    return sdpa_kernel(
        order if device_type == "cuda" and dtype.itemsize == 2 else [*order, SDPBackend.MATH],
        set_priority=True,
    )


def require_preferred_library() -> None:
    """Raise ConfigError if CK is preferred behind flash on ROCm, and this torch was built without it.

    torch itself takes AOTriton then, without an error (pytorch#152951).
    """
    name = str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2]
    if os.environ.get(PREFER_CK) == "1" and name.lower() != "ck":
        raise ConfigError(
            f"{PREFER_CK}=1 has no effect here",
            f"torch {torch.__version__} was built without CK's attention and would take {name}",
            f"remove {PREFER_CK}, or use a torch with CK, such as that of AMD's images",
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim]; result shaped like q."""
    engine = attention_engine(q.device.type, q.dtype)
    if engine != SDPA:
        from common.kernels.attention_engines import engine_module  # only where one is chosen

        return engine_module(engine).causal_attention(q, k, v)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)
