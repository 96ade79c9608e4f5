"""Objects of a training run, and the division of a global batch into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from common.model.linear_layers import LinearLayers
from common.model.llama import Llama
from common.sharding.optimizer import require_owner

if TYPE_CHECKING:  # For annotations only: a rank imports just the optimizer that it uses.
    from common.sharding.replicated import ReplicatedOptimizer
    from common.sharding.zero import ZeroOptimizer

    Optimizer = ZeroOptimizer | ReplicatedOptimizer


@dataclass(frozen=True)
class Assembly:
    """Objects of a run. Raises ValueError if a parameter that trains is not in `optimizer`."""

    model: Llama
    optimizer: Optimizer
    linear: LinearLayers

    def __post_init__(self) -> None:
        require_owner(self.model, self.optimizer)

    def step(self, learning_rate: float) -> Tensor:
        """Update the weights after the last backward of a step, then the state of the linear
        layers.

        Returns the gradient norm, fp32 [] on the device.
        """
        norm = self.optimizer.step(learning_rate)
        self.linear.step_done()
        return norm

    def state_tensors(self) -> list[Tensor]:
        """Return all that training changes in place: weights, optimizer state, FP8 scales."""
        return [
            *self.optimizer.weights,
            *self.optimizer.state_tensors(),
            *self.linear.state().values(),
        ]

    def reset(self) -> None:
        """Reset optimizer state and scales to those before the first step. Keeps the weights."""
        self.optimizer.reset_state()
        self.linear.reset()


@dataclass(frozen=True)
class Batching:
    """Division of a global batch: sequences per step, and micro-batches per rank and step."""

    global_batch_size: int
    gradient_accumulation_steps: int
