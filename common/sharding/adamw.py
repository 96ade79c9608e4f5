"""AdamW with global-norm clipping over a list of fp32 tensors: moments, step count and update, without any communication.

The kernel divides the gradients by max(1, norm / clip_norm) and writes nothing where the norm is not finite. Both are on the device: no
pass over the gradients for clipping, no host synchronization, and not one weight is poisoned by a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels import adamw


@dataclass(frozen=True)
class AdamWSettings:
    """What the rules fix about the optimizer."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float  # decoupled; of tensors with two dimensions or more
    clip_norm: float  # global L2 norm


class AdamW:
    def __init__(
        self,
        weights: Sequence[Tensor],
        settings: AdamWSettings,
        kernels: str,
        moment_dtype: torch.dtype = torch.float32,
        rounded: Sequence[Tensor] | None = None,
    ):
        """`weights`: fp32, updated in place. `kernels`: "reference" or "triton". `moment_dtype`: fp32 or bf16, in which both moments are kept.
        `rounded`: for each weight a tensor of its shape that `update` writes the new weight to, in its own dtype.
        """
        self.weights, self.settings, self.adamw = list(weights), settings, adamw.ENGINES[kernels]
        self.rounded: Sequence[Tensor | None] = rounded if rounded is not None else [None] * len(self.weights)
        assert len(self.rounded) == len(self.weights)
        self.moments = [tuple(torch.zeros_like(weight, dtype=moment_dtype) for _ in range(2)) for weight in self.weights]
        self.steps = torch.zeros((), dtype=torch.float32, device=self.weights[0].device)

    def state_tensors(self) -> list[Tensor]:
        """The step count and all moments."""
        return [self.steps, *(moment for pair in self.moments for moment in pair)]

    def reset(self) -> None:
        """Both moments zero and no step taken, as before the first step."""
        for tensor in self.state_tensors():
            tensor.zero_()

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], norm: Tensor, learning_rate: float) -> None:
        """One step. `norm`: global L2 norm of the gradients, fp32 [] on the device; where it is not finite nothing is updated.

        A weight without a gradient, or without elements (fewer rows than ranks), is left alone.
        """
        skip = (~torch.isfinite(norm)).float()
        self.steps += 1 - skip
        divisor = (norm / self.settings.clip_norm).clamp(min=1.0)  # clipping multiplies by min(1, clip_norm / norm)
        step = adamw.Step(learning_rate, self.settings.betas, self.settings.eps, self.steps, divisor, skip)
        for weight, gradient, (first, second), rounded in zip(self.weights, gradients, self.moments, self.rounded, strict=True):
            if gradient is not None and weight.numel():
                decay = self.settings.weight_decay if weight.ndim >= 2 else 0.0
                self.adamw(weight, gradient, first, second, rounded, decay, step)


def claim(parameters: Sequence[torch.nn.Parameter], owner: object) -> None:
    """Note on each parameter which optimizer updates it. Raises ValueError where another one does already: one would train a copy that the
    model never reads.
    """
    for parameter in parameters:
        if getattr(parameter, "owning_optimizer", owner) is not owner:
            raise ValueError("this parameter belongs to another optimizer, which alone updates the weights that the model reads")
        parameter.owning_optimizer = owner  # type: ignore[attr-defined]


def require_owner(model: torch.nn.Module, owner: object) -> None:
    """Raises ValueError unless `owner` updates every parameter of `model` that trains."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and getattr(parameter, "owning_optimizer", None) is not owner:
            raise ValueError(f"{name} trains, but the optimizer of this model does not update it")
