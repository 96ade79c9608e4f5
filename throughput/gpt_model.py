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
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.kernels.attention import causal_attention
from common.training.build import default_dtype
from throughput.shared_options import ByDevice

STATE_BYTES = 8  # bytes per parameter: weight, gradient and two moments in bf16
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class GptShape:
    """Sizes of a GPT."""

    num_layers: int
    num_heads: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int = 50257  # GPT-2's

    @property
    def matmul_parameters(self) -> int:
        """Number of weights that multiply each token: linear layers, and the embedding as the head.

        Biases are not counted.
        """
        per_layer = self.hidden_size * (4 * self.hidden_size + 2 * self.ffn_hidden_size)
        return self.num_layers * per_layer + self.vocab_size * self.hidden_size

    def num_parameters(self, sequence_length: int) -> int:
        """Return the number of all parameters.

        The position embedding has one row for each token of the sequence.
        """
        per_layer = 9 * self.hidden_size + self.ffn_hidden_size
        biases_and_norms = self.num_layers * per_layer + 2 * self.hidden_size
        positions = sequence_length * self.hidden_size
        return self.matmul_parameters + positions + biases_and_norms

    def training_flops_per_token(self, sequence_length: int) -> int:
        """Return 6*N + 6*L*S*H, in which causal attention counts half of the square.

        N: `matmul_parameters`, L: layers, S: sequence length, H: hidden size.
        common/model/shapes.py counts the FLOPs of Llama in the same way.
        """
        return 6 * self.matmul_parameters + 6 * self.num_layers * sequence_length * self.hidden_size


@dataclass(frozen=True)
class Size:
    """A shape, and the batch and sequence length at which it is measured."""

    shape: GptShape
    batch: int
    sequence_length: int


# The eight sizes of a published benchmark of one MI350X, whose rows are in
# common/measure/published.json. Its models "7b" and "13b" have 5.2 and 10.1 billion parameters.
SIZES = {
    "small": Size(GptShape(6, 6, 384, 1536), 32, 512),
    "medium": Size(GptShape(12, 12, 768, 3072), 16, 512),
    "large": Size(GptShape(24, 16, 1024, 4096), 8, 512),
    "xl": Size(GptShape(36, 20, 1280, 5120), 4, 512),
    "1.5b": Size(GptShape(48, 24, 1536, 6144), 4, 512),
    "3b": Size(GptShape(32, 32, 2560, 10240), 2, 512),
    "7b": Size(GptShape(32, 32, 4096, 11008), 8, 1024),
    "13b": Size(GptShape(40, 40, 5120, 13824), 4, 1024),
}
# Sizes for a CPU. They show that the command works, and say nothing about the machine.
STAND_INS = {
    "tiny": Size(GptShape(2, 2, 64, 256, 2048), 2, 64),
    "mini": Size(GptShape(4, 4, 128, 512, 2048), 2, 64),
}
STEPS = ByDevice(10, 3)  # default number of timed steps


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
