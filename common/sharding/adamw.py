"""AdamW with global-norm clipping over a list of fp32 tensors, without communication.

The kernel (kernels/adamw.py) divides each gradient by max(1, norm / clip_norm), and writes nothing
if the norm is not finite. Both decisions are made on the device. So clipping needs no pass of its
own over the gradients and no host synchronization, and a NaN never reaches a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels import adamw


@dataclass(frozen=True)
class AdamWSettings:
    """Optimizer settings that the rules fix."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float  # decoupled; only for tensors with at least two dimensions
    clip_norm: float  # global L2 norm


class AdamW:
    """The AdamW update rule: both moments and the step count of a list of weights."""

    def __init__(
        self,
        settings: AdamWSettings,
        kernels: str,
        moment_dtype: torch.dtype,
        weights: Sequence[Tensor],
        rounded: Sequence[Tensor] | None,
    ):
        """Allocate the moments and set them to zero.

        `kernels`: "reference" or "triton".
        `moment_dtype`: dtype of both moments, fp32 or bf16.
        `weights`: fp32, updated in place.
        `rounded`: for each weight a tensor of its shape. `update` writes the new weight to it,
            rounded to its dtype. None: there are no such tensors.
        """
        self.weights = list(weights)
        self.settings = settings
        self.adamw = adamw.IMPLEMENTATIONS[kernels]
        self.rounded: Sequence[Tensor | None] = [None] * len(self.weights)
        if rounded is not None:
            self.rounded = rounded
        assert len(self.rounded) == len(self.weights)
        self.first = [torch.zeros_like(weight, dtype=moment_dtype) for weight in self.weights]
        self.second = [torch.zeros_like(weight, dtype=moment_dtype) for weight in self.weights]
        self.steps = torch.zeros((), dtype=torch.float32, device=self.weights[0].device)

    def state(self) -> dict[str, Tensor | list[Tensor]]:
        """Return name -> the step count, or a moment of each weight."""
        return {"steps": self.steps, "first_moment": self.first, "second_moment": self.second}

    def reset(self) -> None:
        """Set both moments and the step count to zero, as before the first step."""
        for tensor in (self.steps, *self.first, *self.second):
            tensor.zero_()

    @torch.no_grad()
    def update(
        self, gradients: Sequence[Tensor | None], norm: Tensor, learning_rate: float
    ) -> None:
        """Do one step.

        `gradients`: one per weight, not clipped. None: the weight stays unchanged.
        `norm`: global L2 norm of the gradients, fp32 [] on the device. If it is not finite, nothing
            is updated.
        """
        skip = (~torch.isfinite(norm)).float()  # 1 if nothing is updated
        self.steps += 1 - skip
        # Clipping: gradient * min(1, clip_norm / norm).
        divisor = (norm / self.settings.clip_norm).clamp(min=1.0)
        step = adamw.AdamWStep(
            learning_rate, self.settings.betas, self.settings.eps, self.steps, divisor, skip
        )
        tensors = zip(self.weights, gradients, self.first, self.second, self.rounded, strict=True)
        for weight, gradient, first, second, rounded in tensors:
            if gradient is not None:
                decay = self.settings.weight_decay if weight.ndim >= 2 else 0.0
                self.adamw(weight, gradient, first, second, rounded, decay, step)
