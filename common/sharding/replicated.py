"""Optimizer of parameters that every rank has whole, such as LoRA's adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common.sharding.optimizer import MakeUpdateRule, claim, state_tensors
from common.sharding.processes import Processes


class ReplicatedOptimizer:
    """The optimizer of replicated parameters. One all-reduce averages all gradients of a step."""

    sharded = False

    def __init__(
        self, parameters: Iterable[nn.Parameter], processes: Processes, make_rule: MakeUpdateRule
    ):
        """Claim the parameters and create their update rule.

        `parameters`: fp32, equal on all ranks. They stay equal, because all ranks do the same
            updates.
        `make_rule`: creates their update rule.

        Raises ValueError if another optimizer owns one of them.
        """
        self.parameters = list(parameters)
        self.processes = processes
        claim(self.parameters, self)
        self.weights = [parameter.detach() for parameter in self.parameters]  # fp32
        self.rule = make_rule(self.weights, None)

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of the update rule's state."""
        return state_tensors(self.rule)

    def reset_state(self) -> None:
        """Reset gradients and the optimizer's state to their values before the first step."""
        self._zero_grad()
        self.rule.reset()

    def gather(self) -> None:
        """Do nothing: the update rule changes the parameters themselves."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Update the weights. Call it after the last backward of a step.

        Returns the global L2 norm of the gradients before clipping, fp32 [] on the device. If it is
        not finite, nothing is updated.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        self._average(present)
        norm = torch.nn.utils.get_total_norm(present)
        self.rule.update(gradients, norm, learning_rate)
        self._zero_grad()
        return norm

    def _average(self, gradients: list[Tensor]) -> None:
        """Average the gradients over the ranks, in place, by one all-reduce."""
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.processes.sum(flat).div_(self.processes.world_size)
        parts = flat.split([gradient.numel() for gradient in gradients])
        means = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(gradients, means)

    def _zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
