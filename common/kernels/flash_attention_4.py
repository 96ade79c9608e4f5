"""Causal attention with FlashAttention-4.

An optional package (common/engines.py). Behavior as read in flash-attn-4 4.0.0b36:

- The public function brings its own backward. It reads and keeps views of a packed projection
  without copying them, if their strides are multiples of 16 bytes.
- `causal` aligns the last query with the last key. The lengths are always equal here, so this is
  the usual mask.
- On sm_90 the head size is 8 to 256, a multiple of 8. The package raises an error for other sizes.
- Backward sums dQ with atomics into fp32 buffers, and with grouped heads also dK and dV. So runs
  differ in bits. The buffer of dQ is 134 MB per sequence of the 8B and 268 MB of the 70B.
- Kernels are compiled at their first call: in the self-test and the warm-up, before the clock
  starts. The package keeps them in FLASH_ATTENTION_CUTE_DSL_CACHE_DIR if
  FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1. Both are read when it is imported.
"""

from __future__ import annotations

import importlib
import os
import warnings

from torch import Tensor

from common.paths import cache_folder


def require() -> None:
    """Import the package, with its cache of compiled kernels.

    Raises ImportError, AttributeError.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault(
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder("flash_attention_4"))
    )
    # Printed by cutlass at each compilation of the backward. The result is right without it.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument")
    importlib.import_module("flash_attn.cute").flash_attn_func  # noqa: B018


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in bf16, shaped like q and contiguous.

    q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim].
    """
    from flash_attn.cute import flash_attn_func

    out, _ = flash_attn_func(q, k, v, causal=True)
    return out
