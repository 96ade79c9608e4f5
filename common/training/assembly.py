"""The objects that train: model, optimizer and the format of the linear layers; and how a global batch is divided into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from common.model.linear_layers import LinearLayers
from common.model.llama import Llama
from common.sharding.optimizer import require_owner

if TYPE_CHECKING:  # for the annotations only: a rank imports the one optimizer that it uses
    from common.sharding.replicated import ReplicatedOptimizer
    from common.sharding.zero import ZeroOptimizer

    Optimizer = ZeroOptimizer | ReplicatedOptimizer


@dataclass(frozen=True)
class Assembly:
    """What trains. Raises ValueError where a parameter trains that `optimizer` does not update."""

    model: Llama
    optimizer: Optimizer
    linear: LinearLayers

    def __post_init__(self) -> None:
        require_owner(self.model, self.optimizer)

    def step(self, learning_rate: float) -> Tensor:
        """After the last backward of a step: update the weights, then the state of the linear layers. Returns the gradient norm, fp32 [] on the device."""
        norm = self.optimizer.step(learning_rate)
        self.linear.step_done()
        return norm

    def state_tensors(self) -> list[Tensor]:
        """Everything that training changes in place: weights, optimizer state, FP8 scales."""
        return [
            *self.optimizer.weights,
            *self.optimizer.state_tensors(),
            *self.linear.state().values(),
        ]

    def reset(self) -> None:
        """Optimizer state and scales as before the first step. The weights stay."""
        self.optimizer.reset_state()
        self.linear.reset()


@dataclass(frozen=True)
class Batching:
    """How a global batch is cut: sequences per step, and micro-batches per rank and step."""

    global_batch_size: int
    gradient_accumulation_steps: int
