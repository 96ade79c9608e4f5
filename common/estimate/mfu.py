"""Model FLOP/s utilization (MFU) by every convention in use. Standard library only.

Each convention gives another MFU for the same tokens per second. A multiply-add counts as 2 FLOPs.
With P weights, training takes 6 P FLOPs per token, in three products per weight: forward, gradient
of the input, and gradient of the weight. LoRA takes 4 P, since frozen weights have no gradient
(PaLM, arXiv:2204.02311, appendix B). Attention adds 12 L S H for the whole square of scores, or
6 L S H for the half that is not masked. If the shape is known, N stands for P without the
embedding, which is a lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.model.shapes import ModelShape

# Below this MFU, something is wrong: GPUs wait for the host, only one of many GPUs works, or the
# step is mostly compilation.
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
            "Above 100 % by one convention: the tokens, seconds, peak or number of GPUs must be "
            "wrong."
        )
    if highest < LOW:
        return (
            "Below 5 %: something is wrong, and faster kernels will not help. Look for GPUs that "
            "wait for data, for the host or for each other."
        )
    return ""
