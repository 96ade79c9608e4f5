"""Training with the blocks' products in an emulated block format (kernels/block_formats.py), and healing: the later return to `fp8`.

The block stays the same, and so do its kernels: until healing, each writes its result in the compute dtype, and what was to be quantized
is quantized and dequantized after it, apart for each layout that a product reads. After healing the kernels quantize as the config's
`fp8` says, with scales that begin there. Emulation is for numerics: it is slower than the products it stands for, and keeps two
copies of 16 bits where FP8 keeps bytes. Imported only where a config asks for it.

Outside of it: attention, head and embedding, the adapters of LoRA, and what LoRA keeps of SwiGLU's input, which no product reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from common.config import RunConfig
from common.kernels import block_formats
from common.kernels.fp8 import SCALE, DelayedScaling, QuantizedTensor, Quantizer


class BlockQuantizer(Quantizer):
    """One tensor of the network: in the block format until healing, in FP8 with one scale after it."""

    def __init__(self, scaling: BlockScaling, gradient: bool = False, transposed: bool = True, weight: bool = False):
        super().__init__(gradient, transposed, weight)
        self.scaling = scaling

    def cast(self, x: Tensor) -> QuantizedTensor:
        """x: [rows, columns] -> dequantized, in x's dtype: `rowwise`, and `columnwise` [columns, rows] if this tensor has it.

        A transform before wgrad fills up `columnwise` to a multiple of 16 rows of x.
        """
        rowwise, columnwise = self.layout(x), None
        if self.transposed and self.weight and self.scaling.square_weights:
            columnwise = rowwise.t().contiguous()
        elif self.transposed:
            columnwise = self.layout(x.t() if self.weight else self.scaling.before_wgrad(x.t()), x.dtype)
        return QuantizedTensor(rowwise, columnwise)

    def layout(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x in one layout, the summed dimension last: the place of a native path."""
        form, scaling = self.scaling.format, self.scaling
        element = form.gradient_element if self.gradient else form.element
        square, stochastic = self.weight and scaling.square_weights, self.gradient and scaling.stochastic
        return block_formats.emulate(x, form, element, dtype or x.dtype, square=square, stochastic=stochastic)


class BlockScaling(DelayedScaling):
    """The state of all quantizers of a model: whether it has healed, and the FP8 scales after that."""

    def __init__(self, config: RunConfig):
        """`block_format`, `healing` and `fp8` of the config decide."""
        super().__init__()
        self.name, *options = config.block_format.split("+")
        self.format = block_formats.FORMATS[self.name]
        self.stochastic, self.square_weights = "stochastic" in options, "square_weights" in options
        self.transform = next((option for option in options if option.endswith("hadamard")), "")
        self.fp8 = bool(config.fp8)
        self.healing, _, point = config.healing.partition(" ")
        self.point = float(point or 0)
        self.steps_done, self.healed = 0, False

    def quantizer(self, **kind: bool) -> Quantizer:
        self.quantizers.append(BlockQuantizer(self, **kind))
        return self.quantizers[-1]

    def attach(self, model: torch.nn.Module) -> None:
        """As with FP8; and the ops of the blocks, of their rotation and of their adapters are called through this object."""
        super().attach(model)
        module: Any
        for module in model.modules():
            for name in {"ops", "lora"} & vars(module).keys():
                ops = getattr(module, name)
                setattr(module, name, replace(ops, **{field.name: self._emulating(getattr(ops, field.name)) for field in fields(ops)}))
            if "norm_rope_backward" in vars(module):
                module.norm_rope_backward = self._emulating(module.norm_rope_backward)

    def _emulating(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            quantizers = [arg for arg in args if isinstance(arg, BlockQuantizer)]
            # The first is that of a product's operand; SwiGLU has a second one, of what it keeps for its backward.
            operand = quantizers[0] if quantizers and not self.healed else None
            keeps = lambda arg: arg is not operand and self.fp8  # noqa: E731
            result = op(*(arg if not isinstance(arg, BlockQuantizer) or keeps(arg) else None for arg in args), **keywords)
            return result if operand is None else _with_operand(result, operand.cast)

        return run

    def before_wgrad(self, x: Tensor) -> Tensor:
        return block_formats.hadamard(x, self.transform == "random_hadamard") if self.transform else x

    # How it follows the training.

    def allocate(self, device: torch.device) -> None:
        """As with FP8; and one row more of the state, whose scale is the step of healing, or 0: it is part of every checkpoint."""
        self.quantizers.append(Quantizer(weight=True))  # no step changes the scale of a weight
        super().allocate(device)

    def heal(self) -> None:
        """From here on products are in `fp8`'s precision."""
        self.healed = True
        super().reset()  # no history of FP8 yet: the first step takes its scales from the tensors themselves
        self.state[-1, SCALE] = self.steps_done

    def resume(self, state: Tensor, history: Tensor, steps: int) -> None:
        healed_after = int(state[-1, SCALE])
        super().resume(state, history, steps - healed_after)
        self.steps_done, self.healed = steps, healed_after > 0

    def reset(self) -> None:
        self.steps_done, self.healed = 0, False
        super().reset()

    def step_done(self) -> None:
        super().step_done()
        self.steps_done += 1
        if self.healing == "step" and self.steps_done == self.point:
            self.heal()

    def evaluated(self, loss: float) -> dict[str, object]:
        """Also what this evaluation's products were in."""
        after = "fp8" if self.fp8 else "compute dtype"
        facts = {"linear_format": after if self.healed else f"{self.name}, emulated", **super().evaluated(loss)}
        if self.healing == "loss" and not self.healed and loss <= self.point:
            self.heal()
        return facts


def _with_operand(result: Any, cast: Callable[[Tensor], QuantizedTensor]) -> Any:
    """An op's result, made without a quantizer, with the operand of a product cast: a matrix that is all of it or its first one.

    The norm's backward leaves the operand out where it is the same as its first result.
    """
    if isinstance(result, QuantizedTensor):
        return cast(result.rowwise)
    place = next((place for place, part in enumerate(result) if isinstance(part, QuantizedTensor)), None)
    if place is None:
        return result[0], cast(result[0]), *result[2:]
    return *result[:place], cast(result[place].rowwise), *result[place + 1 :]


class StoredBase(Protocol):
    """A FrozenBase, as the blocks read it."""

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]: ...
    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]: ...
    def release(self, layer: int) -> None: ...


class BlockBase:
    """LoRA's frozen weights in the block format until healing, cast from what is stored whenever a layer is read.

    A base that is stored in FP8 has been rounded to e4m3 before.
    """

    def __init__(self, base: StoredBase, scaling: BlockScaling):
        self.base, self.scaling = base, scaling
        self.quantizer = BlockQuantizer(scaling, weight=True)
        self.release = base.release

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        stored = self.base.forward_weights(layer)
        return stored if self.scaling.healed else {name: QuantizedTensor(self._cast(w.rowwise, w.scale)) for name, w in stored.items()}

    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        stored = self.base.backward_weights(layer)
        if self.scaling.healed:
            return stored
        empty = torch.empty(0, 0)
        columnwise = {name: w.rowwise.t() if w.columnwise is None else w.columnwise for name, w in stored.items()}
        return {name: QuantizedTensor(empty, self._cast(columnwise[name], w.scale)) for name, w in stored.items()}

    def _cast(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """In the dtype of the products: that of the stored matrix, bf16 where it is in FP8."""
        return self.quantizer.layout(stored) if scale is None else self.quantizer.layout(stored.float() * scale, torch.bfloat16)
