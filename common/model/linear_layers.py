"""The linear layers of a model's blocks in one number format: how operands are made and multiplied, and the state of that.

One LinearLayers serves all blocks of a model. `LinearLayers` itself computes in the precision of the run and is the base class
of every format; `DelayedScaling` computes in FP8. common/linear_formats.py lists the formats by their names in a config.

A block makes a quantizer for each operand, and its kernels store the operand as the quantizer says; without a quantizer they
store it in the precision of the run. A format that no kernel stores returns no quantizers and casts in the products instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

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
from common.linear_formats import LinearFormat

Quantize = Callable[[Tensor, Quantizer | None], QuantizedTensor]  # an engine of kernels/quantize.py


@dataclass(frozen=True)
class BlockQuantizers:
    """The quantizers of a block's operands; None for one that kernels store in the precision of the run."""

    n_1: Quantizer | None = None
    o: Quantizer | None = None
    n_2: Quantizer | None = None
    h: Quantizer | None = None
    d_qkv: Quantizer | None = None
    d_attention: Quantizer | None = None  # gradient of the output projection's result
    d_gate_up: Quantizer | None = None
    d_out: Quantizer | None = None
    # SwiGLU's input, kept in 8 bits for backward: LoRA only
    stored_gate_up: Quantizer | None = None

    @staticmethod
    def training(linear: LinearLayers) -> BlockQuantizers:
        """Return those of a block whose matrices train."""
        forward = {name: linear.quantizer() for name in ("n_1", "o", "n_2", "h")}
        names = [field.name for field in fields(BlockQuantizers)]
        backward = {
            name: linear.quantizer(gradient=True) for name in names if name.startswith("d_")
        }
        return BlockQuantizers(**forward, **backward)

    @staticmethod
    def frozen(linear: LinearLayers) -> BlockQuantizers:
        """Return those of a block whose matrices are frozen: rowwise only, since columnwise copies are for weight gradients."""
        names = [field.name for field in fields(BlockQuantizers)]
        return BlockQuantizers(
            **{
                name: linear.quantizer(gradient=name.startswith("d_"), transposed=False)
                for name in names
            }
        )


class FrozenWeights(Protocol):
    """Where the frozen matrices qkv, o, gate_up and down of every layer are, [N, K] each: LoRA only."""

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Rowwise, [N, K]."""

    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """In FP8 columnwise, [K, N], and rowwise may be empty; otherwise rowwise."""

    def release(self, layer: int) -> None:
        """This pass has used the layer."""


class LinearLayers:
    """Products in the precision of the run. Stateless."""

    def __init__(self, form: LinearFormat | None = None):
        """`form`: for a class that implements several formats."""
        self.quantizers: list[Quantizer] = []

    # Operands.

    def quantizer(
        self, gradient: bool = False, transposed: bool = True, weight: bool = False
    ) -> Quantizer | None:
        """Return a new quantizer of one tensor of the network; arguments as of `Quantizer`."""
        return None

    def stored(self, quantizers: BlockQuantizers) -> BlockQuantizers:
        """Return the quantizers of a block with which its kernels store operands now."""
        return quantizers

    def weight(
        self, weight: Tensor, quantizer: Quantizer | None, quantize: Quantize
    ) -> QuantizedTensor:
        """weight: [N, K] -> the weight as products read it, cast once per optimizer step."""
        return fp8.quantize_weight(weight, quantizer, quantize)

    def frozen_base(self, base: FrozenWeights) -> FrozenWeights:
        """Return a frozen base whose weights are as products read them."""
        return base

    # Products, as in kernels/fp8.py.

    def fprop(self, x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        """x: [M, K], weight: [N, K] -> x W^T, [M, N]."""
        return fp8.matmul(x, weight)

    def dgrad(self, g: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        """g: [M, N], weight: [N, K] -> g W, [M, K]."""
        return fp8.dgrad(g, weight)

    def wgrad(self, g: QuantizedTensor, x: QuantizedTensor) -> Tensor:
        """g: [M, N], x: [M, K] -> g^T x, [N, K]."""
        return fp8.wgrad(g, x)

    # State.

    def allocate(self, device: torch.device) -> None:
        """Make the state on `device`: once, after the last `quantizer()` and before the first step."""

    def state(self) -> dict[str, Tensor]:
        """Return name -> tensor that training changes in place, float or uint8. Each rank has its own; checkpoints use the names."""
        return {}

    def reset(self) -> None:
        """Set the state to what it was before the first step."""

    def resume(
        self, ranks: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        """Go on from `state()` after `steps` steps: of this rank alone, or of all ranks of a run with another number of ranks.

        `gradient_ratio`: how many times larger gradients are now. The loss is multiplied by the number of ranks before the backward.
        """

    def start_pass(self, training: bool) -> None:
        """Call before each forward of the model: a micro-batch's, or an evaluation's, which must leave no trace in the state."""

    def step_done(self) -> None:
        """Call after each optimizer step."""

    def evaluated(self, loss: float) -> dict[str, object]:
        """Call after each evaluation. Returns what the run's records say of it; the host may wait for the device."""
        return {}


class DelayedScaling(LinearLayers):
    """Products in FP8: the scales of all quantizers of a model, on one device, and how they follow the amaxes."""

    def quantizer(
        self, gradient: bool = False, transposed: bool = True, weight: bool = False
    ) -> Quantizer:
        self.quantizers.append(Quantizer(gradient, transposed, weight))
        return self.quantizers[-1]

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
        """Return the quantizers' states [quantizers, 4] and the amaxes of earlier steps [HISTORY, quantizers], both fp32."""
        return {"fp8_state": self.scales, "fp8_history": self.history}

    def resume(
        self, ranks: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        """Of several ranks, a quantizer takes the smallest scale and the largest amaxes that any of them had; those of gradients
        follow `gradient_ratio`."""
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
        """Record amaxes in training alone."""
        for quantizer in self.quantizers:
            quantizer.recording = training

    def step_done(self) -> None:
        """Compute new scales from the amaxes of the last HISTORY steps, on the device without a host sync."""
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
        """Return the number of elements that saturated since the last call. The host waits for the device."""
        clipped = int(self.scales[:, CLIPPED].sum())
        self.scales[:, CLIPPED] = 0.0
        return clipped


def linear_layers(form: LinearFormat) -> LinearLayers:
    """Return a new implementation of `form`."""
    module, _, name = form.implementation.partition(":")
    return getattr(importlib.import_module(module), name)(form)
