"""Low-rank adapters on a frozen Llama (Hu et al., arXiv:2106.09685): y = x W^T + (alpha / rank) * dropout(x) A^T B^T.

They sit on the fused query-key-value projection, one A and one B for all three, and on the attention's output projection. Only A
and B train: fp32, whole on every rank, so only they have optimizer state and only their gradients are communicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from common.model.initialization import parameter_seed


@dataclass(frozen=True)
class AdapterSettings:
    """What the rules fix about the adapters."""

    rank: int
    alpha: int  # the adapter's output is multiplied by alpha / rank
    dropout: float  # on the adapter's input


class Adapter(nn.Module):
    """`lora_a`: fp32 [rank, in]; `lora_b`: fp32 [out, rank]."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, inputs, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.empty(outputs, rank, dtype=torch.float32))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of all adapters, names as in `model.named_parameters()`."""
    return {
        name: p for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))
    }


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """A: Kaiming uniform with a = sqrt(5), i.e. U(-1/sqrt(in), 1/sqrt(in)), as peft and NeMo do; B: zero, so the model starts as its base."""
    for name, parameter in adapter_parameters(model).items():
        full = torch.zeros(parameter.shape)
        if name.endswith(".lora_a"):
            bound = 1 / math.sqrt(parameter.shape[1])
            full.uniform_(
                -bound, bound, generator=torch.Generator().manual_seed(parameter_seed(seed, name))
            )
            full += 0.0  # no -0.0: see init_weights
        parameter.copy_(full)
