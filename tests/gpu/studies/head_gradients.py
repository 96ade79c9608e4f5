"""Errors of the output head's gradients in FP8 on real logits, for the study fp8_head.py.

The truth is the fp64 product of exact probabilities. Rows of d_W without a label in the batch are
sums of tiny positive probabilities times x. A row's growth is <error, true> / <true, true>: -1 if
the row becomes zero, 0 on average if the rounding is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from head_formats import (
    GRADIENTS,
    OTHERS,
    TENSOR,
    Rounding,
    Softmax,
    multiply,
    quantize,
    softmax_of,
)
from torch import Tensor

from common.model.llama import Llama
from common.self_test.results import decibels
from llama31_8b.rules import CLOSED

# A variant is unbiased if the mean growth of its rows is at most the larger of the two limits,
# over all rows and in each decile of the gradient's norm.
GROWTH_LIMIT = 1e-3
STANDARD_ERRORS = 3.0


class Sample(NamedTuple):
    """The head's inputs in one batch."""

    x: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    softmax: Softmax


def head_samples(model: Llama, batches: list[Tensor]) -> Iterator[Sample]:
    """Yield the head's inputs in each batch, int [B, 2, S], in bf16 as on a GPU."""
    weight = model.head.output.weight.detach().bfloat16()
    for batch in batches:
        tokens, labels = batch.unbind(1)
        kept: list[Tensor] = []
        hook = model.head.norm.register_forward_hook(lambda *call, kept=kept: kept.append(call[2]))
        model.eval()
        with torch.no_grad():
            model(tokens, labels)
        model.train()
        hook.remove()
        x = kept[0].flatten(0, 1).bfloat16()
        labels = labels.flatten().long()
        upstream = torch.full((len(x),), 1 / len(x), device=x.device)
        yield Sample(x, weight, softmax_of(x @ weight.t(), labels, upstream))


class Errors:
    """Sums over the rows of a gradient, and rows of its growth."""

    def __init__(self, true: Tensor, found: Tensor):
        """`true`, `found`: fp64 [rows, D]."""
        error = found - true
        square = (true * true).sum(1).clamp(min=1e-300)
        self.growth = (error * true).sum(1) / square
        self.relative = (error.square().sum(1) / square).sqrt()
        common = true.sum(0)
        self.common = float((error.sum(0) @ common) / (common @ common).clamp(min=1e-300))

    def row(self, order: Tensor) -> dict[str, Any]:
        """Return the measures. `order`: rows by the norm of the true gradient."""
        deciles = [self.growth[part] for part in order.chunk(10)]
        return {
            "growth": mean_of(self.growth),
            "negative": float((self.growth < 0).double().mean()),
            "error": float(self.relative.median()),
            "common": self.common,
            "deciles": [mean_of(part) for part in deciles],
            "decile errors": [float(self.relative[part].median()) for part in order.chunk(10)],
        }


def mean_of(values: Tensor) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(values.mean()), float(values.std(correction=0) / math.sqrt(len(values)))


def is_unbiased(measured: dict[str, Any]) -> bool:
    return all(
        abs(mean) <= max(GROWTH_LIMIT, STANDARD_ERRORS * error)
        for mean, error in (measured["growth"], *measured["deciles"])
    )


Variant = tuple[str, Callable[[Tensor, Tensor], Tensor]]


def variants(other: str, amax: float) -> Iterator[Variant]:
    """Yield (name, function) of pairs of formats, and of the GPU's FP8 products.

    A function returns p y^T in fp64 of p, fp32 [rows, K], and y, bf16 [D, K]. `other`: name of y.
    `amax`: of the whole softmax.
    """

    def rounded(x: Tensor, rounding: Rounding | None, amax: float | None = None) -> Tensor:
        if rounding is None:
            return x.bfloat16().double()
        return quantize(x, rounding, amax).dequantize()

    gradients: dict[str, Rounding | None] = {"bf16": None, **GRADIENTS}
    for other_name, other_rounding in OTHERS.items():
        for name, rounding in gradients.items():
            if other_name == "e4m3 stochastic" and name not in ("bf16", "e4m3 row stochastic"):
                continue
            yield (
                f"{name}, {other} {other_name}",
                lambda p, y, r=rounding, o=other_rounding: rounded(p, r, amax) @ rounded(y, o).t(),
            )
    for name in ("e4m3 row", "e4m3 row stochastic"):
        for fast in (True, False):
            yield (
                f"{name}, {other} e4m3, FP8 product{', fast sums' if fast else ''}",
                lambda p, y, r=GRADIENTS[name], fast=fast: multiply(
                    quantize(p, r), quantize(y, TENSOR), fast
                ).double(),
            )


class AdamW:
    """Moments of one variant's rows over the batches, without clipping."""

    def __init__(self) -> None:
        self.first: Tensor | float = 0.0
        self.second: Tensor | float = 0.0
        self.number = 0

    def update(self, gradient: Tensor) -> Tensor:
        beta_1, beta_2 = CLOSED.adam_beta_1, CLOSED.adam_beta_2
        g = gradient.float()
        self.first = beta_1 * self.first + (1 - beta_1) * g
        self.second = beta_2 * self.second + (1 - beta_2) * g * g
        self.number += 1
        root = (self.second / (1 - beta_2**self.number)).sqrt()
        return self.first / (1 - beta_1**self.number) / (root + CLOSED.adam_epsilon)


def flushed(p: Tensor, rounding: Rounding, amax: float) -> tuple[float, float]:
    """Return the share of the nonzero elements that become 0, and their share of the sum."""
    to_zero = (quantize(p, rounding, amax).values.float() == 0) & (p > 0)
    return float(to_zero.sum() / (p > 0).sum()), float((p * to_zero).sum() / p.sum())


def rows_without_label(samples: list[Sample], count: int) -> Tensor:
    """Return at most `count` vocabulary rows that no batch has as a label, drawn at random."""
    has_label = torch.zeros(len(samples[0].weight), dtype=torch.bool)
    for sample in samples:
        has_label[sample.softmax.labels.cpu()] = True
    rows = (~has_label).nonzero()[:, 0]
    if len(rows) < 16:  # as with a small vocabulary: the labels' columns are exact anyway
        print("fewer than 16 rows have no label: all rows, without their labels' part")
        rows = torch.arange(len(has_label))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]]
    # FP8 products need multiples of 16.
    return rows[: len(rows) // 16 * 16].to(samples[0].x.device)


def weight_rows(sample: Sample, rows: Tensor) -> Tensor:
    """Return rows of the transposed softmax, fp32 [rows, T]. 0 where the row is the label."""
    logits, lse, labels, upstream = sample.softmax
    p = (logits[:, rows].t().float() - lse).exp_() * upstream
    return p.masked_fill_(rows[:, None] == labels, 0.0).contiguous()


def measure_weight(samples: list[Sample], count: int, amax: float) -> dict[str, Any]:
    """Measure d_W in rows without a label, with AdamW's update after all batches."""
    rows = rows_without_label(samples, count)
    chosen = [("true", lambda p, y: p.double() @ y.double().t()), *variants("x", amax)]
    adams = {name: AdamW() for name, _ in chosen}
    results: dict[str, Any] = {}
    for number, sample in enumerate(samples, 1):
        p, y = weight_rows(sample, rows), sample.x.t().contiguous()
        for name, function in chosen:
            gradient = function(p, y)
            update = adams[name].update(gradient)
            if name == "true":
                true, true_update = gradient, update.double()
                order = true.square().sum(1).argsort()
            elif number == len(samples):
                results[name] = Errors(true, gradient).row(order)
                results[name]["AdamW"] = Errors(true_update, update.double()).row(order)
    root = (adams["true"].second / (1 - CLOSED.adam_beta_2 ** len(samples))).sqrt()
    return {
        "rows": len(rows),
        "below epsilon": float((root < CLOSED.adam_epsilon).double().mean()),
        "norms": [float(true[part].norm(dim=1).median()) for part in order.chunk(10)],
        "flushed": {name: flushed(p, rounding, amax) for name, rounding in GRADIENTS.items()},
        "variants": results,
    }


def measure_input(sample: Sample, count: int, amax: float) -> dict[str, Any]:
    """Measure d_x of `count` tokens, without the label's part. That part is exact."""
    tokens = slice(0, count)
    logits, lse, labels, upstream = sample.softmax
    part = Softmax(logits[tokens], lse[tokens], labels[tokens], upstream[tokens])
    p, y = part.matrix(), sample.weight.t().contiguous()
    true = p.double() @ y.double().t()
    whole = true + part.label_part().double()[:, None] * sample.weight[labels[tokens]].double()
    results: dict[str, Any] = {}
    for name, function in variants("W", amax):
        found = function(p, y)
        results[name] = Errors(true, found).row(true.square().sum(1).argsort())
        results[name]["dB"] = decibels(whole, whole + (found - true))
    return {
        "rows": len(p),
        "flushed": {name: flushed(p, rounding, amax) for name, rounding in GRADIENTS.items()},
        "variants": results,
    }


def measure_whole(sample: Sample, count: int, amax: float) -> dict[str, float]:
    """Return the dB of d_W over rows with and without labels, in the proportion of both."""
    labels = sample.softmax.labels
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(len(sample.weight), generator=generator)[:count]
    rows = rows[: len(rows) // 16 * 16].to(labels.device)
    p, y = weight_rows(sample, rows), sample.x.t().contiguous()
    at = rows[:, None] == labels
    label_part = at.double() * sample.softmax.label_part()
    whole = (p.double() + label_part) @ y.double().t()
    results: dict[str, float] = {}
    for name, function in variants("x", amax):
        if name.startswith("bf16"):  # rounds the label's column too
            found = function((p.double() + label_part).float(), y)
        else:
            found = function(p, y) + label_part @ y.double().t()
        results[name] = decibels(whole, found)
    return results


def print_gradients(measured: dict[str, Any]) -> None:
    """Print a line for each variant. Shrinkage, error and shares are in %."""
    for part in ("d_W", "d_x"):
        found = measured[part]
        if not found:
            continue
        if part == "d_W":
            norms = " ".join(f"{norm:.1e}" for norm in found["norms"])
            print(f"norms by decile: {norms}; sqrt(v) below epsilon: {found['below epsilon']:.1%}")
        lost = [f"{name} {a:.2%} ({b:.4%})" for name, (a, b) in found["flushed"].items()]
        print(f"{part}, elements that become 0 (their part of the sum): {', '.join(lost)}")
        print(
            f"| {part}, {found['rows']:,} rows | growth % | ± | negative % | common % | error % "
            "| decile 1 | 10 | AdamW % | ± | dB | unbiased |\n|" + "---|" * 12
        )
        for name, row in found["variants"].items():
            ratio = row.get("dB") or (measured["whole"] or {}).get(name, math.nan)
            adam = row.get("AdamW", {}).get("growth", (math.nan, math.nan))
            cells = [100 * row["growth"][0], 100 * row["growth"][1], 100 * row["negative"]]
            cells += [100 * row["common"], 100 * row["error"]]
            cells += [100 * row["deciles"][0][0], 100 * row["deciles"][-1][0]]
            cells += [100 * adam[0], 100 * adam[1], ratio]
            numbers = " | ".join(f"{cell:.3f}" for cell in cells)
            print(f"| {name} | {numbers} | {'yes' if is_unbiased(row) else 'NO'} |")


def verdict(results: dict[str, Any]) -> str:
    """Return which variants are unbiased at all steps."""
    lines = [f"\nUnbiased: at most {GROWTH_LIMIT:.1%} or {STANDARD_ERRORS:g} standard errors."]
    for part in ("d_W", "d_x"):
        at_steps = [measured[part]["variants"] for measured in results.values() if measured[part]]
        names = [name for name in at_steps[0] if all(is_unbiased(each[name]) for each in at_steps)]
        lines.append(f"{part} at steps {', '.join(results)}: {'; '.join(names) or 'none'}")
    return "\n".join(lines)
