"""The objects that a training loop works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from common.model.linear_layers import LinearLayers
from common.model.llama import Llama
from common.sharding.optimizer import require_owner

if TYPE_CHECKING:  # not at run time: a rank imports only the optimizer that it uses
    from common.sharding.replicated import ReplicatedOptimizer
    from common.sharding.zero import ZeroOptimizer

    Optimizer = ZeroOptimizer | ReplicatedOptimizer


@dataclass(frozen=True)
class Assembly:
    """A model, its optimizer and the state of its linear layers.

    Raises ValueError if a parameter that trains is not in `optimizer`.
    """

    model: Llama
    optimizer: Optimizer
    linear: LinearLayers

    def __post_init__(self) -> None:
        require_owner(self.model, self.optimizer)

    def step(self, learning_rate: float) -> Tensor:
        """Update the weights and the state of the linear layers, after the last backward of a step.

        Returns the gradient norm before clipping, fp32 [] on the device.
        """
        norm = self.optimizer.step(learning_rate)
        self.linear.step_done()
        return norm

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of the training state: fp32 weights, optimizer state, FP8 scales.

        With ZeRO-2 the weights are the masters. The model's parameters are rounded copies of them.
        """
        return [
            *self.optimizer.weights,
            *self.optimizer.state_tensors(),
            *self.linear.state().values(),
        ]

    def reset(self) -> None:
        """Reset optimizer state and scales to those before the first step, but not the weights."""
        self.optimizer.reset_state()
        self.linear.reset()


@dataclass(frozen=True)
class Batching:
    """The division of a global batch into micro-batches."""

    global_batch_size: int  # sequences per optimizer step, on all ranks together
    gradient_accumulation_steps: int  # micro-batches per rank and optimizer step
    # Yields the number of tokens in the global batch of each step that count, if the loss is their
    # mean. None: it is the mean of the sequences' losses.
    counted: Iterator[int] | None = None
