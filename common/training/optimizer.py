"""AdamW (kernels/adamw.py) on the local shards, with global-norm clipping folded into its step.

The kernel divides the gradients by max(1, norm/clip) and writes nothing where the norm is not finite; both are on the device: no pass
over the gradients for clipping, no host synchronisation, and not one weight is poisoned by a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.kernels import adamw

SumOverRanks = Callable[[Tensor], Tensor]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ClippedAdamW:
    """One optimizer step = norm of all gradients over all ranks, clipping, AdamW. 1-D parameters (norms) do not decay."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float,
        sum_over_ranks: SumOverRanks,
        replicas: int = 0,
        kernels: str = "reference",
        rounded: Sequence[Tensor] = (),
    ):
        """`replicas` = 0: the parameters are sharded, and gradients arrive averaged over the ranks. Otherwise every one of
        so many ranks holds them whole, and `step` averages the gradients in one flat all-reduce. `kernels`: "reference" or "triton".
        `rounded`: nothing, or for each parameter a tensor like its shard that `step` writes the new weights to, in its own dtype.
        """
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shards = [local(p.detach()) for p in self.parameters]
        self.rounded: Sequence[Tensor | None] = rounded or [None] * len(self.shards)
        assert len(self.rounded) == len(self.shards)
        self.betas, self.eps, self.weight_decay, self.adamw = betas, eps, weight_decay, adamw.ENGINES[kernels]
        self.clip_norm, self.sum_over_ranks, self.replicas = clip_norm, sum_over_ranks, replicas
        self.moments = [(torch.zeros_like(shard), torch.zeros_like(shard)) for shard in self.shards]
        self.steps = torch.zeros((), dtype=torch.float32, device=self.shards[0].device)

    def reset_state(self) -> None:
        """Both moments zero and no step taken, as before the first step."""
        for tensor in self.state_tensors():
            tensor.zero_()

    def state_tensors(self) -> list[Tensor]:
        return [self.steps, *(moment for pair in self.moments for moment in pair)]

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Update the weights; returns the global L2 norm of the gradients before clipping, fp32 [] on the device.

        Where the norm is not finite nothing is updated: the caller sees it in the returned norm.
        """
        # An empty shard (fewer rows than ranks) has nothing to update.
        gradients = {
            index: local(parameter.grad)
            for index, (parameter, shard) in enumerate(zip(self.parameters, self.shards, strict=True))
            if parameter.grad is not None and shard.numel()
        }
        if self.replicas:
            self._average(list(gradients.values()))
            norm = torch.nn.utils.get_total_norm(gradients.values())
        else:
            norm = self.sum_over_ranks(torch.nn.utils.get_total_norm(gradients.values()).square()).sqrt()
        skip = (~torch.isfinite(norm)).float()
        self.steps += 1 - skip
        divisor = (norm / self.clip_norm).clamp(min=1.0)  # clipping multiplies by min(1, clip / norm)
        step = adamw.Step(learning_rate, self.betas, self.eps, self.steps, divisor, skip)
        for index, gradient in gradients.items():
            decay = self.weight_decay if self.parameters[index].ndim >= 2 else 0.0
            self.adamw(self.shards[index], gradient, *self.moments[index], self.rounded[index], decay, step)
        return norm

    def _average(self, gradients: list[Tensor]) -> None:
        flat = self.sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients])).div_(self.replicas)
        torch._foreach_copy_(
            gradients, [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
        )

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def warmup_cosine(base: float, end: float, warmup_steps: int, max_steps: int) -> Callable[[int], float]:
    """lr_at(step), steps from 0: base*(s+1)/(W+1) for s <= W, then a half cosine from base to end over max_steps - W steps.

    Source: NeMo 2, core/optim/lr_scheduler.py (CosineAnnealing with linear warm-up), as the llama31_8b reference uses it.
    """
    decay_steps = max_steps - warmup_steps

    def lr_at(step: int) -> float:
        if step <= warmup_steps and warmup_steps > 0:
            return base * (step + 1) / (warmup_steps + 1)
        if step >= max_steps:
            return end
        return end + (base - end) * (1 + math.cos(math.pi * (step - warmup_steps) / decay_steps)) / 2

    return lr_at
