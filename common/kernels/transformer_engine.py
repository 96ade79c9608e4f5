"""Matrix products and causal attention by Transformer Engine, NVIDIA's library, or ROCm's fork.

Transformer Engine is an optional package (common/engines.py). This code follows the source code of
NVIDIA's 2.20.2 and of ROCm/TransformerEngine at 01b52037, which has the signatures of 2.10.

Products are computed by `general_gemm`, with the operands and scales of this package. Like torch,
it uses the first algorithm of cuBLASLt or hipBLASLt, but it may use a workspace. Attention is
`DotProductAttention`, restricted to fused attention: cuDNN's on NVIDIA GPUs, CK's and AITER's on
AMD GPUs. There, dQ is summed in 32 bits, because 16 bits overflow on gfx942 at 8,192 positions
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

# Environment variables that Transformer Engine reads. Values that are already set are kept.
ENVIRONMENT = {
    "NVTE_FLASH_ATTN": "0",
    "NVTE_UNFUSED_ATTN": "0",
    "NVTE_FUSED_ATTN": "1",
    "NVTE_CK_USES_BWD_V3": "1",
    "NVTE_CK_IS_V3_ATOMIC_FP32": "1",
}
GEMM = "transformer_engine.pytorch.cpp_extensions.gemm"
# Libraries of cuDNN that its other libraries need.
LOADED_FIRST = ("libcudnn_graph.so.9", "libcudnn_ops.so.9", "libcudnn_cnn.so.9")
STORAGE = "transformer_engine.pytorch.tensor.storage.float8_tensor_storage"


def require() -> None:
    """Import the package. Raises ImportError, or AttributeError if it lacks a function."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    load_cudnn_of_torch()
    importlib.import_module("transformer_engine.pytorch").DotProductAttention  # noqa: B018
    importlib.import_module(GEMM).general_gemm  # noqa: B018
    importlib.import_module(STORAGE).Float8TensorStorage  # noqa: B018


def load_cudnn_of_torch() -> None:
    """Load all libraries of the cuDNN package that torch's wheel uses, if there is one.

    torch loads only those that it needs. Transformer Engine would load the others from the system's
    cuDNN, and fail with an undefined symbol if that is another version.
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
    """Return the product a b, bf16 [M, N].

    `a`: [M, K], bf16 or FP8, with contiguous rows or columns.
    `b`: [K, N], like `a`.
    `scale_a`, `scale_b`: given for FP8 factors, the inverse scales, fp32 [1].

    FP8 products sum with fast accumulation, as in `fp8.product`. Raises RuntimeError if both
    factors have contiguous columns only, which no layout of `general_gemm` supports.
    """
    gemm = importlib.import_module(GEMM)
    rows_of_a = a.stride(1) == 1
    rows_of_b = b.stride(1) == 1
    # cuBLAS is column-major, so the second factor of general_gemm is our a. T or N states for each
    # of its factors whether it is transposed.
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


def quantized(x: Tensor, inverse_scale: Tensor) -> Any:
    """Return Transformer Engine's object for an FP8 tensor, without a copy."""
    dtypes = importlib.import_module("transformer_engine_torch").DType
    in_e4m3 = x.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return importlib.import_module(STORAGE).Float8TensorStorage(
        data=x.view(torch.uint8),
        fp8_scale_inv=inverse_scale,
        fp8_dtype=dtypes.kFloat8E4M3 if in_e4m3 else dtypes.kFloat8E5M2,
        fake_dtype=torch.bfloat16,
    )


@cache
def attention_module(heads: int, kv_heads: int, head_dim: int, mask: str) -> torch.nn.Module:
    """Return the attention module of this shape. It has no parameters."""
    return importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type=mask,
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in bf16, shaped like q. The last query is aligned to the last key.

    `q`: [batch, queries, heads, head_dim].
    `k`, `v`: [batch, keys, kv_heads, head_dim].
    """
    mask = "causal" if q.shape[1] == k.shape[1] else "causal_bottom_right"
    module = attention_module(q.shape[2], k.shape[2], q.shape[3], mask)
    # Transformer Engine copies views, except those whose storage and offsets look packed. It reads
    # these as dense, whatever their strides.
    q, k, v = (x.contiguous() for x in (q, k, v))
    return module(q, k, v).view(q.shape)
