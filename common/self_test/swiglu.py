"""Checks of SwiGLU in the epilogues of FP8 products, compared with the products and kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common import engines
from common.kernels.fp8 import AMAX
from common.kernels.swiglu import swiglu_engine
from common.model.block_ops import KERNEL_ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.self_test.kernel_cases import Draw, Output, Quantizers, Sizes
from common.self_test.kernels import KERNEL_DB, output_db
from common.self_test.results import Check

SWIGLU_AMAX = 1e-3  # largest relative difference of the amax
Step = Callable[[type[LinearLayers], Quantizers], tuple[Output, ...]]


def may_fuse_swiglu(sizes: Sizes) -> bool:
    """Return True if FP8 products of a config of these sizes may compute SwiGLU."""
    operations = engines.operations(sizes.fp8)
    return engines.SWIGLU in operations and KERNEL_ENGINES[sizes.kernels].may_fuse_swiglu


def swiglu_checks(sizes: Sizes, draw: Draw) -> Iterator[Check]:
    """Yield the checks of SwiGLU in epilogues, if an engine computes it there."""
    if not swiglu_engine(draw.device).engine.module:
        return  # `kernel_checks` checks the kernels
    for backward in (False, True):
        op = "SwiGLU backward in a product" if backward else "SwiGLU in a product"
        size = (sizes.tokens, 2 * sizes.shape.ffn_hidden_size, sizes.shape.hidden_size)
        yield Check(op, str(size), KERNEL_DB, partial(_fused_swiglu, backward, sizes, draw))


def _fused_swiglu(backward: bool, sizes: Sizes, draw: Draw) -> float:
    """Return the dB of a product with SwiGLU compared with a product and a kernel.

    Both run in a second step, with delayed scales. Returns NaN if their amaxes differ.
    """
    step = _step(backward, sizes, draw)

    def second_step(linear: type[LinearLayers]) -> tuple[tuple[Output, ...], Tensor]:
        """Return the results and the amaxes of all quantizers."""
        quantizers = Quantizers(sizes, draw.device)
        step(LinearLayers, quantizers)
        quantizers.scaling.step_done()
        results = step(linear, quantizers)
        return results, quantizers.scaling.scales[:, AMAX]

    truth, true_amaxes = second_step(LinearLayers)
    values, amaxes = second_step(DelayedScaling)
    if not torch.allclose(amaxes, true_amaxes, rtol=SWIGLU_AMAX, atol=0.0):
        return math.nan
    return min(output_db(*pair) for pair in zip(truth, values, strict=True))


def swiglu_work(sizes: Sizes, draw: Draw) -> Callable[[], object]:
    """Return SwiGLU of one layer with its two products, forward and backward, in a second step."""
    quantizers = Quantizers(sizes, draw.device)
    steps = [_step(backward, sizes, draw) for backward in (False, True)]
    for step in steps:
        step(LinearLayers, quantizers)
    quantizers.scaling.step_done()

    def work() -> None:
        for step in steps:
            step(DelayedScaling, quantizers)

    return work


def _step(backward: bool, sizes: Sizes, draw: Draw) -> Step:
    """Return the function that computes SwiGLU with its product, by a class of linear layers."""
    ops = KERNEL_ENGINES[sizes.kernels]
    ffn = sizes.shape.ffn_hidden_size
    hidden = sizes.shape.hidden_size
    inputs = DelayedScaling()
    operand_quantizer = inputs.quantizer(gradient=backward, transposed=False)
    weight_quantizer = inputs.quantizer(weight=True)
    inputs.allocate(draw.device)
    operand = ops.quantize(draw(sizes.tokens, hidden, dtype=sizes.dtype), operand_quantizer)
    shape = (hidden, ffn) if backward else (2 * ffn, hidden)
    weight = ops.quantize(draw(*shape, dtype=sizes.dtype, scale=hidden**-0.5), weight_quantizer)
    gate_up = draw(sizes.tokens, 2 * ffn, dtype=sizes.dtype)

    def step(linear: type[LinearLayers], quantizers: Quantizers) -> tuple[Output, ...]:
        arguments = quantizers.scaling, ops, operand, weight
        if not backward:
            return linear.gate_up_swiglu(*arguments, quantizers.forward, quantizers.kept)
        kept = ops.quantize(gate_up, quantizers.kept) if quantizers.kept else gate_up
        return (linear.down_swiglu_backward(*arguments, kept, quantizers.gradient),)

    return step
