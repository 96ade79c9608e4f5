"""The norms of query and key heads in a fused block (kernels/qk_norm.py); imported only for a shape that has them."""

from __future__ import annotations

from torch import Tensor

from common.kernels import qk_norm
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.block_ops import Engine, RotaryEmbedding
from common.model.llama import RMSNorm
from common.model.shapes import ModelShape


class QKNormRotaryEmbedding(RotaryEmbedding):
    def __init__(self, shape: ModelShape, ops: Engine, kernels: str):
        super().__init__(shape, ops)
        self.norm_rope_, self.norm_rope_backward = qk_norm.ENGINES[kernels]
        self.q_norm, self.k_norm = (
            RMSNorm(shape.head_dim, shape.norm_eps),
            RMSNorm(shape.head_dim, shape.norm_eps),
        )

    def rotate_(self, qkv: Tensor, cos: Tensor, sin: Tensor, keep: bool) -> Tensor | None:
        weights, shape = (self.q_norm.weight, self.k_norm.weight), self.shape
        return self.norm_rope_(
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
        weights, (d_q, d_k, d_v) = (self.q_norm.weight, self.k_norm.weight), gradients
        trains = weights[0].requires_grad
        return self.norm_rope_backward(
            (d_q, d_k, d_v),
            qk_before_norm,
            weights,
            self.shape.norm_eps,
            cos,
            sin,
            quantizer,
            trains,
        )
