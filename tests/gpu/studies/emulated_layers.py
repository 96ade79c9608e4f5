"""Linear layers in an emulated block format, and the later switch to FP8 or bf16 ("healing").

`install` lets a config name such a format, in this process:

    linear = "mxfp4+stochastic until step 340, then fp8"

Until healing, the kernels store operands in the precision of the run. Each product first quantizes
and dequantizes its factors along the dimension that it sums over (block_formats.py). After
healing, products are computed in the format `then`. The history of FP8's scales begins there.

Emulation shows the numerics only. It is slower than native products would be, and it keeps two
copies of each weight in the precision of the run.

Attention, head, embedding and LoRA's adapters are not emulated. Neither is the copy of SwiGLU's
input that LoRA keeps, because no product reads it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import block_formats
import torch
from torch import Tensor

from common.kernels.fp8 import SCALE, QuantizedTensor, Quantizer
from common.linear_formats import FORMATS, LinearFormat
from common.model.linear_layers import BlockQuantizers, DelayedScaling, FrozenWeights, Quantize

# Names in the MLPerf log, by the name in a config.
PRECISIONS = {
    "mxfp8": "fp8",
    "mxfp8_hybrid": "fp8",
    "mxfp6_e2m3": "mxfp6",
    "mxfp6_e3m2": "mxfp6",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
# A format, its options in this order, and its end.
SYNTAX = re.compile(
    r"(?P<name>\w+)(?P<options>(\+stochastic)?(\+(random_)?hadamard)?(\+square_weights)?)"
    r"( until (?P<until>step [1-9]\d{0,7}|loss \d{1,3}(\.\d{1,9})?), then (?P<then>fp8|bf16))?",
    re.ASCII,
)


@dataclass(frozen=True)
class EmulatedFormat(LinearFormat):
    """An emulated block format. `in_fp8`: whether it heals to FP8."""

    options: tuple[str, ...] = ()
    # "step 340" or "loss 3.6": after this step, or at the first evaluation at or below this loss,
    # the format ends. "": it never ends.
    until: str = ""
    then: str = ""  # the format after that: "fp8" or "bf16"


def install(text: str) -> EmulatedFormat:
    """Let a config of this process name the format `text`. Return it. Raises ValueError."""
    match = SYNTAX.fullmatch(text)
    if match is None or match["name"] not in PRECISIONS:
        raise ValueError(f"{text!r} is not an emulated format")
    then = match["then"] or ""
    number_format = EmulatedFormat(
        match["name"],
        "emulated_layers:EmulatedLayers",
        PRECISIONS[match["name"]],
        weight_copies=2,  # casts have the precision of the run, in both layouts
        in_fp8=then == "fp8",
        emulated=True,
        options=tuple(match["options"].split("+")[1:]),
        until=match["until"] or "",
        then=then,
    )
    FORMATS[text] = number_format
    return number_format


class EmulatedLayers(DelayedScaling):
    """Linear layers that emulate a block format and, after healing, compute in format `then`."""

    def __init__(self, number_format: LinearFormat | None = None):
        super().__init__()
        assert isinstance(number_format, EmulatedFormat)
        self.format = number_format
        self.block_format = block_formats.BLOCK_FORMATS[number_format.name]
        self.stochastic = "stochastic" in number_format.options
        self.square_weights = "square_weights" in number_format.options
        self.transform = ""
        for option in ("hadamard", "random_hadamard"):
            if option in number_format.options:
                self.transform = option
        # Heal after `point` steps if `until` is "step", at a loss of `point` if it is "loss".
        self.until, _, point = number_format.until.partition(" ")
        self.point = float(point or 0)
        self.steps_done = 0
        self.healed = False

    # Casts. A native implementation would replace them.

    def _cast(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        *,
        gradient: bool = False,
        weight: bool = False,
    ) -> Tensor:
        """Quantize and dequantize `x` along its last dimension, over which the product sums.

        `dtype`: dtype of the result (default: `x.dtype`).
        """
        element = self.block_format.gradient_element if gradient else self.block_format.element
        return block_formats.emulate(
            x,
            self.block_format,
            element,
            dtype or x.dtype,
            square=weight and self.square_weights,
            stochastic=gradient and self.stochastic,
        )

    def _columns(self, x: Tensor, *, gradient: bool = False) -> QuantizedTensor:
        """Return a factor of wgrad, which sums over rows: only the cast transpose of `x`.

        A Hadamard transform pads the rows to a multiple of 16.
        """
        transposed = x.t()
        if self.transform:
            transposed = block_formats.hadamard(transposed, self.transform == "random_hadamard")
        return QuantizedTensor(
            x.new_empty(0, 0), self._cast(transposed, x.dtype, gradient=gradient)
        )

    # Operands and products.

    def active_quantizers(self, quantizers: BlockQuantizers) -> BlockQuantizers:
        if not self.format.in_fp8:
            return BlockQuantizers()
        if not self.healed:
            return BlockQuantizers(kept_gate_up=quantizers.kept_gate_up)
        return quantizers

    def weight(
        self, weight: Tensor, quantizer: Quantizer | None, quantize: Quantize
    ) -> QuantizedTensor:
        assert quantizer is not None
        if self.healed:
            return super().weight(weight, quantizer if self.format.in_fp8 else None, quantize)
        if quantizer.cached is None:
            rowwise = self._cast(weight, weight=True)
            if self.square_weights:
                # Square blocks are the same in both layouts.
                columnwise = rowwise.t().contiguous()
            else:
                columnwise = self._cast(weight.t(), weight=True)
            quantizer.cached = QuantizedTensor(rowwise, columnwise)
        return quantizer.cached

    def frozen_base(self, base: FrozenWeights) -> FrozenWeights:
        return EmulatedBase(base, self)

    def fprop(self, x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        if not self.healed:
            x = QuantizedTensor(self._cast(x.rowwise))
        return super().fprop(x, weight)

    def dgrad(self, g: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
        if not self.healed:
            g = QuantizedTensor(self._cast(g.rowwise, gradient=True))
        return super().dgrad(g, weight)

    def wgrad(self, g: QuantizedTensor, x: QuantizedTensor) -> Tensor:
        if self.healed:
            return super().wgrad(g, x)
        return super().wgrad(self._columns(g.rowwise, gradient=True), self._columns(x.rowwise))

    # State.

    def allocate(self, device: torch.device) -> None:
        """Allocate the state of FP8 with one more row, whose scale is the step of healing, or 0.

        That step is thereby part of every checkpoint.
        """
        # The quantizer of a weight, because `step_done` does not change its scale.
        self.quantizers.append(Quantizer(weight=True))
        super().allocate(device)

    def heal(self) -> None:
        """Compute products in the format `then` from now on."""
        self.healed = True
        # There is no history yet, so the next step scales every tensor by its own amax.
        super().reset()
        self.scales[-1, SCALE] = self.steps_done

    def resume(
        self, states: Sequence[dict[str, Tensor]], steps: int, gradient_ratio: float = 1.0
    ) -> None:
        healed_after = int(states[0]["fp8_state"][-1, SCALE])
        super().resume(states, steps - healed_after, gradient_ratio)
        self.steps_done = steps
        self.healed = healed_after > 0

    def reset(self) -> None:
        self.steps_done = 0
        self.healed = False
        super().reset()

    def step_done(self) -> None:
        super().step_done()
        self.steps_done += 1
        if self.until == "step" and self.steps_done == self.point:
            self.heal()

    def evaluated(self, loss: float) -> dict[str, object]:
        """Return entries for the run's records, with the format of this evaluation's products."""
        name = self.format.then if self.healed else f"{self.format.name}, emulated"
        entries = {"linear_format": name, **super().evaluated(loss)}
        if self.until == "loss" and not self.healed and loss <= self.point:
            self.heal()
        return entries


class EmulatedBase:
    """LoRA's frozen weights, in the emulated format until healing.

    The weights of a layer are cast whenever they are read. A base that is stored in FP8 was rounded
    to e4m3 before.
    """

    def __init__(self, base: FrozenWeights, linear: EmulatedLayers):
        self.base = base
        self.linear = linear

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        stored = self.base.forward_weights(layer)
        if self.linear.healed:
            return stored
        return {
            name: QuantizedTensor(self._cast(weight.rowwise, weight.inverse_scale))
            for name, weight in stored.items()
        }

    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        stored = self.base.backward_weights(layer)
        if self.linear.healed:
            return stored
        weights = {}
        for name, weight in stored.items():
            columnwise = weight.columnwise
            if columnwise is None:
                columnwise = weight.rowwise.t()
            weights[name] = QuantizedTensor(
                torch.empty(0, 0), self._cast(columnwise, weight.inverse_scale)
            )
        return weights

    def release(self, layer: int) -> None:
        self.base.release(layer)

    def _cast(self, stored: Tensor, inverse_scale: Tensor | None) -> Tensor:
        """Cast a stored matrix. The result has its dtype, or is bf16 if it is stored in FP8."""
        if inverse_scale is None:
            return self.linear._cast(stored, weight=True)
        return self.linear._cast(stored.float() * inverse_scale, torch.bfloat16, weight=True)
