"""The interface between an optimizer's update rule and its callers, and the table of update rules.

`ZeroOptimizer` and `ReplicatedOptimizer` reduce gradients, compute their norm and call a rule. They
construct none. The rule owns its state, and checkpoints use the rule's names for that state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from common.benchmarks import Rules
from common.sharding.adamw import AdamW, AdamWSettings


class Update(Protocol):
    """An update rule over a list of fp32 weights, without communication."""

    def update(
        self, gradients: Sequence[Tensor | None], norm: Tensor, learning_rate: float
    ) -> None:
        """Do one step, and write each new weight, rounded, to its tensor of `rounded`.

        `norm`: global L2 norm of the gradients, fp32 [] on the device. If it is not finite, nothing
            changes.
        """

    def state(self) -> dict[str, Tensor | list[Tensor]]:
        """Return name -> a tensor equal on all ranks, or one tensor of each weight's shape."""

    def reset(self) -> None:
        """Reset the state to its values before the first step."""


# Called with the fp32 weights, which the rule updates in place, and with `rounded`: None, or for
# each weight a tensor of its shape.
MakeUpdate = Callable[[Sequence[Tensor], Sequence[Tensor] | None], Update]


def state_tensors(update: Update) -> list[Tensor]:
    """Return all tensors of the rule's state."""
    state = update.state().values()
    whole = [tensor for tensor in state if isinstance(tensor, Tensor)]
    per_weight = [tensors for tensors in state if not isinstance(tensors, Tensor)]
    return [*whole, *(tensor for tensors in zip(*per_weight, strict=True) for tensor in tensors)]


def adamw(rules: Rules, kernels: str, state_dtype: torch.dtype) -> MakeUpdate:
    betas = (rules.adam_beta_1, rules.adam_beta_2)
    settings = AdamWSettings(
        betas, rules.adam_epsilon, rules.weight_decay, rules.gradient_clip_norm
    )
    return partial(AdamW, settings, kernels, state_dtype)


# `opt_name` of a benchmark's Rules -> a function of these Rules, the engine of the rule's kernel
# and the dtype of its state.
UPDATES: dict[str, Callable[[Rules, str, torch.dtype], MakeUpdate]] = {"adamw": adamw}


def claim(parameters: Sequence[torch.nn.Parameter], owner: object) -> None:
    """Record on each parameter which optimizer updates it.

    Raises ValueError if another one already does. Otherwise one of them would train a copy that the
    model never reads.
    """
    for parameter in parameters:
        if getattr(parameter, "owning_optimizer", owner) is not owner:
            raise ValueError(
                "this parameter belongs to another optimizer, and only that one updates the "
                "weights that the model reads"
            )
        parameter.owning_optimizer = owner  # type: ignore[attr-defined]


def require_owner(model: torch.nn.Module, owner: object) -> None:
    """Raise ValueError unless `owner` updates every parameter of `model` that trains."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and getattr(parameter, "owning_optimizer", None) is not owner:
            raise ValueError(f"{name} trains, but the optimizer of this model does not update it")
