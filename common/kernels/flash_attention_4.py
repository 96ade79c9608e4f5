"""Causal attention by FlashAttention-4.

FlashAttention-4 is an optional package (common/engines.py). It behaves as follows (source code of
flash-attn-4 4.0.0b36):

- The public function has its own backward. It reads and keeps views of a packed projection without
  copying them, if their strides are multiples of 16 bytes.
- `causal` aligns the last query with the last key, also with fewer queries than keys.
- On sm_90, head sizes are multiples of 8 from 8 to 256. Other sizes are an error.
- The backward sums dQ, and with grouped heads also dK and dV, with atomics in fp32 buffers. So the
  bits of runs differ. The buffer of dQ is 134 MB per sequence of the 8B and 268 MB of the 70B. The
  option `deterministic` was not timed.
- Kernels are compiled at their first call, which is in the self-test or the warm-up, before
  run_start. They are kept in FLASH_ATTENTION_CUTE_DSL_CACHE_DIR if
  FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1. Both are read when the package is imported.

For a sequence of 8,192 tokens with 32/8 heads on an H200, it takes 832 µs forward and 2,525 µs
backward, cuDNN 984 and 2,934. Every result is at least as near to fp32 as cuDNN's.
"""

from __future__ import annotations

import importlib
import os
import warnings

from torch import Tensor

from common.paths import cache_folder


def require() -> None:
    """Import the package, after setting its cache of compiled kernels.

    Raises ImportError, or AttributeError if it lacks the function.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault(
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder("flash_attention_4"))
    )
    # A harmless warning of cutlass at each compilation of the backward.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument")
    importlib.import_module("flash_attn.cute").flash_attn_func  # noqa: B018


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in bf16, shaped like q and contiguous.

    `q`: [batch, queries, heads, head_dim].
    `k`, `v`: [batch, keys, kv_heads, head_dim].
    """
    from flash_attn.cute import flash_attn_func

    out, _ = flash_attn_func(q, k, v, causal=True)
    return out
