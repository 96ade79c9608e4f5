"""Checks of matrix products: some rows and columns of each, compared with fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common.kernels.architecture import dtype_name
from common.kernels.fp8 import (
    QuantizedTensor,
    Quantizer,
    dgrad,
    fprop,
    product_engine,
    takes_every_layout,
    wgrad,
)
from common.model.block_ops import KERNEL_ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.model.shapes import ModelShape
from common.self_test.kernel_cases import Draw, Sizes
from common.self_test.results import Check, SelfTestResult, all_finite, decibels

# Minimum dB of a correct result. Rounding it to bf16 alone gives 56 dB. FP8 products sum in some 14
# bits on Hopper.
PRODUCT_DB = 40.0
FP8_PRODUCT_DB = 25.0
SLICE = 256  # number of rows and columns of a product that are compared
# Rows, outputs, inputs of the bf16 product that gave NaN with ROCm 7.12 (rocm-libraries#9055).
SPLIT_K = (546, 9728, 2560)


def product_checks(sizes: Sizes, draw: Draw) -> Iterator[Check]:
    """Yield a check for each matrix product, of size (M, N, K): rows, columns, summed dimension."""
    shape = sizes.shape
    tokens = sizes.tokens
    trains = not sizes.lora_rank
    linears = linear_sizes(shape) | {"head": (shape.hidden_size, shape.vocab_size)}
    for name, (inputs, outputs) in linears.items():
        fp8 = sizes.fp8 and name != "head"
        op = "FP8 product" if fp8 else f"{dtype_name(sizes.dtype)} product"
        products = {
            "fprop": (tokens, outputs, inputs),
            "dgrad": (tokens, inputs, outputs),
            "wgrad": (outputs, inputs, tokens),
        }
        least = FP8_PRODUCT_DB if fp8 else PRODUCT_DB
        for product, size in products.items():
            if trains or product != "wgrad":
                measure = partial(_product, product, size, fp8, sizes, draw)
                yield Check(f"{op} {name} {product}", str(size), least, measure)
    if draw.device.type == "cuda":
        measure = partial(_product, "fprop", SPLIT_K, False, sizes, draw)
        yield Check("bf16 product", str(SPLIT_K), PRODUCT_DB, measure)


def linear_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return name -> (inputs, outputs) of each linear layer of a block."""
    return {
        "qkv": (shape.hidden_size, shape.qkv_size),
        "o": (shape.attention_size, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.ffn_hidden_size),
        "down": (shape.ffn_hidden_size, shape.hidden_size),
    }


def product_work(sizes: Sizes, draw: Draw) -> Callable[[], object]:
    """Return all products of one layer, forward and backward, on operands as in a step."""
    trains = not sizes.lora_rank
    scaling = DelayedScaling() if sizes.fp8 else LinearLayers()
    shapes = linear_sizes(sizes.shape).values()
    quantizers = [
        (
            scaling.quantizer(transposed=trains),
            scaling.quantizer(weight=True),
            scaling.quantizer(gradient=True, transposed=trains),
        )
        for _ in shapes
    ]
    scaling.allocate(draw.device)
    quantize = KERNEL_ENGINES[sizes.kernels].quantize
    operands = []
    for (inputs, outputs), of_layer in zip(shapes, quantizers, strict=True):
        rows = ((sizes.tokens, inputs), (outputs, inputs), (sizes.tokens, outputs))
        drawn = [draw(*size, dtype=sizes.dtype) for size in rows]
        operands.append([quantize(*pair) for pair in zip(drawn, of_layer, strict=True)])

    def work() -> None:
        for x, weight, g in operands:
            fprop(x, weight)
            dgrad(g, weight)
            if trains:
                wgrad(g, x)

    return work


def cublaslt_choices(result: SelfTestResult) -> list[str]:
    """Return the algorithms that the cublaslt engine has chosen so far, with their times."""
    if result.products != "cublaslt":
        return []
    # The module of an engine is imported only if the engine is chosen.
    from common.kernels.cublaslt import CHOICES

    return CHOICES


def _product(
    product: str, size: tuple[int, int, int], fp8: bool, sizes: Sizes, draw: Draw
) -> float:
    """Return the dB of a product a b^T, of `a` [M, K] and `b` [N, K], quantized as in a step.

    `product`: "fprop", "dgrad" or "wgrad".
    `size`: (M, N, K).

    Gradients are e5m2, and operands have the layouts that the step multiplies.
    """
    m, n, k = size
    a_quantizer: Quantizer | None = None
    b_quantizer: Quantizer | None = None
    if fp8:
        scaling = DelayedScaling()
        a_quantizer = scaling.quantizer(gradient=product != "fprop", transposed=False)
        b_quantizer = scaling.quantizer(transposed=False)
        scaling.allocate(draw.device)
    quantize = KERNEL_ENGINES[sizes.kernels].quantize
    a = quantize(draw(m, k, dtype=sizes.dtype), a_quantizer)
    b = quantize(draw(n, k, dtype=sizes.dtype), b_quantizer)
    value = _multiply(product, a, b, fp8)
    if not all_finite(value):
        return math.nan
    rows = torch.linspace(0, m - 1, min(SLICE, m), device=draw.device).long()
    columns = torch.linspace(0, n - 1, min(SLICE, n), device=draw.device).long()
    truth = _double(a, rows) @ _double(b, columns).t()
    return decibels(truth, value[rows][:, columns])


def _multiply(product: str, a: QuantizedTensor, b: QuantizedTensor, fp8: bool) -> Tensor:
    """Return a b^T, of `a` [M, K] and `b` [N, K], by the step's function for `product`."""
    device = a.rowwise.device
    if fp8 and not takes_every_layout(device):
        # A dgrad or wgrad of the step then makes the same call, with transposed copies.
        return fprop(a, b)
    is_torch = not product_engine(device, a.rowwise.dtype).engine.module
    if product == "fprop" and (fp8 or not is_torch):
        return fprop(a, b)
    if product == "fprop":
        # NaN in the result shows elements that were not stored.
        out = a.rowwise.new_full((a.rowwise.shape[0], b.rowwise.shape[0]), math.nan)
        return torch.mm(a.rowwise, b.rowwise.t(), out=out)
    b_transposed = b._replace(rowwise=b.rowwise.t().contiguous())
    if product == "dgrad":
        return dgrad(a, b_transposed)
    a_transposed = a._replace(rowwise=a.rowwise.t().contiguous())
    return wgrad(a_transposed, b_transposed)


def _double(x: QuantizedTensor, rows: Tensor) -> Tensor:
    """Return rows of a quantized tensor in fp64."""
    if x.inverse_scale is None:
        return x.rowwise[rows].double()
    # Viewed as uint8, because torch cannot index FP8 tensors.
    return x.rowwise.view(torch.uint8)[rows].view(x.rowwise.dtype).double() * x.inverse_scale
