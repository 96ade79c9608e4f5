"""Environment variables, from a config's [env], that choose another implementation in torch's place."""

from __future__ import annotations

ATTENTION_ENGINE = (
    "ATTENTION_ENGINE"  # another implementation in place of SDPA: attention_engines.py
)
SDPA = "sdpa"  # ATTENTION_ENGINE's name for torch's scaled_dot_product_attention
REPEATED_HEADS = "repeated_heads"  # and for repeated_heads_attention.py
MATMUL_ENGINE = (
    "MATMUL_ENGINE"  # "cublaslt": the fastest of its algorithms, not its first: cublaslt.py
)
