"""Causal attention by FlashAttention-4, an optional package, chosen by ATTENTION_ENGINE = "flash_attention_4" in a config's [env].

Behaviour as read in flash-attn-4 4.0.0b36. Its public function brings its own backward, and reads and keeps views of a packed projection as they
are, where strides are multiples of 16 bytes. `causal` aligns the last query with the last key: with equal lengths, all that is used here, the usual
mask. On sm_90 a head has 8 to 256 numbers, a multiple of 8; the package raises for others. Backward sums dQ, and with grouped heads dK and dV, by
atomics into fp32 buffers (dQ: 134 MB a sequence of the 8B, 268 of the 70B): runs differ in bits, and `plan` does not count the buffers. Kernels
are compiled at their first call: before the clock, in the self-test and the warm-up.
"""

from __future__ import annotations

from torch import Tensor

GPUS, MODULE, FUNCTIONS = (
    ("sm_90",),
    "flash_attn.cute",
    ("flash_attn_func",),
)  # it has kernels for others, which we have not run
PACKAGE, INSTALL = (
    "flash-attn-4",
    'pip install "flash-attn-4[cu13]==4.0.0b36" (without [cu13] for CUDA 12)',
)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [batch, sequence, heads, head_dim]; k, v: [batch, sequence, kv_heads, head_dim]; in bf16; result shaped like q, contiguous."""
    from flash_attn.cute import flash_attn_func

    out, _ = flash_attn_func(q, k, v, causal=True)
    return out
