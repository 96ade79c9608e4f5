"""Norms of the query and key heads of a block (kernels/qk_norm.py).

This module is imported only for shapes with such norms.
"""

from __future__ import annotations

from torch import Tensor

from common.kernels import qk_norm
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.block_ops import KernelEngine, RotaryEmbedding
from common.model.llama import RMSNorm
from common.model.shapes import ModelShape


class QKNormRotaryEmbedding(RotaryEmbedding):
    """Norms of the query and key heads, followed by RoPE."""

    def __init__(self, shape: ModelShape, ops: KernelEngine, kernels: str):
        super().__init__(shape, ops)
        self.engine = qk_norm.IMPLEMENTATIONS[kernels]
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def rotate_(self, qkv: Tensor, cos: Tensor, sin: Tensor, keep: bool) -> Tensor | None:
        weights = (self.q_norm.weight, self.k_norm.weight)
        shape = self.shape
        return self.engine.norm_rope_(
            qkv, weights, shape.norm_eps, cos, sin, shape.num_heads, shape.num_kv_heads, keep
        )

    def backward(
        self,
        gradients: tuple[Tensor, ...],
        qk_before_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        quantizer: Quantizer | None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
        assert qk_before_norm is not None
        d_q, d_k, d_v = gradients
        weights = (self.q_norm.weight, self.k_norm.weight)
        return self.engine.norm_rope_backward(
            (d_q, d_k, d_v),
            qk_before_norm,
            weights,
            self.shape.norm_eps,
            cos,
            sin,
            quantizer,
            weights[0].requires_grad,
        )
