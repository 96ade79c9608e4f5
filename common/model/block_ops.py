"""Parts that all fused blocks share: the table of kernels, saved tensors, and RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.kernels import quantize, rms_norm, rope, swiglu
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.shapes import ModelShape


class SavedTensors:
    """Base of dataclasses of tensors that a forward keeps for its backward.

    The backward removes the members one by one.
    """

    def pop(self, name: str) -> Any:
        """Return a member and drop the reference to it, so that the caller can free its memory."""
        return self.__dict__.pop(name)


@dataclass(frozen=True)
class KernelEngine:
    """The operations of common/kernels/ in one of their two implementations."""

    quantize: Callable[..., QuantizedTensor]
    add_rms_norm: Callable[..., tuple[Tensor, QuantizedTensor, Tensor]]
    rms_norm_backward: Callable[..., tuple[Tensor, QuantizedTensor | None, Tensor | None]]
    rope_: Callable[..., Tensor]
    rope_backward: Callable[..., QuantizedTensor]
    swiglu: Callable[..., tuple[QuantizedTensor, Tensor | QuantizedTensor]]
    swiglu_backward: Callable[..., QuantizedTensor]
    # Whether FP8 products may compute SwiGLU in their epilogues where an engine does.
    fuses: bool


ENGINES = {
    "reference": KernelEngine(
        quantize.quantize_reference,
        rms_norm.add_rms_norm_reference,
        rms_norm.rms_norm_backward_reference,
        rope.rope_packed_reference_,
        rope.rope_packed_backward_reference,
        swiglu.swiglu_quantized_reference,
        swiglu.swiglu_quantized_backward_reference,
        fuses=False,
    ),
    "triton": KernelEngine(
        quantize.quantize_triton,
        rms_norm.add_rms_norm_triton,
        rms_norm.rms_norm_backward_triton,
        rope.rope_packed_triton_,
        rope.rope_packed_backward_triton,
        swiglu.swiglu_quantized_triton,
        swiglu.swiglu_quantized_backward_triton,
        fuses=True,
    ),
}


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (RoPE) of the query and key heads, before attention."""

    def __init__(self, shape: ModelShape, ops: KernelEngine):
        super().__init__()
        self.shape = shape
        self.ops = ops

    def rotate_(self, qkv: Tensor, cos: Tensor, sin: Tensor, keep: bool) -> Tensor | None:
        """Rotate the query and key heads of `qkv` [M, qkv_size] in place.

        Returns a tensor that the backward needs besides the result, if there is one and `keep` is
        set. Plain RoPE needs none.
        """
        self.ops.rope_(qkv, cos, sin, self.shape.num_heads, self.shape.num_kv_heads)
        return None

    def backward(
        self,
        gradients: tuple[Tensor, ...],
        qk_before_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        quantizer: Quantizer | None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
        """Return the gradient of qkv, and the gradients of this module's trained parameters.

        `gradients`: those of the queries, keys and values.
        `qk_before_norm`: result of `rotate_`.
        `quantizer`: of the gradient of qkv.
        """
        return self.ops.rope_backward(*gradients, cos, sin, quantizer), ()
