"""Linear layers of a model's blocks in one number format: operands, products and state.

One LinearLayers object serves all blocks of a model. `LinearLayers` itself computes in the
precision of the run and is the base class of every format. `DelayedScaling` computes in FP8.
common/linear_formats.py lists the formats by their names in a config.

A block makes a quantizer for each operand, and its kernels store the operand as the quantizer says.
Without a quantizer they store it in the precision of the run. A format that no kernel can store
returns no quantizers and casts in the products instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from common import engines
from common.kernels import fp8
from common.kernels.fp8 import (
    AMAX,
    CLIPPED,
    HEADROOM,
    HISTORY,
    INVERSE,
    SCALE,
    QuantizedTensor,
    Quantizer,
    new_scale,
)
from common.kernels.swiglu import swiglu_engine
from common.linear_formats import LinearFormat
from common.model.block_ops import KernelEngine

Quantize = Callable[[Tensor, Quantizer | None], QuantizedTensor]  # an engine of kernels/quantize.py


@dataclass(frozen=True)
class BlockQuantizers:
    """Quantizers of a block's operands. None: kernels store it in the precision of the run."""

    n_1: Quantizer | None = None
    o: Quantizer | None = None
    n_2: Quantizer | None = None
    h: Quantizer | None = None
    d_qkv: Quantizer | None = None
    d_attention: Quantizer | None = None  # gradient of the output projection's result
    d_gate_up: Quantizer | None = None
    d_out: Quantizer | None = None
    # LoRA only: SwiGLU's input, kept in 8 bits for the backward.
    stored_gate_up: Quantizer | None = None

    @staticmethod
    def training(linear: LinearLayers) -> BlockQuantizers:
        """Return the quantizers of a block whose matrices train."""
        forward = {name: linear.quantizer() for name in ("n_1", "o", "n_2", "h")}
        names = [field.name for field in fields(BlockQuantizers)]
        backward = {
            name: linear.quantizer(gradient=True) for name in names if name.startswith("d_")
        }
        return BlockQuantizers(**forward, **backward)

    @staticmethod
    def frozen(linear: LinearLayers) -> BlockQuantizers:
        """Return the quantizers of a block whose matrices are frozen.

        They store rowwise only, because columnwise copies are for gradients of weights.
        """
        quantizers = {}
        for field in fields(BlockQuantizers):
            gradient = field.name.startswith("d_")
            quantizers[field.name] = linear.quantizer(gradient=gradient, transposed=False)
        return BlockQuantizers(**quantizers)


class FrozenWeights(Protocol):
    """LoRA's frozen matrices: qkv, o, gate_up and down of every layer, [N, K] each."""

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Return the layer's matrices, rowwise [N, K]."""

    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Return the layer's matrices for dgrad.

        In FP8 they are columnwise [K, N], and rowwise can be empty. Otherwise they are rowwise.
        """

    def release(self, layer: int) -> None:
        """Call when the current pass no longer needs the layer's matrices."""


class LinearLayers:
    """Linear layers in the precision of the run, without state."""

    def __init__(self, form: LinearFormat | None = None):
        """Prepare the format `form`, which only a class that implements several formats needs."""
        self.quantizers: list[Quantizer] = []

    # Operands.

    def quantizer(
        self, gradient: bool = False, transposed: bool = True, weight: bool = False
    ) -> Quantizer | None:
        """Return a new quantizer of one tensor of the network. Arguments as in `Quantizer`."""
        return None

    def stored(self, quantizers: BlockQuantizers) -> BlockQuantizers:
        """Return the quantizers with which a block's kernels store operands at this time."""
        return quantizers

    def weight(
        self, weight: Tensor, quantizer: Quantizer | None, quantize: Quantize
    ) -> QuantizedTensor:
        """Return `weight` [N, K] in the form that products read, cast once per optimizer step.

        `quantize`: the function that casts.
        """
        return fp8.quantize_weight(weight, quantizer, quantize)

    def frozen_base(self, base: FrozenWeights) -> FrozenWeights:
        """Return a frozen base whose weights have the form that products read."""
        return base

    # Products, as in kernels/fp8.py.

    def fprop(self, x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        """Return x W^T, [M, N], of `x` [M, K] and `weight` [N, K]."""
        return fp8.matmul(x, weight)

    def dgrad(self, g: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        """Return g W, [M, K], of `g` [M, N] and `weight` [N, K]."""
        return fp8.dgrad(g, weight)

    def wgrad(self, g: QuantizedTensor, x: QuantizedTensor) -> Tensor:
        """Return g^T x, [N, K], of `g` [M, N] and `x` [M, K]."""
        return fp8.wgrad(g, x)

    # Products with SwiGLU, as in kernels/swiglu.py.

    def gate_up_swiglu(
        self,
        ops: KernelEngine,
        x: QuantizedTensor,
        weight: QuantizedTensor,
        quantizer: Quantizer | None,
    ) -> tuple[Tensor, QuantizedTensor]:
        """Return (gate_up = x W^T [M, 2 * ffn], h [M, ffn] as stored by `quantizer`)."""
        gate_up = self.fprop(x, weight)
        h, _ = ops.swiglu(gate_up, quantizer)
        return gate_up, h

    def down_swiglu_backward(
        self,
        ops: KernelEngine,
        g: QuantizedTensor,
        weight: QuantizedTensor,
        gate_up: Tensor,
        quantizer: Quantizer | None,
    ) -> QuantizedTensor:
        """Return the gradient of gate_up, [M, 2 * ffn], from `g`, the gradient of h W^T."""
        d_h = self.dgrad(g, weight)
        return ops.swiglu_backward(d_h, gate_up, quantizer)

    # State.

    def allocate(self, device: torch.device) -> None:
        """Allocate the state on `device`.

        Call once, after the last `quantizer()` and before the first step.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that training changes in place, float or uint8, by name.

        Each rank has its own. Checkpoints use the names.
        """
        return {}

    def reset(self) -> None:
        """Restore the state from before the first step."""

    def resume(
        self, ranks: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        """Continue from a saved state.

        `ranks`: `state()` of this rank only, or of all ranks of a run with another number of ranks.
        `steps`: the optimizer steps that were done.
        `gradient_ratio`: how many times larger gradients are now. It is not 1 if the number of
            ranks changes, because the loss is multiplied by that number before the backward.
        """

    def start_pass(self, training: bool) -> None:
        """Call before each forward of the model.

        `training`: a micro-batch's forward. Otherwise it is an evaluation's, which must not change
            the state.
        """

    def step_done(self) -> None:
        """Call after each optimizer step."""

    def evaluated(self, loss: float) -> dict[str, object]:
        """Call after each evaluation. Returns entries for the run's records.

        The host may wait for the device.
        """
        return {}


class DelayedScaling(LinearLayers):
    """Linear layers in FP8, with the scales of all quantizers of a model on one device.

    The scales follow the amaxes of the last HISTORY steps (kernels/fp8.py).
    """

    def quantizer(
        self, gradient: bool = False, transposed: bool = True, weight: bool = False
    ) -> Quantizer:
        self.quantizers.append(Quantizer(gradient, transposed, weight))
        return self.quantizers[-1]

    def gate_up_swiglu(
        self,
        ops: KernelEngine,
        x: QuantizedTensor,
        weight: QuantizedTensor,
        quantizer: Quantizer | None,
    ) -> tuple[Tensor, QuantizedTensor]:
        if fused := epilogues(ops, x, quantizer):
            return fused.gate_up_fprop(x, weight, quantizer)
        return super().gate_up_swiglu(ops, x, weight, quantizer)

    def down_swiglu_backward(
        self,
        ops: KernelEngine,
        g: QuantizedTensor,
        weight: QuantizedTensor,
        gate_up: Tensor,
        quantizer: Quantizer | None,
    ) -> QuantizedTensor:
        if fused := epilogues(ops, g, quantizer):
            return fused.down_dgrad(g, weight, gate_up, quantizer)
        return super().down_swiglu_backward(ops, g, weight, gate_up, quantizer)

    def allocate(self, device: torch.device) -> None:
        formats = fp8.fp8_dtypes(device)
        every_layout = fp8.takes_every_layout(device)
        for quantizer in self.quantizers:
            quantizer.dtype = formats[quantizer.gradient]
            quantizer.transposed &= not every_layout
        self.scales = torch.zeros(len(self.quantizers), 4, dtype=torch.float32, device=device)
        self.history = torch.zeros(
            HISTORY, len(self.quantizers), dtype=torch.float32, device=device
        )
        # Weights keep the scale of their last cast.
        self.delayed = torch.tensor(
            [not quantizer.weight for quantizer in self.quantizers], device=device
        )
        self.largest = torch.tensor(
            [quantizer.largest for quantizer in self.quantizers], dtype=torch.float32, device=device
        )
        for quantizer, state in zip(self.quantizers, self.scales, strict=True):
            quantizer.state = state
        self.reset()

    def reset(self) -> None:
        """Forget the history and the cast weights, as before the first step."""
        self.scales.zero_()
        self.history.zero_()
        self.steps = 0
        self._start_step()

    def state(self) -> dict[str, Tensor]:
        """Return the states of the quantizers and the amaxes of earlier steps.

        They are fp32, [quantizers, 4] and [HISTORY, quantizers].
        """
        return {"fp8_state": self.scales, "fp8_history": self.history}

    def resume(
        self, ranks: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        """Continue with the smallest scale and the largest amaxes that any of the ranks had.

        Those of gradients are adapted to `gradient_ratio`.
        """
        scales = torch.stack([rank["fp8_state"] for rank in ranks])
        history = torch.stack([rank["fp8_history"] for rank in ranks])
        smallest = scales[:, :, SCALE].argmin(0)
        self.scales.copy_(scales[smallest, torch.arange(scales.shape[1])])
        self.history.copy_(history.amax(0))
        gradient = torch.tensor(
            [quantizer.gradient for quantizer in self.quantizers], device=self.scales.device
        )
        ratio = torch.where(gradient, gradient_ratio, 1.0)
        self.history *= ratio
        self.scales[:, SCALE] /= ratio
        self.scales[:, INVERSE] *= ratio
        self.steps = steps
        self._start_step()

    def _start_step(self) -> None:
        for quantizer in self.quantizers:
            quantizer.two_pass = quantizer.weight or self.steps == 0
            quantizer.cached = None

    def start_pass(self, training: bool) -> None:
        """Turn the recording of amaxes on for training and off for an evaluation."""
        for quantizer in self.quantizers:
            quantizer.recording = training

    def step_done(self) -> None:
        """Compute new scales from the amaxes of the last HISTORY steps, without a host sync."""
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = self.scales[:, AMAX]
        old = self.scales[:, SCALE]
        scale = torch.where(
            self.delayed, new_scale(self.largest, self.history.amax(0) * HEADROOM, old), old
        )
        self.scales[:, SCALE] = scale
        self.scales[:, INVERSE] = 1.0 / scale
        self.scales[:, AMAX] = 0.0
        self.steps += 1
        self._start_step()

    def evaluated(self, loss: float) -> dict[str, object]:
        return {"clipped_elements": self.take_clipped()}

    def take_clipped(self) -> int:
        """Return the number of elements that saturated since the last call.

        The host waits for the device.
        """
        clipped = int(self.scales[:, CLIPPED].sum())
        self.scales[:, CLIPPED] = 0.0
        return clipped


def epilogues(ops: KernelEngine, operand: QuantizedTensor, quantizer: Quantizer | None) -> Any:
    """Return the module whose FP8 products compute SwiGLU in their epilogues, or None.

    None also in a first step, in which the quantizer needs its amax before it stores.
    """
    if not ops.fuses or quantizer is None or quantizer.two_pass or operand.scale is None:
        return None
    engine = swiglu_engine(operand.rowwise.device).engine
    return engines.module_of(engine) if engine.module else None


def linear_layers(form: LinearFormat) -> LinearLayers:
    """Return a new implementation of `form`."""
    module, _, name = form.implementation.partition(":")
    return getattr(importlib.import_module(module), name)(form)
