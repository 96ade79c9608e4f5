"""RMSNorm as a module: a weight and the kernel that reads it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.kernels import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, kernels: str = "reference"):
        super().__init__()
        self.rms_norm = rms_norm.ENGINES[kernels]
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.rms_norm(x_BSD, self.weight, self.eps)
