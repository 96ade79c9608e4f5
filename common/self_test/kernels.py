"""Checks of the Triton kernels, each compared with its reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from common.kernels.background_compilation import compiled_in_background
from common.kernels.fp8 import QuantizedTensor
from common.self_test.kernel_cases import Case, Draw, Output, Quantizers, Sizes, kernel_cases
from common.self_test.results import Check, decibels

# Minimum dB of a correct result. Kernels round as their references do, except for ties.
KERNEL_DB = 40.0


def kernel_checks(sizes: Sizes, draw: Draw) -> Iterator[Check]:
    """Yield a check for each Triton kernel."""
    if sizes.kernels == "triton":
        for op, shape, case in kernel_cases(sizes, draw):
            measure = partial(against_reference, case, sizes, draw.device)
            yield Check(f"triton {op}", str(shape), KERNEL_DB, measure)


def compile_kernels_in_background(
    sizes: Sizes, device: torch.device
) -> AbstractContextManager[None]:
    """Compile the kernels of `kernel_checks` during the block.

    At a machine's first start, they would take 12 s one after another (H100).
    """
    if sizes.kernels != "triton" or device.type != "cuda":
        return nullcontext()

    def launch_all() -> None:
        for _, _, case in kernel_cases(sizes, Draw(device)):
            with suppress(Exception):  # the checks meet the same error and report it
                _second_step("triton", case, sizes, device)

    return compiled_in_background(launch_all)


def against_reference(case: Case, sizes: Sizes, device: torch.device) -> float:
    """Return the dB of a kernel compared with its reference, in a second step.

    Scales are then delayed, so one launch stores and records.
    """
    results = [_second_step(engine, case, sizes, device) for engine in ("reference", "triton")]
    ratios = [output_db(*pair) for pair in zip(*results, strict=True)]
    return math.nan if any(map(math.isnan, ratios)) else min(ratios)


def _second_step(engine: str, case: Case, sizes: Sizes, device: torch.device) -> tuple[Output, ...]:
    """Return the results of a second step in FP8, or of the only one otherwise."""
    quantizers = Quantizers(sizes, device)
    results = case(engine, quantizers)
    if sizes.fp8:
        quantizers.scaling.step_done()
        results = case(engine, quantizers)
    return results


def output_db(truth: Output, value: Output) -> float:
    """Return the dB of one output of a kernel: inf if both are None, -inf if only one is."""
    if isinstance(truth, QuantizedTensor) and isinstance(value, QuantizedTensor):
        if value.columnwise is not None and not torch.equal(
            value.columnwise.view(torch.uint8), value.rowwise.view(torch.uint8).t()
        ):
            return -math.inf  # the transpose is wrong
        return decibels(_dequantized(truth), _dequantized(value))
    if isinstance(truth, Tensor) and isinstance(value, Tensor):
        return decibels(truth, value)
    return math.inf if truth is None and value is None else -math.inf


def _dequantized(x: QuantizedTensor) -> Tensor:
    return x.rowwise if x.inverse_scale is None else x.rowwise.float() * x.inverse_scale
