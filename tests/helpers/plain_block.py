"""Plain blocks: the formulas in torch operations under autograd, to test the fused blocks against.

Dimensions in tensor names: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.kernels.attention import causal_attention
from common.kernels.rope import rope_reference
from common.kernels.swiglu import swiglu_reference
from common.model.llama import Head, Llama, RMSNorm
from common.model.shapes import ModelShape


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward.

    Parameters are named as in FusedBlock.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, shape.qkv_size, bias=False)
        if shape.qk_norm:
            self.rotation = nn.ModuleDict(
                {name: RMSNorm(shape.head_dim, shape.norm_eps) for name in ("q_norm", "k_norm")}
            )
        self.o = nn.Linear(shape.attention_size, shape.hidden_size, bias=False)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.down(swiglu_reference(self.gate_up(self.ffn_norm(x_BSD))))

    def attention(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.shape.num_heads
        kv_heads = self.shape.num_kv_heads
        head_dim = self.shape.head_dim
        qkv = self.qkv(x_BSD).unflatten(-1, (heads + 2 * kv_heads, head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        if self.shape.qk_norm:
            q, k = self.rotation["q_norm"](q), self.rotation["k_norm"](k)
        q = rope_reference(q, cos, sin)
        k = rope_reference(k, cos, sin)
        return self.o(causal_attention(q, k, v).flatten(2))


class LoRALinear(nn.Module):
    """A frozen linear without bias, `base`, and its adapter.

    `lora_a`: fp32 [rank, in]; `lora_b`: fp32 [out, rank].
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank, device=base.weight.device))
        self.scale = alpha / rank
        self.dropout = dropout
        self.drop = F.dropout  # a test may replace it by a fixed mask

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.drop(x, self.dropout, self.training)
        down = F.linear(dropped, self.lora_a.to(x.dtype))
        up = F.linear(down, self.lora_b.to(x.dtype))
        return self.base(x) + up * self.scale


def plain_llama(shape: ModelShape, max_sequence_length: int) -> Llama:
    """Return a Llama of plain blocks, in fp32 on the CPU, with undefined weights."""
    blocks = [Block(shape) for _ in range(shape.num_layers)]
    return Llama(shape, max_sequence_length, blocks, Head(shape, "reference"))
