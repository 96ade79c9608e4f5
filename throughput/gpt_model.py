"""A GPT in plain torch, in eight sizes, with its training step.

`throughput gpt` and `throughput scaling` time it. Nothing is compiled or fused by hand, so it shows
the speed of plain torch on a machine. `bench` times the fused Llama of this package. The layers:

    token embedding + learned position embedding
    N times: LayerNorm, causal attention with as many key heads as query heads, residual,
             LayerNorm, two linear layers with GELU between them, residual
    LayerNorm, logits by the token embedding

Every linear layer has a bias. Weights, gradients and both moments of AdamW are bf16: 8 bytes per
parameter. There are no fp32 master weights, which real training would have (16 bytes per
parameter).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.kernels.attention import causal_attention
from common.training.build import default_dtype
from throughput.gpt_sizes import GptShape, Size

STATE_BYTES = 8  # bytes per parameter: weight, gradient and two moments in bf16
LEARNING_RATE = 1e-5


class GptBlock(nn.Module):
    def __init__(self, shape: GptShape):
        super().__init__()
        hidden = shape.hidden_size
        self.num_heads = shape.num_heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.o = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, shape.ffn_hidden_size)
        self.down = nn.Linear(shape.ffn_hidden_size, hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x_BSD)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(-3)
        x_BSD = x_BSD + self.o(causal_attention(q, k, v).flatten(-2))
        inner = F.gelu(self.up(self.norm_2(x_BSD)))
        return x_BSD + self.down(inner)


class Gpt(nn.Module):
    def __init__(self, shape: GptShape, sequence_length: int):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(sequence_length, shape.hidden_size)
        self.blocks = nn.ModuleList(GptBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        for table in (self.embedding, self.positions):
            # As in GPT-2. The embedding is also the head: torch's default N(0, 1) would give huge
            # logits.
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the mean cross-entropy of all next tokens, []. `tokens_BS`: int [B, S + 1]."""
        inputs = tokens_BS[:, :-1]
        labels = tokens_BS[:, 1:]
        x_BSD = self.embedding(inputs) + self.positions.weight
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits = F.linear(self.norm(x_BSD), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_gpt(shape: GptShape, sequence_length: int, device: torch.device) -> Gpt:
    """Build the model in bf16 with equal weights on all ranks."""
    torch.manual_seed(1)
    with device, default_dtype(torch.bfloat16):
        return Gpt(shape, sequence_length)


def train_step(model: nn.Module, size: Size) -> Callable[[], None]:
    """Return a function that runs one step on random tokens: forward, backward, AdamW.

    `model`: a Gpt, which may be wrapped in DistributedDataParallel.
    """
    device = next(model.parameters()).device
    tokens = torch.randint(
        size.shape.vocab_size, (size.batch, size.sequence_length + 1), device=device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
