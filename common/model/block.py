"""One transformer block as its formula says, in torch's own operations: the reference, and what torch.compile works on.

Legend of tensor names: B batch, S sequence, D hidden, H query heads, K key/value heads.
The query, key and value projections are one matrix (rows: all of Q, then K, then V), and so are gate and up (gate first):
one large product instead of three or two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.kernels import rms_norm, swiglu
from common.kernels.attention import causal_attention
from common.kernels.rope import rope
from common.model.shapes import ModelShape


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, kernels: str = "reference"):
        super().__init__()
        self.rms_norm = rms_norm.ENGINES[kernels]
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.rms_norm(x_BSD, self.weight, self.eps)


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward."""

    recomputes_itself = False  # True: forward takes a fourth argument, whether to keep the input only

    def __init__(self, shape: ModelShape, kernels: str, fp8_swiglu_input: bool):
        super().__init__()
        self.shape = shape
        self.swiglu = swiglu.ENGINES[kernels][fp8_swiglu_input]
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, shape.qkv_size, bias=False)
        self.o = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.down(self.swiglu(self.gate_up(self.ffn_norm(x_BSD))))

    def attention(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x_BSD).unflatten(-1, (heads + 2 * kv_heads, head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return self.o(causal_attention(rope(q, cos, sin), rope(k, cos, sin), v).flatten(2))
