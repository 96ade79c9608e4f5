"""Causal attention with grouped query heads, by torch's SDPA or another engine.

SDPA is scaled_dot_product_attention. On NVIDIA GPUs, its cuDNN backend is preferred. On an H200
this backend is 1.7x faster than the flash backend at sequence length 8,192 and head size 128: 552
against 315 TFLOP/s forward, 474 against 279 backward (docs/results.md).
docs/gpus/README.md describes the libraries behind the flash backend on ROCm. common/engines.py
lists the other engines.

Never pass a mask to SDPA: it disables the fast path for causal attention and exposes a NaN bug of
cuDNN (pytorch#196678).

Attention is not in FP8. cuDNN's FP8 forward with a bf16 backward made a step of the 8B 2.0 % faster
on an H200, but after 500 steps the loss of each of eight seeds was at least a third higher. On
Hopper, that kernel stores the output in FP8 only, probably too inexact for the backward. A forward
with a bf16 output would save less than 8 %: cuDNN's FP8 kernel takes 576 µs, and FlashAttention-4
832 µs forward and 2,525 µs backward. FlashAttention-4 4.0.0b36 refuses FP8 below sm_100. The
forward in FP8 of nvidia-cudnn-frontend 1.32.0 (BlockSparseAttnForwardFp8Sm90Blk128) has no causal
mask. On as many blocks as a causal forward has, it takes 814 µs and 72 µs for casts, and
FlashAttention-4 816 µs (2026-11-29).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import engines
from common.errors import ConfigError
from common.kernels.architecture import dtype_name, gpu_architecture
from common.kernels.prefix_attention import PrefixAttention, TorchKernels

# Environment variable that torch reads.
PREFER_CK = "TORCH_ROCM_FA_PREFER_CK"


def attention_engine(device: torch.device, dtype: torch.dtype) -> engines.Choice:
    """Return the engine that `causal_attention` uses for tensors of this device and dtype.

    Raises ConfigError if ATTENTION_ENGINE names an engine that this machine cannot run.
    """
    return engines.in_use(engines.ATTENTION, gpu_architecture(device), dtype_name(dtype))


def attention_backends(
    device_type: str, dtype: torch.dtype = torch.bfloat16
) -> AbstractContextManager:
    """Return a context manager for a whole run in `dtype`, which sets the order of SDPA's backends.

    In 16 bits on a GPU, the math backend is excluded, so that SDPA raises RuntimeError instead of
    silently using it. Raises ConfigError if ATTENTION_ENGINE names an engine that this machine
    cannot run.
    """
    attention_engine(torch.device(device_type), dtype)
    on_gpu = device_type == "cuda"
    backends = []
    if on_gpu and torch.version.hip:
        require_preferred_library()
    elif on_gpu:
        backends.append(SDPBackend.CUDNN_ATTENTION)
    backends.append(SDPBackend.FLASH_ATTENTION)
    if not on_gpu or dtype.itemsize != 2:
        backends.append(SDPBackend.MATH)
    return sdpa_kernel(backends, set_priority=True)


def require_preferred_library() -> None:
    """Raise ConfigError if CK is preferred for flash attention, but torch was built without it.

    Without this check, torch would silently use AOTriton (pytorch#152951). ROCm only.
    """
    name = str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2]
    if os.environ.get(PREFER_CK) == "1" and name.lower() != "ck":
        raise ConfigError(
            f"{PREFER_CK}=1 has no effect here",
            f"torch {torch.__version__} was built without CK's attention and would take {name}",
            f"remove {PREFER_CK}, or use a torch with CK, such as the one in AMD's images",
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, shaped like q. The last query is aligned to the last key.

    `q`: [batch, queries, heads, head_dim].
    `k`, `v`: [batch, keys, kv_heads, head_dim]. Fewer queries than keys are the last ones of the
        sequence.
    """
    engine = attention_engine(q.device, q.dtype).engine
    if engine.module:
        return engines.module_of(engine).causal_attention(q, k, v)
    if q.shape[1] != k.shape[1]:
        return PrefixAttention.apply(TorchKernels(), q, k, v)
    # Views of the packed projection cost nothing: cuDNN takes 1,735 + 5,705 µs with them, and 1,717
    # + 5,681 µs with contiguous heads (H200, 2 x 8,192 tokens, 32/8 heads).
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


class AttentionGraph(NamedTuple):
    """An autograd graph of attention alone. `out` was computed from the leaves `inputs`."""

    out: Tensor  # [batch, queries, heads, head_dim]
    # q [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim]
    inputs: tuple[Tensor, Tensor, Tensor]

    def backward(self, d_out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v. `d_out`: the gradient of `out`, of any shape."""
        return torch.autograd.grad(self.out, self.inputs, d_out.view_as(self.out))


def attention_graph(q: Tensor, k: Tensor, v: Tensor, keep: bool) -> AttentionGraph:
    """Compute `causal_attention`. With `keep`, autograd records a graph from q, k and v to it.

    The backward of a block runs this graph, because only the attention engine knows what its
    forward saved.
    """
    leaves = [x.detach().requires_grad_(keep) for x in (q, k, v)]
    with torch.set_grad_enabled(keep):
        return AttentionGraph(causal_attention(*leaves), (leaves[0], leaves[1], leaves[2]))
