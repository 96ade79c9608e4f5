"""Model FLOP/s utilization by every convention in use. Standard library only.

The same tokens per second are a different MFU under each convention. A multiply-add is 2 FLOPs.
Training needs three products per weight and token (forward, gradient of the input, gradient of the
weight), 6 P FLOPs per token. LoRA has no gradient of the frozen weights: 4 P (PaLM,
arXiv:2204.02311, appendix B). Attention adds 12 L S H over the whole square of scores, or 6 L S H
over the half that is not masked. If the shape is known, N excludes the embedding, which is a
lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.model.shapes import ModelShape

# Below this MFU something is wrong, not slow: an idle host, one GPU of many, a step that is mostly
# compilation.
LOW = 0.05


@dataclass(frozen=True)
class Utilization:
    """TFLOP/s of one GPU by one convention, and their share of its peak."""

    formula: str
    tflops: float
    mfu: float


def utilization(
    parameters: float,
    tokens: float,
    seconds: float,
    gpus: int,
    peak: float,
    more: dict[str, float] | None = None,
) -> list[Utilization]:
    """Return the utilization by each formula.

    `tokens`: processed by all GPUs in `seconds`. `peak`: dense FLOP/s of one GPU. `more`: FLOPs per
    token by additional formulas.
    """
    formulas = {"full, 6 P": 6 * parameters, "LoRA, 4 P": 4 * parameters} | (more or {})
    rate = tokens / seconds / gpus
    return [
        Utilization(formula, rate * flops / 1e12, rate * flops / peak)
        for formula, flops in formulas.items()
    ]


def with_attention(shape: ModelShape, length: int, lora_rank: int) -> dict[str, float]:
    """Return FLOPs per token with attention over sequences of `length` tokens, by formula.

    `bench` and a run print the causal ones.
    """
    full = shape.training_flops_per_token(length)
    lora = shape.lora_flops_per_token(length, lora_rank)
    masked = shape.attention_flops_per_token(length)  # the masked half has the same number of FLOPs
    return {
        "full, 6 N + 6 L S H (causal)": full,
        "full, 6 N + 12 L S H": full + masked,
        f"LoRA, 4 N + 6 N_lora + 6 L S H (causal, rank {lora_rank})": lora,
        f"LoRA, 4 N + 6 N_lora + 12 L S H (rank {lora_rank})": lora + masked,
    }


def remark(found: list[Utilization]) -> str:
    """Return a remark on an implausible MFU, "" for a plausible one."""
    highest = max(each.mfu for each in found)
    if highest > 1:
        return (
            "Above 100 % by one convention: tokens, seconds, peak or number of GPUs cannot all be "
            "right."
        )
    if highest < LOW:
        return (
            "Below 5 %: something is wrong, and tuning kernels will not help. Look for GPUs that "
            "wait: for data, for the host, for each other."
        )
    return ""
