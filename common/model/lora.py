"""Low-rank adapters on a frozen Llama (Hu et al., arXiv:2106.09685): y = x W^T + (alpha / rank) * dropout(x) A^T B^T.

They sit on the fused query-key-value projection, one A and one B for all three, and on the attention's output projection. Only A
and B train: fp32, whole on every rank, so only they have optimizer state and only their gradients are communicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


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
    return {name: p for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))}
