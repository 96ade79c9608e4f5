"""Linear layers of a model's blocks in one number format: operands, products and state.

One LinearLayers object serves all blocks of a model. `LinearLayers` itself computes in the
precision of the run and is the base class of all formats. `DelayedScaling` computes in FP8.
common/linear_formats.py lists the formats by their names in a config.

In FP8, a block has a quantizer for each operand of its products, and the kernel that computes an
operand stores it in the quantizer's format. Without quantizers, kernels store operands in the
precision of the run. A format that no kernel can store has no quantizers and casts the operands
before each product.
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
    HEADROOM,
    HISTORY,
    INVERSE,
    SATURATED,
    SCALE,
    QuantizedTensor,
    Quantizer,
    new_scale,
)
from common.kernels.swiglu import swiglu_engine
from common.linear_formats import LinearFormat
from common.model.block_ops import KernelEngine
from common.sharding.context_parallel import ALONE

Quantize = Callable[[Tensor, Quantizer | None], QuantizedTensor]  # an engine of kernels/quantize.py


@dataclass(frozen=True)
class BlockQuantizers:
    """Quantizers of a block's operands, by their names in fused_block.py.

    None: kernels store the operand in the precision of the run.
    """

    n_1: Quantizer | None = None
    o: Quantizer | None = None
    n_2: Quantizer | None = None
    h: Quantizer | None = None
    d_qkv: Quantizer | None = None
    d_branch: Quantizer | None = None
    d_gate_up: Quantizer | None = None
    d_out: Quantizer | None = None
    # LoRA only: SwiGLU's input, kept in 8 bits for the backward.
    kept_gate_up: Quantizer | None = None

    @staticmethod
    def training(linear: LinearLayers) -> BlockQuantizers:
        """Return the quantizers of a block whose matrices train."""
        quantizers = {}
        for field in fields(BlockQuantizers):
            if field.name != "kept_gate_up":
                is_gradient = field.name.startswith("d_")
                quantizers[field.name] = linear.quantizer(gradient=is_gradient)
        return BlockQuantizers(**quantizers)

    @staticmethod
    def frozen(linear: LinearLayers) -> BlockQuantizers:
        """Return the quantizers of a block whose matrices are frozen.

        They store no columnwise copies, which only the gradients of weights need.
        """
        quantizers = {}
        for field in fields(BlockQuantizers):
            is_gradient = field.name.startswith("d_")
            quantizers[field.name] = linear.quantizer(gradient=is_gradient, transposed=False)
        return BlockQuantizers(**quantizers)


class FrozenWeights(Protocol):
    """The frozen matrices of LoRA: qkv, o, gate_up and down of every layer, [N, K] each."""

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Return the layer's matrices, rowwise [N, K]."""

    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Return the layer's matrices for dgrad.

        Products read `columnwise` [K, N] if it is not None. `rowwise` can then be empty. Otherwise
        they read `rowwise` [N, K].
        """

    def release(self, layer: int) -> None:
        """Release the layer's matrices. Call it once the current pass no longer needs them."""


class LinearLayers:
    """Linear layers in the precision of the run, without state."""

    def __init__(self, number_format: LinearFormat | None = None):
        """Create the layers. `number_format`: used by classes that implement several formats."""
        self.quantizers: list[Quantizer] = []
        self.context = ALONE  # the ranks that share each sequence

    # Operands.

    def quantizer(
        self, gradient: bool = False, transposed: bool = True, weight: bool = False
    ) -> Quantizer | None:
        """Return a new quantizer for one tensor of the network, or None if kernels do not quantize.

        Arguments: see `Quantizer`.
        """
        return None

    def active_quantizers(self, quantizers: BlockQuantizers) -> BlockQuantizers:
        """Return the quantizers that a block's kernels use in the current step."""
        return quantizers

    def weight(
        self, weight: Tensor, quantizer: Quantizer | None, quantize: Quantize
    ) -> QuantizedTensor:
        """Return `weight` [N, K] in the form that matrix products read.

        It is cast once per optimizer step. `quantize`: the function that casts.
        """
        return fp8.quantize_weight(weight, quantizer, quantize)

    def frozen_base(self, base: FrozenWeights) -> FrozenWeights:
        """Return a view of `base` whose weights have the form that matrix products read."""
        return base

    # Matrix products, as in kernels/fp8.py.

    def fprop(self, x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        """Return x W^T, [M, N], of `x` [M, K] and `weight` [N, K]."""
        return fp8.fprop(x, weight)

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
        kept_quantizer: Quantizer | None = None,
        keep: bool = True,
    ) -> tuple[Tensor | QuantizedTensor | None, QuantizedTensor]:
        """Return (gate_up = x W^T [M, 2 * ffn], h = swiglu(gate_up) [M, ffn]).

        `quantizer`: quantizer of h.
        `kept_quantizer`: quantizer of gate_up. It does not affect h.
        `keep`: return gate_up, for the backward. Otherwise None is returned in its place.
        """
        gate_up = self.fprop(x, weight)
        h, kept = ops.swiglu(gate_up, quantizer, kept_quantizer if keep else None)
        return kept if keep else None, h

    def down_swiglu_backward(
        self,
        ops: KernelEngine,
        g: QuantizedTensor,
        weight: QuantizedTensor,
        gate_up: Tensor | QuantizedTensor,
        quantizer: Quantizer | None,
    ) -> QuantizedTensor:
        """Return the gradient of gate_up, [M, 2 * ffn].

        `g`: gradient of h W^T, the output of `down`.
        `gate_up`: from `gate_up_swiglu`.
        `quantizer`: quantizer of the result.
        """
        d_h = self.dgrad(g, weight)
        return ops.swiglu_backward(d_h, gate_up, quantizer)

    # State.

    def allocate(self, device: torch.device) -> None:
        """Allocate the state on `device`.

        Call once, after the last `quantizer()` and before the first step.
        """

    def state(self) -> dict[str, Tensor]:
        """Return name -> tensor (float or uint8) of the state that training changes in place.

        Each rank has its own state. Checkpoints use the names.
        """
        return {}

    def reset(self) -> None:
        """Restore the state to its values before the first step."""

    def resume(
        self, states: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        """Continue from a saved state.

        `states`: saved `state()` of this rank only, or of all ranks if their number has changed.
        `steps`: number of optimizer steps that were done.
        `gradient_ratio`: factor by which gradients are larger than in the saved run. It is not 1 if
            the number of ranks has changed, because the loss is multiplied by that number before
            the backward.
        """

    def start_pass(self, training: bool) -> None:
        """Prepare for a forward of the model. Called before each one.

        `training`: whether the forward is one of training. One of an evaluation must not change the
            state.
        """

    def step_done(self) -> None:
        """Update the state. Called after each optimizer step."""

    def evaluated(self, loss: float) -> dict[str, object]:
        """Return entries for the run's records. Called after each evaluation.

        The host may wait for the device.
        """
        return {}


class DelayedScaling(LinearLayers):
    """Linear layers in FP8 with delayed scaling (kernels/fp8.py).

    The states of all quantizers of the model are the rows of one tensor, so that few kernels update
    all scales after a step.
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
        kept_quantizer: Quantizer | None = None,
        keep: bool = True,
    ) -> tuple[Tensor | QuantizedTensor | None, QuantizedTensor]:
        epilogues = swiglu_epilogues(ops, x, quantizer)
        if epilogues is not None:
            return epilogues.gate_up_swiglu(x, weight, quantizer, kept_quantizer, keep)
        return super().gate_up_swiglu(ops, x, weight, quantizer, kept_quantizer, keep)

    def down_swiglu_backward(
        self,
        ops: KernelEngine,
        g: QuantizedTensor,
        weight: QuantizedTensor,
        gate_up: Tensor | QuantizedTensor,
        quantizer: Quantizer | None,
    ) -> QuantizedTensor:
        epilogues = swiglu_epilogues(ops, g, quantizer)
        if epilogues is not None:
            return epilogues.down_swiglu_backward(g, weight, gate_up, quantizer)
        return super().down_swiglu_backward(ops, g, weight, gate_up, quantizer)

    def allocate(self, device: torch.device) -> None:
        e4m3, e5m2 = fp8.fp8_dtypes(device)
        every_layout = fp8.takes_every_layout(device)
        for quantizer in self.quantizers:
            quantizer.dtype = e5m2 if quantizer.gradient else e4m3
            quantizer.transposed &= not every_layout
        # Columns: INVERSE, SCALE, AMAX, SATURATED.
        self.scales = torch.zeros(len(self.quantizers), 4, dtype=torch.float32, device=device)
        self.history = torch.zeros(
            HISTORY, len(self.quantizers), dtype=torch.float32, device=device
        )
        # `step_done` changes all scales except the weights', which each cast sets.
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
        """Clear the history and the cast weights, as before the first step."""
        self.scales.zero_()
        self.history.zero_()
        self.steps = 0
        self._start_step()

    def state(self) -> dict[str, Tensor]:
        """Return the quantizers' states [quantizers, 4] and the history of amaxes.

        The history is [HISTORY, quantizers], the last step first. Both are fp32.
        """
        return {"fp8_state": self.scales, "fp8_history": self.history}

    def resume(
        self, states: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        """Continue with the smallest scale and the largest amaxes of all saved ranks.

        Scales and amaxes of gradients are adapted to `gradient_ratio`. Otherwise, in a toy 8B that
        continued on six ranks instead of one, 20,560 elements saturated in the first step, not 16.
        """
        scales = torch.stack([state["fp8_state"] for state in states])
        history = torch.stack([state["fp8_history"] for state in states])
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
        """Drop the cast weights. In the first step, scale every tensor by its own amax."""
        for quantizer in self.quantizers:
            quantizer.two_pass = quantizer.weight or self.steps == 0
            quantizer.cached = None

    def start_pass(self, training: bool) -> None:
        """Record amaxes in forwards of training, but not of evaluations."""
        for quantizer in self.quantizers:
            quantizer.recording = training

    def step_done(self) -> None:
        """Compute new scales from the amaxes of the last HISTORY steps, without a host sync."""
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = self.scales[:, AMAX]
        # Scale by whole sequences: attention's output and the gradients of keys and values are
        # largest at the first tokens, which one rank has. By each rank's own amaxes, 4 to 61 times
        # as many elements saturated in the miniature's second step as with whole sequences on each
        # rank (two and four ranks a sequence, eight seeds).
        self.context.max_(self.history[0])
        old = self.scales[:, SCALE]
        new = new_scale(self.largest, self.history.amax(0) * HEADROOM, old)
        scale = torch.where(self.delayed, new, old)
        self.scales[:, SCALE] = scale
        self.scales[:, INVERSE] = 1.0 / scale
        self.scales[:, AMAX] = 0.0
        self.steps += 1
        self._start_step()

    def evaluated(self, loss: float) -> dict[str, object]:
        # The key in events.jsonl keeps its name. It counts saturated elements.
        return {"clipped_elements": self.take_saturated()}

    def take_saturated(self) -> int:
        """Return how many elements have saturated since the last call. Waits for the device."""
        saturated = int(self.scales[:, SATURATED].sum())
        self.scales[:, SATURATED] = 0.0
        return saturated


def swiglu_epilogues(
    ops: KernelEngine, operand: QuantizedTensor, quantizer: Quantizer | None
) -> Any:
    """Return the module whose FP8 products compute SwiGLU in their epilogues, or None.

    Also returns None in the first step, when the quantizer must know the amax before it stores.
    """
    if not ops.may_fuse_swiglu or operand.inverse_scale is None:
        return None
    if quantizer is None or quantizer.two_pass:
        return None
    engine = swiglu_engine(operand.rowwise.device).engine
    return engines.module_of(engine) if engine.module else None


def linear_layers(number_format: LinearFormat) -> LinearLayers:
    """Return a new implementation of `number_format`."""
    module, _, name = number_format.implementation.partition(":")
    return getattr(importlib.import_module(module), name)(number_format)
