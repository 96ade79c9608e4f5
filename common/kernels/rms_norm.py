"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467): y = x / sqrt(mean(x^2) + eps) * w."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., hidden], weight: [hidden]; result in x's dtype. The mean and the scaling are computed in fp32."""
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return (x_fp32 * rstd * weight.float()).to(x.dtype)


rms_norm = rms_norm_reference
