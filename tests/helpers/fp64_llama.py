"""A Llama in fp64 and plain torch, with or without adapters: the truth for one training step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from common.kernels.rope import rope_frequencies
from common.model.shapes import ModelShape

Masks = Mapping[str, Tensor]  # "layer.qkv" or "layer.o" -> scaled dropout mask [batch, sequence, K]


def sequence_losses(
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    labels: Tensor,
    adapter_scale: float = 0.0,
    masks: Masks | None = None,
) -> Tensor:
    """Return each sequence's mean loss over its valid tokens, fp64 [batch].

    `weights`: fp64, by the names of the model's parameters, with whole matrices of the blocks.
    `masks`: of the adapters' inputs.
    """

    def linear(x: Tensor, layer: int, name: str) -> Tensor:
        prefix = f"blocks.{layer}.{name}."
        y = x @ weights[prefix + "weight"].t()
        if adapter_scale and name in ("qkv", "o"):
            dropped = x * masks[f"{layer}.{name}"] if masks else x
            down = dropped @ weights[prefix + "lora_a"].t()
            y = y + adapter_scale * down @ weights[prefix + "lora_b"].t()
        return y

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + shape.norm_eps).rsqrt()
        return x * scale * weights[name + ".weight"]

    def rotated(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], dtype=torch.float32)
        angles = torch.outer(positions, rope_frequencies(shape))
        cos = angles.cos().double()[:, None]  # the rounded tables of the product
        sin = angles.sin().double()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    x = weights["embedding.weight"][tokens.long()]
    for layer in range(shape.num_layers):
        block = f"blocks.{layer}."
        qkv = linear(norm(x, block + "attention_norm"), layer, "qkv")
        q, k, v = qkv.unflatten(-1, (-1, shape.head_dim)).split([heads, kv_heads, kv_heads], 2)
        if shape.qk_norm:
            q = norm(q, block + "rotation.q_norm")
            k = norm(k, block + "rotation.k_norm")
        q, k, v = (part.transpose(1, 2) for part in (rotated(q), rotated(k), v))
        group = heads // kv_heads
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = q @ k.transpose(2, 3) / shape.head_dim**0.5
        length = tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + linear(attention.transpose(1, 2).flatten(2), layer, "o")
        gate, up = linear(norm(x, block + "ffn_norm"), layer, "gate_up").chunk(2, -1)
        x = x + linear(F.silu(gate) * up, layer, "down")
    output = weights["embedding.weight" if shape.tied_embedding else "head.output.weight"]
    logits = norm(x, "head.norm") @ output.t()
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten().long(), ignore_index=-100, reduction="none"
    )
    return losses.view_as(labels).sum(1) / (labels != -100).sum(1)
