"""Rotary position embedding (Su et al., arXiv:2104.09864), rotate-half convention, with Llama 3.1's frequency scaling.

(a, b) -> (a cos - b sin, b cos + a sin), where a and b are the first and second half of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.shapes import ModelShape


def rope_frequencies(shape: ModelShape, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position, fp32 [head_dim / 2]: base^(-2i / head_dim), scaled as Llama 3.1 does where the shape says so.

    Llama 3.1 (model card; transformers' `llama3` rope type): wavelengths over old_context / low_frequency_factor are stretched by
    `factor`, those under old_context / high_frequency_factor stay, and in between the two are blended linearly.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequencies = 1.0 / shape.rope_base**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_context / wavelengths
    keep = (rotations - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: unchanged, 0: stretched by `factor`
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_tables(shape: ModelShape, sequence_length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each fp32 [sequence_length, head_dim / 2].

    Made on the CPU and copied, so that every device gets the same bits.
    """
    positions = torch.arange(sequence_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rope_frequencies(shape))
    return angles.cos().to(device), angles.sin().to(device)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, sequence, heads, head_dim]; cos, sin: fp32 [sequence, head_dim / 2]. Rotated in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


rope = rope_reference
