"""Low-rank adapters (LoRA) of a frozen Llama (Hu et al., arXiv:2106.09685).

    y = x W^T + (alpha / rank) * dropout(x) A^T B^T

There are two adapters per block. One is for the fused query, key and value projection, with one A
and one B for all three. The other is for the output projection of attention. Only A and B train.
They are fp32 and whole on every rank. Only they have optimizer state, and only their gradients are
communicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from common.model.initialization import parameter_seed


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of the adapters. The rules fix them."""

    rank: int
    alpha: int  # the adapter's output is multiplied by alpha / rank
    dropout: float  # on the adapter's input


class Adapter(nn.Module):
    """The weights of an adapter: `lora_a`, fp32 [rank, inputs]; `lora_b`, fp32 [outputs, rank]."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, inputs, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.empty(outputs, rank, dtype=torch.float32))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all adapters by their names in `model.named_parameters()`."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith((".lora_a", ".lora_b"))
    }


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialize all adapters as peft and NeMo do.

    A: Kaiming uniform with a = sqrt(5), that is U(-1/sqrt(inputs), 1/sqrt(inputs)). B: zero, so
    that the initial model computes the same as its base.
    """
    for name, parameter in adapter_parameters(model).items():
        full = torch.zeros(parameter.shape)
        if name.endswith(".lora_a"):
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = torch.Generator().manual_seed(parameter_seed(seed, name))
            full.uniform_(-bound, bound, generator=generator)
            full += 0.0  # turn -0.0 into 0.0, as in `init_weights`
        parameter.copy_(full)
