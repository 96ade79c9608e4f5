"""Low-rank adapters on a frozen Llama (Hu et al., arXiv:2106.09685): y = x W^T + (alpha / rank) * dropout(x) A^T B^T.

They sit on the fused query-key-value projection, one A and one B for all three, and on the attention's output projection. Only A
and B train: fp32, whole on every rank, so only they have optimizer state and only their gradients travel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.kernels import lora_down
from common.model.llama import Llama, copy_into, parameter_seed


class LoRALinear(nn.Module):
    """A frozen linear without bias, `base`, and its adapter. `lora_a`: fp32 [rank, in]; `lora_b`: fp32 [out, rank]."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float, kernels: str = "reference"):
        super().__init__()
        self.down = lora_down.ENGINES[kernels]
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank, device=base.weight.device))
        self.scale, self.dropout = alpha / rank, dropout

    def forward(self, x: Tensor) -> Tensor:
        lora_a, lora_b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        down = self.down(x, lora_a, self.dropout) if self.training and self.dropout else F.linear(x, lora_a)
        return self.base(x) + F.linear(down, lora_b) * self.scale


def add_adapters(model: Llama, rank: int, alpha: float, dropout: float, kernels: str = "reference") -> list[nn.Parameter]:
    """Freeze `model` and put adapters on every block's qkv and o projection, in place. Returns the parameters that train."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "o"):
            setattr(block, name, LoRALinear(getattr(block, name), rank, alpha, dropout, kernels))
    return list(adapter_parameters(model).values())


def adapter_parameters(model: Llama) -> dict[str, nn.Parameter]:
    """Name -> parameter of all adapters, names as in `model.named_parameters()`."""
    return {name: p for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))}


def init_adapters(model: Llama, seed: int) -> None:
    """A: Kaiming uniform with a = sqrt(5), i.e. U(-1/sqrt(in), 1/sqrt(in)), as peft and NeMo do; B: zero, so the model starts as its base.

    Each tensor has its own generator on the CPU, seeded from (seed, name): equal on every rank and device.
    """
    for name, parameter in adapter_parameters(model).items():
        full = torch.zeros(parameter.shape)
        if name.endswith(".lora_a"):
            bound = 1 / math.sqrt(parameter.shape[1])
            full.uniform_(-bound, bound, generator=torch.Generator().manual_seed(parameter_seed(seed, name)))
            full += 0.0  # no -0.0: see init_weights
        copy_into(parameter, full)
