"""Model FLOP/s utilization (MFU): the share of a step that its products take at the dense peaks.

    MFU = seconds of the products at the peaks of their formats / seconds of the step

Products in FP8 count at the FP8 peak. Attention, adapters and head count at the bf16 peak. So MFU
cannot exceed 1, whatever the mix. `peak_tflops` is the one place that says so.

`plan --mfu` prints MFU by every convention in use, which count different FLOPs for the same tokens
per second. A multiply-add counts as 2 FLOPs. With P weights, training takes 6 P FLOPs per token, in
three products per weight: forward, gradient of the input, and gradient of the weight. LoRA takes
4 P, since frozen weights have no gradient (PaLM, arXiv:2204.02311, appendix B). Attention adds
12 L S H for the whole square of scores, or 6 L S H for the half that is not masked. If the shape is
known, N stands for P without the embedding, which is a lookup. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.model.shapes import ModelShape, TokenFlops

# Below this MFU, something is wrong: GPUs wait for the host, only one of many GPUs works, or the
# step is mostly compilation.
LOW = 0.05


@dataclass(frozen=True)
class Utilization:
    """TFLOP/s of one GPU by one convention, and their share of its peak."""

    formula: str
    tflops: float
    mfu: float


def peak_tflops(flops: TokenFlops, linears: float, others: float) -> float:
    """Return the dense peak of one GPU for the mix of products `flops`, in TFLOP/s.

    `linears` and `others`: peaks of the formats that compute these products, in TFLOP/s.
    """
    return flops.total / (flops.linears / linears + flops.others / others)


def by_parameters(parameters: float) -> dict[str, TokenFlops]:
    """Return FLOPs per token by formula, if only the number of weights is known."""
    return {
        "full, 6 P": TokenFlops(6 * parameters, 0),
        "LoRA, 4 P": TokenFlops(4 * parameters, 0),
    }


def with_attention(shape: ModelShape, length: int, lora_rank: int) -> dict[str, TokenFlops]:
    """Return FLOPs per token with attention over sequences of `length` tokens, by formula.

    `bench` and a run print the causal ones.
    """
    full = shape.training_flops(length)
    lora = shape.training_flops(length, lora_rank)
    masked = shape.attention_flops_per_token(length)  # the masked half has the same number of FLOPs
    return {
        "full, 6 N + 6 L S H (causal)": full,
        "full, 6 N + 12 L S H": replace(full, others=full.others + masked),
        f"LoRA, 4 N + 6 N_lora + 6 L S H (causal, rank {lora_rank})": lora,
        f"LoRA, 4 N + 6 N_lora + 12 L S H (rank {lora_rank})": replace(
            lora, others=lora.others + masked
        ),
    }


def utilization(
    formulas: dict[str, TokenFlops], rate: float, linears: float, others: float
) -> list[Utilization]:
    """Return the utilization by each formula.

    `rate`: tokens/s of one GPU. `linears` and `others`: see `peak_tflops`.
    """
    found = []
    for formula, flops in formulas.items():
        tflops = rate * flops.total / 1e12
        found.append(Utilization(formula, tflops, tflops / peak_tflops(flops, linears, others)))
    return found


def remark(found: list[Utilization]) -> str:
    """Return a remark on an implausible MFU, "" for a plausible one."""
    highest = max(each.mfu for each in found)
    if min(each.mfu for each in found) > 1:
        return (
            "Above 100 % by every convention: the tokens, seconds, precision, peak or number of "
            "GPUs must be wrong."
        )
    if highest > 1:
        return (
            "A convention above 100 % is not that of this step: it counts products that were not "
            "computed, or not at this precision."
        )
    if highest < LOW:
        return (
            "Below 5 %: something is wrong, and faster kernels will not help. Look for GPUs that "
            "wait for data, for the host or for each other."
        )
    return ""
