"""The Llama model of all benchmarks: embedding, given blocks, output head.

Suffixes of tensor names are dimensions: B batch, S sequence, D hidden size. Nothing here depends on
how the blocks compute, in which precision, or how weights are sharded. The callers of
common/training/build.py decide that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.kernels import cross_entropy, rms_norm
from common.kernels.fp8 import product
from common.kernels.rope import rope_tables
from common.model.shapes import ModelShape
from common.sharding.context_parallel import ALONE, ContextGroup


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (kernels/rms_norm.py)."""

    def __init__(self, hidden_size: int, eps: float, kernels: str = "reference"):
        super().__init__()
        self.rms_norm = rms_norm.IMPLEMENTATIONS[kernels]
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.rms_norm(x_BSD, self.weight, self.eps)


class OutputProjection(torch.autograd.Function):
    """Output projection x W^T, computed by the engine of matrix products (kernels/fp8.py).

    `x`: [tokens, D].
    `weight`: [vocab, D].

    Returns [tokens, vocab].

    The 8B's head is not in FP8. With all three products in FP8, a step on two H200s was 2.5 %
    faster, and the loss after 500 steps 0.46 % higher (four seeds). With FP8 in the backward only,
    and the label's p - 1 exact, the gain was 1.6 % of a step for 4.9 ± 1.2 % more samples (eight).
    Most of that comes from sums in the tensor cores' own precision: a row of d_W without a label is
    the sum of 8,192 positive terms, and is 10 to 14 % too small on an H200. With sums in fp32 it is
    0.2 to 0.3 % too small, for 1.5 ± 1.1 % more samples and 1.3 % of a step. With FP8 in the
    forward only, and sums in fp32, the gain is 1.1 % of a step, less the casts of x and W, for 1.9
    ± 0.8 % more samples (eight seeds, docs/results.md).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        d_out = d_out.contiguous()
        d_x = product(d_out, weight) if needs_x else None
        d_weight = product(d_out.t(), x) if needs_weight else None
        return d_x, d_weight


class Head(nn.Module):
    """Final norm, output projection and cross entropy."""

    def __init__(self, shape: ModelShape, kernels: str):
        super().__init__()
        self.cross_entropy = cross_entropy.IMPLEMENTATIONS[kernels]
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Return (loss_sum, count), or the logits without labels (see `Llama.forward`)."""
        normed = self.norm(x_BSD)
        logits = OutputProjection.apply(normed.flatten(0, 1), self.output.weight)
        logits = logits.view(*normed.shape[:2], -1)
        return logits if labels_BS is None else self.cross_entropy(logits, labels_BS)


class Llama(nn.Module):
    """A Llama model built from given blocks: embedding, blocks, output head."""

    cos: Tensor  # fp32 [max_sequence_length, head_dim / 2]
    sin: Tensor

    def __init__(
        self,
        shape: ModelShape,
        max_sequence_length: int,
        blocks: Sequence[nn.Module],
        head: Head,
        context: ContextGroup = ALONE,
    ):
        """Build the model. Its forward calls block(x_BSD, cos, sin) for each of `blocks`.

        `context`: the ranks that share each sequence.
        """
        super().__init__()
        self.context = context
        self.shape = shape
        self.max_sequence_length = max_sequence_length
        # Not nn.Embedding(): it draws normal values, and on the meta device that imports
        # torch._dynamo, 1.5 s of CPU time in every rank.
        weight = torch.empty(shape.vocab_size, shape.hidden_size)
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.tie_embedding()
        self.make_rope_tables("cpu")

    def tie_embedding(self) -> None:
        """Share the embedding's parameter with the output projection if the shape ties them.

        Call it again after `to_empty` of a meta model, which creates two parameters.
        """
        if self.shape.tied_embedding:
            self.head.output.weight = self.embedding.weight

    def make_rope_tables(self, device: torch.device | str) -> None:
        """Compute cos and sin of all positions on `device`, fp32, with the same bits on any device.

        Call it again after `to_empty` of a meta model, which does not keep their values.
        """
        cos, sin = rope_tables(self.shape, self.max_sequence_length, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (loss_sum, count), both fp32 [batch], or the logits if there are no labels.

        `tokens_BS`, `labels_BS`: int [batch, sequence], whole also if ranks share each sequence.
            Tokens with label -100 do not count.

        `loss_sum` is the sum of the cross entropies of this rank's tokens of a sequence, and
        `count` the number of all its tokens that count. The logits are [batch, this rank's tokens,
        vocab].
        """
        context = self.context
        sequence_length = tokens_BS.shape[1]
        cos = context.cut(self.cos[:sequence_length], 0)
        sin = context.cut(self.sin[:sequence_length], 0)
        x_BSD = self.embedding(context.cut(tokens_BS, 1))
        for block in self.blocks:
            x_BSD = block(x_BSD, cos, sin)
        if labels_BS is None:
            return self.head(x_BSD, None)
        loss_sum, count = self.head(x_BSD, context.cut(labels_BS, 1))
        if context.size > 1:
            count = cross_entropy.count_valid(labels_BS)
        return loss_sum, count
