"""Learning rates by step. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(
    base: float, end: float, warmup_steps: int, max_steps: int
) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: a linear warm-up, then a half cosine.

    The rate is base*(s+1)/(W+1) up to step s = W = `warmup_steps`. A half cosine from base to end
    follows, up to `max_steps`.

    Source: NeMo 2, core/optim/lr_scheduler.py (CosineAnnealing with linear warm-up), as used by the
    llama31_8b reference.
    """
    decay_steps = max_steps - warmup_steps

    def lr_at(step: int) -> float:
        if step <= warmup_steps and warmup_steps > 0:
            return base * (step + 1) / (warmup_steps + 1)
        if step >= max_steps:
            return end
        angle = math.pi * (step - warmup_steps) / decay_steps
        return end + (base - end) * (1 + math.cos(angle)) / 2

    return lr_at


def warmup_linear(
    base: float, end: float, warmup_steps: int, max_steps: int
) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: a linear warm-up, then a straight line.

    The rate is base*(s+1)/(W+1) up to step s = W = `warmup_steps`. A line from base to end follows,
    up to `max_steps`.
    """
    decay_steps = max_steps - warmup_steps

    def lr_at(step: int) -> float:
        if step < warmup_steps:
            return base * (step + 1) / (warmup_steps + 1)
        return base - (base - end) * min(1.0, (step - warmup_steps) / decay_steps)

    return lr_at


def warmup_constant(base: float, warmup_steps: int) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: a linear warm-up, then `base`.

    The rate is base*(s+1)/(W+1) up to step s = W = `warmup_steps`.
    """

    def lr_at(step: int) -> float:
        return base * (step + 1) / (warmup_steps + 1) if step < warmup_steps else base

    return lr_at


def cosine_to_zero(base: float, training_steps: int) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: a half cosine from `base` to 0.

    The rate is base*(1 + cos(pi*s/T))/2 in step s, and 0 from step T = `training_steps` on.

    Source: transformers, `get_cosine_schedule_with_warmup` without warm-up, as used by the
    llama2_70b_lora reference, whose rate would rise again after T.
    """

    def lr_at(step: int) -> float:
        if step >= training_steps:
            return 0.0
        return base * (1 + math.cos(math.pi * step / training_steps)) / 2

    return lr_at
