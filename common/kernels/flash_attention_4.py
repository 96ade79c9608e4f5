"""Causal attention with FlashAttention-4.

An optional package, chosen by ATTENTION_ENGINE = "flash_attention_4" in a config's [env]. Behavior
as read in flash-attn-4 4.0.0b36:

- The public function brings its own backward. It reads and keeps views of a packed projection
  without copying them, if their strides are multiples of 16 bytes.
- `causal` aligns the last query with the last key. The lengths are always equal here, so this is
  the usual mask.
- On sm_90 the head size is 8 to 256, a multiple of 8. The package raises an error for other sizes.
- Backward sums dQ with atomics into fp32 buffers, and with grouped heads also dK and dV. So runs
  differ in bits. The buffer of dQ is 134 MB per sequence of the 8B and 268 MB of the 70B. `plan`
  does not count the buffers.
- Kernels are compiled at their first call: in the self-test and the warm-up, before the clock
  starts.
"""

from __future__ import annotations

from torch import Tensor

# The package has kernels for other GPUs, which we have not run.
GPUS, MODULE, FUNCTIONS = (
    ("sm_90",),
    "flash_attn.cute",
    ("flash_attn_func",),
)
PACKAGE, INSTALL = (
    "flash-attn-4",
    'pip install "flash-attn-4[cu13]==4.0.0b36" (without [cu13] for CUDA 12)',
)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in bf16, shaped like q and contiguous.

    q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim].
    """
    from flash_attn.cute import flash_attn_func

    out, _ = flash_attn_func(q, k, v, causal=True)
    return out
