"""A linear layer without bias whose gradients are computed in FP8 and whose output is not: the output projection of the head.

The logits decide the loss, and rounding in them is error in every evaluation; the gradients bear it as those of the blocks do. The input and the
gradient of the output arrive in bf16, so each costs a cast; the two products are twice as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.kernels import quantize
from common.kernels.fp8 import DelayedScaling, QuantizedTensor, dgrad, quantize_weight, wgrad


class Fp8Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, kernels: str, scaling: DelayedScaling):
        super().__init__(inputs, outputs, bias=False)
        self.quantize = quantize.ENGINES[kernels]
        self.x_quantizer, self.gradient_quantizer = scaling.quantizer(), scaling.quantizer(gradient=True)
        self.weight_quantizer = scaling.quantizer(weight=True)

    def quantized_weight(self) -> QuantizedTensor:
        """Cast once per optimizer step."""
        return quantize_weight(self.weight, self.weight_quantizer, self.quantize)

    def forward(self, x: Tensor) -> Tensor:
        """x: bf16 [..., inputs] -> bf16 [..., outputs]."""
        return _Fp8Linear.apply(x, self.weight, self)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer: Fp8Linear) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        if any(ctx.needs_input_grad):
            ctx.x = layer.quantize(x.flatten(0, -2), layer.x_quantizer).for_wgrad()
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        layer: Fp8Linear = ctx.layer
        g = layer.quantize(d_out.flatten(0, -2), layer.gradient_quantizer)
        del d_out
        d_weight = wgrad(g, ctx.x, fast=False) if ctx.needs_input_grad[1] else None
        return dgrad(g, layer.quantized_weight(), fast=False).view(ctx.shape), d_weight, None
