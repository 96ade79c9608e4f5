"""Learning rates by step. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(
    base: float, end: float, warmup_steps: int, max_steps: int
) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: a linear warm-up, then a half cosine.

    The rate is base*(s+1)/(W+1) for s <= W, then a half cosine from base to end over max_steps - W
    steps.

    Source: NeMo 2, core/optim/lr_scheduler.py (CosineAnnealing with linear warm-up), as used by the
    llama31_8b reference.
    """
    decay_steps = max_steps - warmup_steps

    def lr_at(step: int) -> float:
        if step <= warmup_steps and warmup_steps > 0:
            return base * (step + 1) / (warmup_steps + 1)
        if step >= max_steps:
            return end
        return (
            end + (base - end) * (1 + math.cos(math.pi * (step - warmup_steps) / decay_steps)) / 2
        )

    return lr_at


def cosine_to_zero(base: float, training_steps: int) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: base*(1 + cos(pi*s/T))/2, and 0 from T =
    `training_steps` on.

    Source: transformers, `get_cosine_schedule_with_warmup` without warm-up, as used by the
    llama2_70b_lora reference. Unlike there, the rate stays 0 after T, where the formula would rise
    again.
    """

    def lr_at(step: int) -> float:
        return (
            base * (1 + math.cos(math.pi * step / training_steps)) / 2
            if step < training_steps
            else 0.0
        )

    return lr_at
