"""The parts that all fused blocks are made of: the table of kernels, what backward keeps, and RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.kernels import quantize, rms_norm, rope, swiglu
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.shapes import ModelShape


class SavedTensors:
    """A dataclass of what a forward keeps for its backward, which removes the members one by one."""

    def pop(self, name: str) -> Any:
        """Return a member and drop the reference to it: its memory is free when the caller is done with it."""
        return self.__dict__.pop(name)


@dataclass(frozen=True)
class Engine:
    """The ops of kernels/ in one of their two implementations."""

    quantize: Callable[..., QuantizedTensor]
    add_rms_norm: Callable[..., tuple[Tensor, QuantizedTensor, Tensor]]
    rms_norm_backward: Callable[..., tuple[Tensor, QuantizedTensor | None, Tensor | None]]
    rope_: Callable[..., Tensor]
    rope_backward: Callable[..., QuantizedTensor]
    swiglu: Callable[..., tuple[QuantizedTensor, Tensor | QuantizedTensor]]
    swiglu_backward: Callable[..., QuantizedTensor]


ENGINES = {
    "reference": Engine(
        quantize.quantize_reference,
        rms_norm.add_rms_norm_reference,
        rms_norm.rms_norm_backward_reference,
        rope.rope_packed_reference_,
        rope.rope_packed_backward_reference,
        swiglu.swiglu_quantized_reference,
        swiglu.swiglu_quantized_backward_reference,
    ),
    "triton": Engine(
        quantize.quantize_triton,
        rms_norm.add_rms_norm_triton,
        rms_norm.rms_norm_backward_triton,
        rope.rope_packed_triton_,
        rope.rope_packed_backward_triton,
        swiglu.swiglu_quantized_triton,
        swiglu.swiglu_quantized_backward_triton,
    ),
}


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (RoPE) of the query and key heads, between projection and attention."""

    def __init__(self, shape: ModelShape, ops: Engine):
        super().__init__()
        self.shape, self.ops = shape, ops

    def rotate_(self, qkv: Tensor, cos: Tensor, sin: Tensor, keep: bool) -> Tensor | None:
        """Change these heads of qkv [M, qkv_size] in place; with `keep`, return what backward needs beside the result."""
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
        """Return the gradient of qkv, and those of this module's parameters that train.

        `gradients`: of queries, keys and values.
        """
        return self.ops.rope_backward(*gradients, cos, sin, quantizer), ()
