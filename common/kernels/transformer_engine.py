"""Matrix products and causal attention by Transformer Engine, NVIDIA's library, or ROCm's fork.

An optional package (common/engines.py). Signatures as read in NVIDIA's 2.20.2 and in ROCm/
TransformerEngine at 01b52037; both are those of 2.10.

Products are `general_gemm`, with operands and scales of this package. Like torch, it takes the
first algorithm of cuBLASLt or hipBLASLt, but may use a workspace. Attention is
`DotProductAttention` with fused attention only: cuDNN's on NVIDIA GPUs, CK's and AITER's on AMD
GPUs, where dQ is summed in 32 bits: 16 bits overflow on gfx942 at 8,192 positions
(common/known_issues.toml).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Read by Transformer Engine. A value that is already set stays.
ENVIRONMENT = {
    "NVTE_FLASH_ATTN": "0",
    "NVTE_UNFUSED_ATTN": "0",
    "NVTE_FUSED_ATTN": "1",
    "NVTE_CK_USES_BWD_V3": "1",
    "NVTE_CK_IS_V3_ATOMIC_FP32": "1",
}
GEMM = "transformer_engine.pytorch.cpp_extensions.gemm"
# Libraries of cuDNN that the others need.
LOADED_FIRST = ("libcudnn_graph.so.9", "libcudnn_ops.so.9", "libcudnn_cnn.so.9")
STORAGE = "transformer_engine.pytorch.tensor.storage.float8_tensor_storage"


def require() -> None:
    """Import the package. Raises ImportError, AttributeError if it lacks a function."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    load_cudnn_of_torch()
    importlib.import_module("transformer_engine.pytorch").DotProductAttention  # noqa: B018
    importlib.import_module(GEMM).general_gemm  # noqa: B018
    importlib.import_module(STORAGE).Float8TensorStorage  # noqa: B018


def load_cudnn_of_torch() -> None:
    """Load every library of the cuDNN package that torch's wheel uses. Without one, do nothing.

    torch loads some of them when it needs them. Transformer Engine would then load the others from
    the system's cuDNN, and fail with an undefined symbol if that is another version.
    """
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return
    folder = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    if not folder:
        return
    os.environ.setdefault("CUDNN_HOME", folder)  # read by Transformer Engine
    libraries = {path.name: path for path in Path(folder, "lib").glob("libcudnn*.so.*")}
    first = [name for name in LOADED_FIRST if name in libraries]
    for name in [*first, *sorted(libraries.keys() - set(first))]:
        ctypes.CDLL(str(libraries[name]), mode=ctypes.RTLD_GLOBAL)


def product(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None
) -> Tensor:
    """Return a b in bf16, [M, N].

    a: [M, K], b: [K, N], each with contiguous rows or columns, in bf16; in FP8 with their scales,
    fp32 [1], value = number * scale. FP8 products sum with fast accumulation, as in `fp8.product`.

    Raises RuntimeError if both have contiguous columns only: no layout of `general_gemm` fits.
    """
    gemm = importlib.import_module(GEMM)
    rows_of_a = a.stride(1) == 1
    rows_of_b = b.stride(1) == 1
    # cuBLAS counts columns first: B of general_gemm is our a. T or N says whether A and B are
    # transposed to it.
    if rows_of_a and not rows_of_b:
        layout, first, second = "TN", b.t(), a
    elif rows_of_a:
        layout, first, second = "NN", b, a
    elif rows_of_b:
        layout, first, second = "NT", b, a.t()
    else:
        raise RuntimeError(f"no layout of general_gemm takes strides {a.stride()} and {b.stride()}")
    if scale_a is not None and scale_b is not None:
        first = quantized(first, scale_b)
        second = quantized(second, scale_a)
    return gemm.general_gemm(
        first, second, out_dtype=torch.bfloat16, layout=layout, use_split_accumulator=False
    )[0]


def quantized(x: Tensor, scale: Tensor) -> Any:
    """Return Transformer Engine's view of an FP8 tensor and its scale. Nothing is copied."""
    dtypes = importlib.import_module("transformer_engine_torch").DType
    in_e4m3 = x.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return importlib.import_module(STORAGE).Float8TensorStorage(
        data=x.view(torch.uint8),
        fp8_scale_inv=scale,
        fp8_dtype=dtypes.kFloat8E4M3 if in_e4m3 else dtypes.kFloat8E5M2,
        fake_dtype=torch.bfloat16,
    )


@cache
def attention_module(heads: int, kv_heads: int, head_dim: int) -> torch.nn.Module:
    """Return the module of this shape, which has no parameters."""
    return importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in bf16, shaped like q.

    q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim].
    """
    module = attention_module(q.shape[2], k.shape[2], q.shape[3])
    return module(q, k, v).view(q.shape)
