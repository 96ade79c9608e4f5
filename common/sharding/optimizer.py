"""The interface of update rules such as AdamW, and the table of them.

`ZeroOptimizer` and `ReplicatedOptimizer` reduce gradients, compute their norm and call the update
rule that they were created with. The rule owns its state and names it for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from common.benchmarks import Rules
from common.sharding.adamw import AdamW, AdamWSettings


class UpdateRule(Protocol):
    """An update rule over a list of fp32 weights, without communication."""

    def update(
        self, gradients: Sequence[Tensor | None], norm: Tensor, learning_rate: float
    ) -> None:
        """Do one step.

        Also write each new weight, rounded, to its tensor of `rounded` (see MakeUpdateRule).

        `gradients`: one per weight, not clipped. None: the weight stays unchanged.
        `norm`: global L2 norm of the gradients, fp32 [] on the device. If it is not finite, nothing
            changes.
        """

    def state(self) -> dict[str, Tensor | list[Tensor]]:
        """Return name -> state: one tensor, equal on all ranks, or a tensor for each weight."""

    def reset(self) -> None:
        """Reset the state to its values before the first step."""


# Creates an update rule from (weights, rounded). The rule updates the fp32 weights in place.
# `rounded`: for each weight a tensor of its shape, or None (see AdamW).
MakeUpdateRule = Callable[[Sequence[Tensor], Sequence[Tensor] | None], UpdateRule]


def state_tensors(rule: UpdateRule) -> list[Tensor]:
    """Return all tensors of the rule's state: first the shared ones, then each weight's."""
    state = rule.state().values()
    tensors = [value for value in state if isinstance(value, Tensor)]
    per_weight = [value for value in state if not isinstance(value, Tensor)]
    for tensors_of_weight in zip(*per_weight, strict=True):
        tensors += tensors_of_weight
    return tensors


def adamw(rules: Rules, kernels: str, state_dtype: torch.dtype) -> MakeUpdateRule:
    """Return the function that creates AdamW with the settings of the rules."""
    settings = AdamWSettings(
        betas=(rules.adam_beta_1, rules.adam_beta_2),
        eps=rules.adam_epsilon,
        weight_decay=rules.weight_decay,
        clip_norm=rules.gradient_clip_norm,
    )
    return partial(AdamW, settings, kernels, state_dtype)


# `opt_name` of a benchmark's Rules -> function of (rules, engine of the kernels, dtype of the
# state).
UPDATE_RULES: dict[str, Callable[[Rules, str, torch.dtype], MakeUpdateRule]] = {"adamw": adamw}


def claim(parameters: Sequence[torch.nn.Parameter], owner: object) -> None:
    """Record on each parameter which optimizer updates it.

    Raises ValueError if a parameter already has another owner: one of the two optimizers would
    train a copy that the model never reads.
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
