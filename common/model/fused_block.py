"""The transformer block of pre-training, in FP8, bf16 or fp32.

    residual = x + W_o attention(rope(W_qkv norm(x)))
    out = residual + W_down swiglu(W_gate_up norm(residual))

Forward and backward are straight lists of kernel launches. autograd sees one function per block
(`FusedBlockFunction`). The tensors that its backward needs are chosen here by hand.

W_qkv has the rows of Q, then K, then V. W_gate_up has the rows of gate, then up. Kernels write the
inputs of matrix products already quantized (kernels/fp8.py). Separate casts remain only after
attention and at the block's boundary.

Names: M is the number of tokens (batch x sequence), D the hidden size, F the ffn size, E the number
of rows of W_qkv (`qkv_size`). The four matrices multiply n_1 (norm of x), o (attention's output),
n_2 (norm of the residual) and h (output of SwiGLU). The name of a gradient starts with d_. As in
kernels/fp8.py, g is the quantized gradient of a product's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.kernels.attention import AttentionGraph, attention_graph
from common.kernels.fp8 import QuantizedTensor
from common.kernels.rope import require_triton_shape
from common.model.block_ops import KERNEL_ENGINES, RotaryEmbedding, SavedTensors
from common.model.linear_layers import BlockQuantizers, LinearLayers
from common.model.llama import Head, Llama, RMSNorm
from common.model.shapes import ModelShape
from common.sharding.context_parallel import ALONE, ContextAttention, ContextGroup

LINEARS = ("qkv", "o", "gate_up", "down")


@dataclass
class SavedByBlock(SavedTensors):
    """Tensors that a block keeps for its backward.

    Bytes per token of the 8B in FP8:

        x, residual                              16,384
        q, k, v                                  12,288
        attention's output                        8,192
        columnwise inputs of the products        26,624
        gate_up                                  57,344
        rstd, log-sum-exp of attention              136
        total                                   120,968
    """

    x: Tensor  # [M, D], the block's input
    rstd_1: Tensor  # fp32 [M], 1 / RMS of x
    n_1: QuantizedTensor  # [M, D]
    # Query and key heads before their norms, [M, (heads + kv_heads) * head_dim]. None without
    # qk_norm.
    qk_before_norm: Tensor | None
    attention: AttentionGraph | ContextAttention
    o: QuantizedTensor  # [M, attention_size]
    residual: Tensor  # [M, D]
    rstd_2: Tensor  # fp32 [M], 1 / RMS of the residual
    n_2: QuantizedTensor  # [M, D]
    gate_up: Tensor  # [M, 2 F]
    h: QuantizedTensor  # [M, F]


def rotary_embedding(shape: ModelShape, kernels: str) -> RotaryEmbedding:
    """Return RoPE for this shape, with norms of query and key heads if the shape has `qk_norm`.

    Raises ConfigError if the Triton kernels do not support the head dimension.
    """
    if kernels == "triton":
        require_triton_shape(shape)
    if not shape.qk_norm:
        return RotaryEmbedding(shape, KERNEL_ENGINES[kernels])
    # Imported only for shapes that have these norms.
    from common.model.qk_norm import QKNormRotaryEmbedding

    return QKNormRotaryEmbedding(shape, KERNEL_ENGINES[kernels], kernels)


class FusedBlock(nn.Module):
    """A transformer block whose matrices train."""

    def __init__(
        self,
        shape: ModelShape,
        kernels: str,
        linear: LinearLayers,
        recompute: bool = False,
        context: ContextGroup = ALONE,
    ):
        """Create a block with undefined weights.

        `kernels`: "reference" or "triton".
        `linear`: the linear layers' format, shared by all blocks.
        `recompute`: keep only the input, and run the forward again in the backward.
        `context`: the ranks that share each sequence.
        """
        super().__init__()
        self.context = context
        self.linear = linear
        self.shape = shape
        self.ops = KERNEL_ENGINES[kernels]
        self.recompute = recompute
        # The norms and matrices only hold weights. Their own forwards never run.
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, shape.qkv_size, bias=False)
        self.rotation = rotary_embedding(shape, kernels)
        self.o = nn.Linear(shape.attention_size, shape.hidden_size, bias=False)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)
        self.quantizers = BlockQuantizers.training(linear)
        self.weight_quantizers = {name: linear.quantizer(weight=True) for name in LINEARS}

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output, shaped like `x_BSD`.

        `cos`, `sin`: RoPE's tables of these positions, fp32 [sequence, head_dim / 2].
        """
        weights = [
            self.attention_norm.weight,
            self.ffn_norm.weight,
            *(getattr(self, name).weight for name in LINEARS),
        ]
        weights += self.rotation.parameters()
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_BSD, *weights))
        return FusedBlockFunction.apply(self, keep, self.recompute, x_BSD, cos, sin, *weights)

    def weights(self) -> dict[str, QuantizedTensor]:
        """Return the four matrices in the form that matrix products read.

        In FP8, they are cast once per optimizer step.
        """
        weights = {}
        for name in LINEARS:
            weights[name] = self.linear.weight(
                getattr(self, name).weight, self.weight_quantizers[name], self.ops.quantize
            )
        return weights

    def run(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, keep: bool
    ) -> tuple[Tensor, SavedByBlock | None]:
        """Compute the forward. With `keep`, also return the tensors that the backward needs."""
        ops = self.ops
        linear = self.linear
        shape = self.shape
        weights = self.weights()
        quantizers = linear.active_quantizers(self.quantizers)
        x = x_BSD.flatten(0, 1)

        # Attention.
        _, n_1, rstd_1 = ops.add_rms_norm(
            x, None, self.attention_norm.weight, shape.norm_eps, quantizers.n_1
        )
        qkv = linear.fprop(n_1, weights["qkv"])
        qk_before_norm = self.rotation.rotate_(qkv, cos, sin, keep)
        attention = attend(shape, qkv.view(*x_BSD.shape[:2], -1), keep, self.context)
        o = ops.quantize(attention.out.detach().flatten(2).flatten(0, 1), quantizers.o)
        branch = linear.fprop(o, weights["o"])

        # Feed-forward. The norm's kernel also computes residual = x + branch.
        residual, n_2, rstd_2 = ops.add_rms_norm(
            x, branch, self.ffn_norm.weight, shape.norm_eps, quantizers.n_2
        )
        del branch
        gate_up, h = linear.gate_up_swiglu(ops, n_2, weights["gate_up"], quantizers.h, keep=keep)
        # The next block's norm could add these two: 2.6 of 2,040 ms a step (8B, two H200), but two
        # tensors would pass through autograd, recomputation and sharding.
        out = residual.view_as(x_BSD) + linear.fprop(h, weights["down"]).view_as(x_BSD)

        if not keep:
            return out, None
        assert isinstance(gate_up, Tensor)
        saved = SavedByBlock(
            x=x,
            rstd_1=rstd_1,
            n_1=n_1.for_wgrad(),
            qk_before_norm=qk_before_norm,
            attention=attention,
            o=o.for_wgrad(),
            residual=residual,
            rstd_2=rstd_2,
            n_2=n_2.for_wgrad(),
            gate_up=gate_up,
            h=h.for_wgrad(),
        )
        return out, saved

    def run_backward(
        self, saved: SavedByBlock, d_out_BSD: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of the weights, in the order of `forward`.

        Pops the tensors of `saved` as they are used, so that their memory can be reused at once.
        """
        ops = self.ops
        linear = self.linear
        weights = self.weights()
        quantizers = linear.active_quantizers(self.quantizers)
        d_out = d_out_BSD.flatten(0, 1)

        # Feed-forward.
        g = ops.quantize(d_out, quantizers.d_out)
        d_down_weight = linear.wgrad(g, saved.pop("h"))
        d_gate_up = linear.down_swiglu_backward(
            ops, g, weights["down"], saved.pop("gate_up"), quantizers.d_gate_up
        )
        del g
        d_n = linear.dgrad(d_gate_up, weights["gate_up"])
        d_gate_up_weight = linear.wgrad(d_gate_up, saved.pop("n_2"))
        del d_gate_up
        # The norm's kernel also adds d_out, the gradient that bypasses the feed-forward, and
        # quantizes the sum.
        d_residual, d_branch, d_ffn_norm = ops.rms_norm_backward(
            d_n,
            saved.pop("residual"),
            saved.rstd_2,
            self.ffn_norm.weight,
            d_out,
            quantizers.d_branch,
        )

        # Attention. d_branch equals d_residual, because residual = x + branch.
        if d_branch is None:
            d_branch = QuantizedTensor(d_residual)
        d_o = linear.dgrad(d_branch, weights["o"])
        d_o_weight = linear.wgrad(d_branch, saved.pop("o"))
        gradients = saved.pop("attention").backward(d_o)
        del d_branch, d_o
        d_qkv, d_head_norms = self.rotation.backward(
            gradients, saved.pop("qk_before_norm"), cos, sin, quantizers.d_qkv
        )
        del gradients
        d_n = linear.dgrad(d_qkv, weights["qkv"])
        d_qkv_weight = linear.wgrad(d_qkv, saved.pop("n_1"))
        d_x, _, d_attention_norm = ops.rms_norm_backward(
            d_n, saved.x, saved.rstd_1, self.attention_norm.weight, d_residual, None
        )
        return (
            d_x.view_as(d_out_BSD),
            d_attention_norm,
            d_ffn_norm,
            d_qkv_weight,
            d_o_weight,
            d_gate_up_weight,
            d_down_weight,
            *d_head_norms,
        )


def fused_llama(shape: ModelShape, max_sequence_length: int, kernels: str = "reference") -> Llama:
    """Return a Llama of fused blocks with undefined weights, without FP8.

    It has torch's default dtype and is on the default device.
    """
    linear = LinearLayers()
    blocks = [FusedBlock(shape, kernels, linear) for _ in range(shape.num_layers)]
    return Llama(shape, max_sequence_length, blocks, Head(shape, kernels))


def attend(
    shape: ModelShape, qkv_BSE: Tensor, keep: bool, context: ContextGroup = ALONE
) -> AttentionGraph | ContextAttention:
    """Compute attention, and with `keep` what its backward needs.

    `qkv_BSE`: [batch, sequence, qkv_size], queries and keys rotated.
    `context`: the ranks that share each sequence. `qkv_BSE` then has this rank's tokens.
    """
    packed = qkv_BSE.unflatten(-1, (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim))
    if context.size > 1:
        q, kv = packed.split([shape.num_heads, 2 * shape.num_kv_heads], dim=2)
        return ContextAttention(q, kv, keep, context)
    q, k, v = packed.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=2)
    return attention_graph(q, k, v, keep)


@contextmanager
def not_recording(quantizers: BlockQuantizers) -> Iterator[None]:
    """Do not record amaxes inside the block: a recomputed forward must not count them twice."""
    present = [quantizer for quantizer in vars(quantizers).values() if quantizer is not None]
    before = [quantizer.recording for quantizer in present]
    for quantizer in present:
        quantizer.recording = False
    yield
    for quantizer, recording in zip(present, before, strict=True):
        quantizer.recording = recording


class FusedBlockFunction(torch.autograd.Function):
    """The autograd function of a whole block: FusedBlock, or LoRA's (fused_lora_block.py)."""

    @staticmethod
    def forward(
        ctx,
        block: Any,
        keep: bool,
        recompute: bool,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        """Run the block's forward.

        `block`: has `run` and `run_backward`.
        `keep`: there will be a backward.
        `recompute`: keep only x, and run the forward again in the backward.
        `trained`: the parameters that get a gradient, in the order in which `run_backward` returns
            their gradients after x's.
        """
        out, saved = block.run(x, cos, sin, keep and not recompute)
        if keep:
            # Not by save_for_backward, so that the backward can free each tensor after its use.
            ctx.block = block
            ctx.saved = saved
            ctx.x = x if recompute else None
            ctx.tables = (cos, sin)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.block is None:
            raise RuntimeError(
                "a block's backward ran twice: the first run freed the forward's saved tensors"
            )
        block = ctx.block
        saved = ctx.saved
        x = ctx.x
        cos, sin = ctx.tables
        ctx.block = ctx.saved = ctx.x = None
        if x is not None:
            with not_recording(block.quantizers):
                _, saved = block.run(x, cos, sin, True)
        d_x, *d_trained = block.run_backward(saved, d_out.contiguous(), cos, sin)
        return None, None, None, d_x, None, None, *d_trained
