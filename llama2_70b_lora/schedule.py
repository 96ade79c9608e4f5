"""The learning rate of `llama2_70b_lora`: a half cosine from the base to 0. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine_to_zero(base: float, training_steps: int, warmup_ratio: float = 0.0) -> Callable[[int], float]:
    """lr_at(step), steps from 0: base*s/W for s < W = ceil(ratio*T), then base*(1 + cos(pi*(s-W)/(T-W)))/2, and 0 from T on.

    Source: transformers, `get_cosine_schedule_with_warmup` and `TrainingArguments.get_warmup_steps`, as the reference uses them.
    Unlike there, the rate stays 0 after T = `training_steps`, where the formula would climb the next half of the cosine.
    """
    warmup_steps = math.ceil(warmup_ratio * training_steps)

    def lr_at(step: int) -> float:
        if step < warmup_steps:
            return base * step / warmup_steps
        if step >= training_steps:
            return 0.0
        return base * (1 + math.cos(math.pi * (step - warmup_steps) / (training_steps - warmup_steps))) / 2

    return lr_at
