"""Parts that all fused blocks share: the tables of kernels, saved tensors, and RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.kernels import quantize, rms_norm, rope, swiglu
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.shapes import ModelShape


class SavedTensors:
    """Base class of the dataclasses that hold the tensors a forward keeps for its backward."""

    def pop(self, name: str) -> Any:
        """Return a member and remove it, so that the caller's reference is the last one."""
        return self.__dict__.pop(name)


@dataclass(frozen=True)
class KernelEngine:
    """The functions of common/kernels/ that a block calls, in one of two implementations.

    Arguments and results: see the reference functions in `KERNEL_ENGINES`.
    """

    quantize: Callable[..., QuantizedTensor]
    add_rms_norm: Callable[..., tuple[Tensor, QuantizedTensor, Tensor]]
    rms_norm_backward: Callable[..., tuple[Tensor, QuantizedTensor | None, Tensor | None]]
    rope_: Callable[..., Tensor]
    rope_backward: Callable[..., QuantizedTensor]
    swiglu: Callable[..., tuple[QuantizedTensor, Tensor | QuantizedTensor]]
    swiglu_backward: Callable[..., QuantizedTensor]
    # Whether FP8 products may compute SwiGLU in their epilogues, if an engine supports it.
    may_fuse_swiglu: bool


# RunConfig.kernels -> the functions. Engines of attention and products: common/engines.py.
KERNEL_ENGINES = {
    "reference": KernelEngine(
        quantize.quantize_reference,
        rms_norm.add_rms_norm_reference,
        rms_norm.rms_norm_backward_reference,
        rope.rope_packed_reference_,
        rope.rope_packed_backward_reference,
        swiglu.swiglu_quantized_reference,
        swiglu.swiglu_quantized_backward_reference,
        may_fuse_swiglu=False,
    ),
    "triton": KernelEngine(
        quantize.quantize_triton,
        rms_norm.add_rms_norm_triton,
        rms_norm.rms_norm_backward_triton,
        rope.rope_packed_triton_,
        rope.rope_packed_backward_triton,
        swiglu.swiglu_quantized_triton,
        swiglu.swiglu_quantized_backward_triton,
        may_fuse_swiglu=True,
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

        With `keep`, returns the tensor that `backward` needs. Plain RoPE needs none.
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
        """Return the gradients of qkv [M, qkv_size] and of this module's parameters.

        `gradients`: gradients of the rotated queries [batch, sequence, heads, head_dim], and of the
            rotated keys and of the values, each [batch, sequence, kv_heads, head_dim].
        `qk_before_norm`: result of `rotate_`.
        `quantizer`: quantizer of the gradient of qkv.
        """
        return self.ops.rope_backward(*gradients, cos, sin, quantizer), ()
