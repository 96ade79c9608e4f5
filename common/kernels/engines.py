"""Environment variables, set in a config's [env], that replace an implementation of torch."""

from __future__ import annotations

# Replaces SDPA by another implementation, see attention_engines.py.
ATTENTION_ENGINE = "ATTENTION_ENGINE"
SDPA = "sdpa"  # value of ATTENTION_ENGINE for torch's scaled_dot_product_attention
REPEATED_HEADS = "repeated_heads"  # value of ATTENTION_ENGINE for repeated_heads_attention.py
# "cublaslt": use cuBLASLt's fastest algorithm instead of its first one, see cublaslt.py.
MATMUL_ENGINE = "MATMUL_ENGINE"
