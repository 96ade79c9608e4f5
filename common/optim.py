"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) on the local shards, with global-norm clipping folded into its step.

    m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  w -= lr*wd*w + lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)

torch's fused kernel does the update; it divides the gradients by `grad_scale` and skips the step where `found_inf` is 1.
We hand it max(1, norm/clip) and "the norm is not finite", both on the device: no pass over the gradients for clipping, no
host synchronisation, and not one weight is poisoned by a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    ):
        """`replicas` = 0: the parameters are sharded, and gradients arrive averaged over the ranks. Otherwise every one of
        so many ranks holds them whole, and `step` averages the gradients in one flat all-reduce.
        """
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shards = [local(p.detach()) for p in self.parameters]
        self.clip_norm, self.sum_over_ranks, self.replicas = clip_norm, sum_over_ranks, replicas
        # An empty shard (fewer rows than ranks) has nothing to update, and torch's kernel refuses it.
        decayed = [s for p, s in zip(self.parameters, self.shards, strict=True) if p.ndim >= 2 and s.numel()]
        plain = [s for p, s in zip(self.parameters, self.shards, strict=True) if p.ndim < 2 and s.numel()]
        groups = [{"params": shards, "weight_decay": decay} for shards, decay in ((decayed, weight_decay), (plain, 0.0)) if shards]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.reset_state()

    def reset_state(self) -> None:
        """Both moments zero and no step taken, as before the first step; memory is allocated the first time and kept."""
        for group in self.adamw.param_groups:
            for shard in group["params"]:
                state = self.adamw.state[shard]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
                    state["exp_avg"] = torch.zeros_like(shard)
                    state["exp_avg_sq"] = torch.zeros_like(shard)
                for tensor in state.values():
                    tensor.zero_()

    def state_tensors(self) -> list[Tensor]:
        return [t for group in self.adamw.param_groups for s in group["params"] for t in self.adamw.state[s].values()]

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Update the weights; returns the global L2 norm of the gradients before clipping, fp32 [] on the device.

        Where the norm is not finite nothing is updated: the caller sees it in the returned norm.
        """
        gradients = []
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = local(parameter.grad) if parameter.grad is not None else None
            if shard.grad is not None and shard.numel():
                gradients.append(shard.grad)
        if self.replicas:
            self._average(gradients)
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = self.sum_over_ranks(torch.nn.utils.get_total_norm(gradients).square()).sqrt()
        # Clipping multiplies by min(1, clip / norm), i.e. divides by max(1, norm / clip).
        # These two attributes are how torch's GradScaler speaks to the fused kernel.
        self.adamw.grad_scale = (norm / self.clip_norm).clamp(min=1.0)  # type: ignore[attr-defined]
        self.adamw.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        return norm

    def _average(self, gradients: list[Tensor]) -> None:
        flat = self.sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients])).div_(self.replicas)
        torch._foreach_copy_(
            gradients, [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
        )

    def zero_grad(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            parameter.grad = None
            shard.grad = None


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
