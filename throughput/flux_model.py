"""FLUX.1-dev's transformer: image and text streams with joint attention, then a single stream.

The sizes are from config.json in black-forest-labs/FLUX.1-dev (transformer). The blocks follow
Esser et al. (arXiv:2403.03206, MM-DiT) and Dehghani et al. (arXiv:2302.05442, attention and MLP in
parallel). B: batch, S: image tokens, T: text tokens, N = T + S, D: hidden size.

Every block normalizes without weights, then scales and shifts. Scale, shift and gate are computed
from the conditioning vector c = time + guidance + text:

    double: x += gate * out(attention(qkv(norm(x))))
            x += gate * down(gelu(up(norm(x)))), for each stream with separate weights
    single: x += gate * out([attention(q, k, v), gelu(h)]), (q, k, v, h) = in(norm(x))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SINUSOIDS = 256  # number of sines and cosines that represent the time, and the guidance
EPS = 1e-6


@dataclass(frozen=True)
class FluxShape:
    """Sizes of the transformer. The defaults are FLUX.1-dev's."""

    double_blocks: int = 19
    single_blocks: int = 38
    hidden_size: int = 3072
    num_heads: int = 24
    in_channels: int = 64  # per token: 2 x 2 latents of 16 channels
    context_size: int = 4096  # per text token, from T5
    pooled_size: int = 768  # for the whole text, from CLIP
    # Parts of the head dimension that are rotated by each position: text (always 0), row, column.
    rope_axes: tuple[int, ...] = (16, 56, 56)
    rope_base: float = 10000.0
    mlp_ratio: int = 4

    @property
    def blocks(self) -> int:
        return self.double_blocks + self.single_blocks

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def flops_per_image(self, image_tokens: int, text_tokens: int) -> int:
        """Return the FLOPs of forward and backward for one image, which are 3 x forward.

        In the forward, a matrix has 2 FLOPs for each weight and each token, and the attention of a
        block has 4 N^2 D. Recomputation, norms and the optimizer are not counted.
        """
        hidden = self.hidden_size
        tokens = image_tokens + text_tokens
        # Weights of qkv, out and the MLP's two matrices. A single block has as many.
        per_token = (4 + 2 * self.mlp_ratio) * hidden**2
        time_and_guidance = 2 * (SINUSOIDS + hidden) * hidden
        pooled_text = (self.pooled_size + hidden) * hidden
        block_modulations = (12 * self.double_blocks + 3 * self.single_blocks) * hidden**2
        output_modulation = 2 * hidden**2
        vectors = time_and_guidance + pooled_text + block_modulations + output_modulation
        # Projections of image tokens at both ends, and of text tokens at the beginning.
        image_ends = 2 * self.in_channels * image_tokens * hidden
        text_end = self.context_size * text_tokens * hidden
        weights = self.blocks * per_token * tokens + vectors + image_ends + text_end
        attention = self.blocks * 4 * tokens**2 * hidden
        return 3 * (2 * weights + attention)


def image_positions(rows: int, columns: int, text_tokens: int) -> Tensor:
    """Return positions, int64 [N, 3]: zeros for text tokens, (0, row, column) for image tokens."""
    zero = torch.zeros(1, dtype=torch.int64)
    image = torch.cartesian_prod(zero, torch.arange(rows), torch.arange(columns))
    text = torch.zeros(text_tokens, 3, dtype=torch.int64)
    return torch.cat((text, image))


def rope_table(positions: Tensor, shape: FluxShape, device: torch.device) -> Tensor:
    """Return exp(i angle), complex64 [N, 1, head_dim / 2]. The angles are computed in fp64.

    `positions`: int64 [N, 3]. Each of the three rotates its part of the head (`rope_axes`).
    """
    angles = []
    for axis, size in enumerate(shape.rope_axes):
        frequencies = shape.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles.append(torch.outer(positions[:, axis].double(), frequencies))
    angle = torch.cat(angles, dim=1)[:, None]
    return torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the elements 2i and 2i + 1 of x [B, N, heads, head_dim] by angle i.

    Multiplying complex numbers moves 20 bytes per element in plain torch. Products and sums of real
    numbers would move 48.
    """
    rotated = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rope
    return torch.view_as_real(rotated).flatten(-2).to(x.dtype)


def sinusoids(value: Tensor) -> Tensor:
    """Return the cosines, then the sines, of 1000 x `value` x 128 frequencies.

    `value`: fp32 [B]. Returns fp32 [B, 256].
    """
    half = SINUSOIDS // 2
    steps = torch.arange(half, device=value.device)
    frequencies = torch.exp(-math.log(10000.0) / half * steps)
    angle = 1000.0 * value.float()[:, None] * frequencies
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def normalize(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalize x [B, N, D], then scale by 1 + `scale` and add `shift`, both [B, 1, D]."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


class Modulation(nn.Module):
    """A layer that computes shifts, scales and gates from c [B, D]: `count` tensors [B, 1, D]."""

    def __init__(self, hidden_size: int, count: int):
        super().__init__()
        self.count = count
        self.linear = nn.Linear(hidden_size, count * hidden_size)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(c))[:, None].chunk(self.count, dim=-1)


class HeadNorm(nn.Module):
    """RMSNorm of each head of the queries and of the keys, with one weight for all heads."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.q = nn.RMSNorm(head_dim, eps=EPS)
        self.k = nn.RMSNorm(head_dim, eps=EPS)

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [B, N, 3 D] into q, k, v, each [B, N, heads, head_dim], with q and k normalized."""
        q, k, v = qkv.unflatten(-1, (3, -1, self.q.normalized_shape[0])).unbind(2)
        return self.q(q), self.k(k), v


def attention(q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> Tensor:
    """Return attention over all tokens, text and image, without a mask, as in FLUX.

    q, k, v: [B, N, heads, head_dim]. Returns [B, N, D].
    """
    q = rotate(q, rope)
    k = rotate(k, rope)
    q = q.transpose(1, 2)  # [B, heads, N, head_dim]
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


class Stream(nn.Module):
    """The layers of a double block for one stream: one instance for the image, one for the text."""

    def __init__(self, shape: FluxShape):
        super().__init__()
        hidden = shape.hidden_size
        self.modulation = Modulation(hidden, 6)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm = HeadNorm(shape.head_dim)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, shape.mlp_ratio * hidden)
        self.down = nn.Linear(shape.mlp_ratio * hidden, hidden)

    def project(self, x: Tensor, modulation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x [B, tokens, D], each [B, tokens, heads, head_dim].

        `modulation`: the six tensors that `self.modulation` computes.
        """
        return self.norm(self.qkv(normalize(x, *modulation[:2])))

    def finish(self, x: Tensor, attended: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        """Add the output of attention and the MLP to x [B, tokens, D].

        `attended`: result of `attention` for these tokens, [B, tokens, D].
        """
        _, _, attention_gate, shift, scale, gate = modulation
        x = torch.addcmul(x, attention_gate, self.out(attended))
        inner = F.gelu(self.up(normalize(x, shift, scale)), approximate="tanh")
        return torch.addcmul(x, gate, self.down(inner))


class FluxBlock(nn.Module):
    """A block that can be recomputed in the backward.

    `recompute`: keep only the inputs, and run the forward again in the backward. The forward draws
    no random numbers.
    """

    def __init__(self, recompute: bool):
        super().__init__()
        self.recompute = recompute

    def forward(self, *inputs):
        if not self.recompute:
            return self.run(*inputs)
        return checkpoint(self.run, *inputs, use_reentrant=False, preserve_rng_state=False)


class DoubleBlock(FluxBlock):
    """A block with separate weights for image and text, and attention over both."""

    def __init__(self, shape: FluxShape, recompute: bool):
        super().__init__(recompute)
        self.image = Stream(shape)
        self.text = Stream(shape)

    def run(self, image: Tensor, text: Tensor, c: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new image [B, S, D] and text [B, T, D].

        c: [B, D]. rope: from `rope_table`.
        """
        image_modulation = self.image.modulation(c)
        text_modulation = self.text.modulation(c)
        text_qkv = self.text.project(text, text_modulation)
        image_qkv = self.image.project(image, image_modulation)
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(text_qkv, image_qkv, strict=True))
        attended = attention(q, k, v, rope)
        text_tokens = text.shape[1]
        image = self.image.finish(image, attended[:, text_tokens:], image_modulation)
        text = self.text.finish(text, attended[:, :text_tokens], text_modulation)
        return image, text


class SingleBlock(FluxBlock):
    """A block with one set of weights for all tokens, and with attention and MLP in parallel."""

    def __init__(self, shape: FluxShape, recompute: bool):
        super().__init__(recompute)
        hidden = shape.hidden_size
        self.mlp_size = shape.mlp_ratio * shape.hidden_size
        self.modulation = Modulation(hidden, 3)
        self.into = nn.Linear(hidden, 3 * hidden + self.mlp_size)
        self.norm = HeadNorm(shape.head_dim)
        self.out = nn.Linear(hidden + self.mlp_size, hidden)

    def run(self, x: Tensor, c: Tensor, rope: Tensor) -> Tensor:
        """Return the new x [B, N, D], text tokens first. c: [B, D]. rope: from `rope_table`."""
        shift, scale, gate = self.modulation(c)
        sizes = (3 * x.shape[-1], self.mlp_size)
        qkv, up = self.into(normalize(x, shift, scale)).split(sizes, dim=-1)
        q, k, v = self.norm(qkv)
        attended = attention(q, k, v, rope)
        inner = F.gelu(up, approximate="tanh")
        return torch.addcmul(x, gate, self.out(torch.cat((attended, inner), dim=-1)))


class Embedding(nn.Module):
    """A two-layer MLP with SiLU between the layers, [B, size] -> [B, D]."""

    def __init__(self, size: int, hidden_size: int):
        super().__init__()
        self.into = nn.Linear(size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.into(x.to(self.into.weight.dtype))))


class Inputs(nn.Module):
    """Projections of image and text tokens to the hidden size, and the conditioning vector c."""

    def __init__(self, shape: FluxShape):
        super().__init__()
        hidden = shape.hidden_size
        self.image = nn.Linear(shape.in_channels, hidden)
        self.text = nn.Linear(shape.context_size, hidden)
        self.time = Embedding(SINUSOIDS, hidden)
        self.guidance = Embedding(SINUSOIDS, hidden)
        self.pooled = Embedding(shape.pooled_size, hidden)

    def forward(
        self, latents: Tensor, text: Tensor, pooled: Tensor, time: Tensor, guidance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return image [B, S, D], text [B, T, D] and c [B, D]. Arguments: see `Flux.forward`."""
        c = self.time(sinusoids(time))
        c = c + self.guidance(sinusoids(guidance))
        c = c + self.pooled(pooled)
        return self.image(latents), self.text(text), c


class Outputs(nn.Module):
    """The last norm and the projection of image tokens [B, S, D] to [B, S, in_channels]."""

    def __init__(self, shape: FluxShape):
        super().__init__()
        self.modulation = Modulation(shape.hidden_size, 2)
        self.linear = nn.Linear(shape.hidden_size, shape.in_channels)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(normalize(x, *self.modulation(c)))


class Flux(nn.Module):
    def __init__(self, shape: FluxShape, recompute_blocks: int = 0):
        """Build the model.

        `recompute_blocks`: number of leading blocks that keep only their inputs for the backward.
        """
        super().__init__()
        self.inputs = Inputs(shape)
        recompute = [number < recompute_blocks for number in range(shape.blocks)]
        self.double_blocks = nn.ModuleList(
            DoubleBlock(shape, again) for again in recompute[: shape.double_blocks]
        )
        self.single_blocks = nn.ModuleList(
            SingleBlock(shape, again) for again in recompute[shape.double_blocks :]
        )
        self.outputs = Outputs(shape)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules in the order of the forward. Together they have every parameter once."""
        return [self.inputs, *self.double_blocks, *self.single_blocks, self.outputs]

    def forward(
        self,
        latents: Tensor,
        text: Tensor,
        pooled: Tensor,
        time: Tensor,
        guidance: Tensor,
        rope: Tensor,
    ) -> Tensor:
        """Return the velocity, [B, S, in_channels].

        Shapes, in the weights' dtype: latents [B, S, in_channels], text [B, T, context_size],
        pooled [B, pooled_size]. time (0: image, 1: noise) and guidance are fp32 [B]. rope comes
        from `rope_table`.
        """
        image, text, c = self.inputs(latents, text, pooled, time, guidance)
        for block in self.double_blocks:
            image, text = block(image, text, c, rope)
        x = torch.cat((text, image), dim=1)
        for block in self.single_blocks:
            x = block(x, c, rope)
        return self.outputs(x[:, text.shape[1] :], c)
