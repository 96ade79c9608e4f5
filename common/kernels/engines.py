"""Environment variables, from a config's [env], that choose another implementation in torch's place."""

from __future__ import annotations

ATTENTION_ENGINE = "ATTENTION_ENGINE"  # an optional package in place of SDPA: attention_engines.py
MATMUL_ENGINE = "MATMUL_ENGINE"  # "cublaslt": the fastest of its algorithms, not its first: cublaslt.py
