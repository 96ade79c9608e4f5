"""Launch every Triton kernel of the two benchmarks and of Qwen3 on meta tensors.

compiling.py compiles these launches instead of running them. Signatures written by hand lack the
pointer ranges that AMD's launcher passes, and missed a spill on gfx942.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.kernels import (
    accumulate,
    adamw,
    cross_entropy,
    lora,
    qk_norm,
    quack_swiglu,
    quantize,
    rms_norm,
    rope,
    swiglu,
    transpose,
)
from common.model.families import shape_of
from common.model.linear_layers import DelayedScaling
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape

META = torch.device("meta")
TOKENS, SEQUENCE, RANK = 8192, 8192, 16


def bf16(*size: int) -> Tensor:
    return torch.empty(*size, dtype=torch.bfloat16, device=META)


def fp32(*size: int) -> Tensor:
    return torch.empty(*size, dtype=torch.float32, device=META)


class Quantizers:
    """One quantizer of each kind that a benchmark has."""

    def __init__(self, transposed: bool):
        self.scaling = DelayedScaling()
        self.forward = self.scaling.quantizer(transposed=transposed)
        self.backward = self.scaling.quantizer(gradient=True, transposed=transposed)
        self.kept = self.scaling.quantizer(transposed=False)
        self.scaling.allocate(META)

    def in_all_modes(self, launch: Callable[[], object]) -> None:
        """Run in the first step, in later steps and in an evaluation."""
        for two_pass, recording in ((True, True), (False, True), (False, False)):
            for quantizer in self.scaling.quantizers:
                quantizer.two_pass, quantizer.recording = two_pass, recording
            launch()


def launch_all() -> None:
    pretraining, fine_tuning = Quantizers(transposed=True), Quantizers(transposed=False)
    launch_block(LLAMA31_8B, pretraining, trains=True)
    launch_block(LLAMA2_70B, fine_tuning, trains=False)
    launch_qk_norm(shape_of("qwen3-8b"), pretraining)
    launch_weights()
    launch_adapter(LLAMA2_70B, fine_tuning)
    launch_long_sequences(LLAMA2_70B)
    for vocab in (LLAMA31_8B.vocab_size, LLAMA2_70B.vocab_size):
        for sequences in (1, 2):  # two of the 8B are 3.9 GiB of logits
            launch_cross_entropy(sequences, vocab)
    launch_optimizer()


def launch_long_sequences(shape: ModelShape) -> None:
    """Launch with a gradient of 2 GiB, which AMD's compiler addresses unlike smaller ones.

    No benchmark has one.
    """
    cos, sin = fp32(SEQUENCE, shape.head_dim // 2), fp32(SEQUENCE, shape.head_dim // 2)
    sequences = 2**30 // (SEQUENCE * shape.num_heads * shape.head_dim)
    d_q, d_k, d_v = (
        bf16(sequences, SEQUENCE, heads, shape.head_dim)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    assert d_q.untyped_storage().nbytes() >= 2**31 > d_k.untyped_storage().nbytes()
    rope.rope_packed_backward_triton(d_q, d_k, d_v, cos, sin, None)


def launch_cross_entropy(sequences: int, vocab: int) -> None:
    """Launch with int32 labels, as in a batch, and with int64 labels, as in `throughput`."""
    logits = bf16(sequences, SEQUENCE, vocab)
    for dtype in (torch.int32, torch.int64):
        labels = torch.empty(sequences, SEQUENCE, dtype=dtype, device=META)
        _, largest, total = cross_entropy.cross_entropy_forward(logits, labels)
        cross_entropy.cross_entropy_backward(logits, labels, largest, total, fp32(sequences))


def launch_block(shape: ModelShape, quantizers: Quantizers, trains: bool) -> None:
    """Launch the kernels of a block.

    `trains`: whether the weights train, the norms' included. If not, SwiGLU's input is kept in FP8.
    """
    q, hidden, ffn = quantizers, shape.hidden_size, shape.ffn_hidden_size
    x, weight = bf16(TOKENS, hidden), bf16(hidden)
    cos, sin = fp32(SEQUENCE, shape.head_dim // 2), fp32(SEQUENCE, shape.head_dim // 2)
    d_q, d_k, d_v = (
        bf16(1, SEQUENCE, heads, shape.head_dim)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    gate_up, d_h = bf16(TOKENS, 2 * ffn), bf16(TOKENS, ffn)
    rope.rope_packed_triton_(
        bf16(TOKENS, shape.qkv_size), cos, sin, shape.num_heads, shape.num_kv_heads
    )

    def launch(forward, backward, kept) -> None:
        if forward is not None:
            quantize.quantize_triton(x, forward)
            quantize.quantize_triton(x, backward)
        for branch in (None, x):
            _, _, rstd = rms_norm.add_rms_norm_triton(x, branch, weight, 1e-5, forward)
        for d_residual, quantizer in (
            (x, backward),
            (x, None),
            (None, None),
        ):  # a block's two norms; the head's
            rms_norm.rms_norm_backward_triton(x, x, rstd, weight, d_residual, quantizer, trains)
        rope.rope_packed_backward_triton(d_q, d_k, d_v, cos, sin, backward)
        _, kept_gate_up = swiglu.swiglu_quantized_triton(gate_up, forward, kept)
        swiglu.swiglu_quantized_backward_triton(d_h, kept_gate_up, backward)

    kept = None if trains else q.kept
    if trains:
        launch_finish(shape, q)
    q.in_all_modes(lambda: launch(q.forward, q.backward, kept))
    q.in_all_modes(lambda: launch(None, None, kept))
    swiglu.swiglu_quantized_triton(gate_up, q.forward, None)  # an evaluation keeps nothing


def launch_finish(shape: ModelShape, quantizers: Quantizers) -> None:
    """Launch what follows products with SwiGLU in their epilogues, in training and evaluation."""
    ffn = shape.ffn_hidden_size
    for quantizer, columns, halves in ((quantizers.forward, 96, 1), (quantizers.backward, 160, 2)):
        for recording in (True, False):
            quantizer.recording = recording
            out = quantize.new_quantized(quantizer, (TOKENS, halves * ffn), bf16(1))
            quack_swiglu.finish_swiglu(
                out, quantizer, fp32(TOKENS, -(-ffn // columns)), columns, halves
            )


def launch_qk_norm(shape: ModelShape, pretraining: Quantizers) -> None:
    """Launch both precisions of full training, and LoRA, which trains no norm.

    LoRA takes the gradient in bf16.
    """
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    cos, sin = fp32(SEQUENCE, shape.head_dim // 2), fp32(SEQUENCE, shape.head_dim // 2)
    weights = (bf16(shape.head_dim),) * 2
    gradients = [bf16(1, SEQUENCE, count, shape.head_dim) for count in (heads, kv_heads, kv_heads)]
    for keep in (True, False):
        qk_norm.qk_norm_rope_triton_(
            bf16(TOKENS, shape.qkv_size), weights, 1e-6, cos, sin, heads, kv_heads, keep
        )
    before = bf16(TOKENS, (heads + kv_heads) * shape.head_dim)

    def launch(quantizer, weight_grad) -> None:
        qk_norm.qk_norm_rope_backward_triton(
            gradients, before, weights, 1e-6, cos, sin, quantizer, weight_grad
        )

    pretraining.in_all_modes(lambda: launch(pretraining.backward, True))
    launch(None, True)
    launch(None, False)


def launch_weights() -> None:
    for shape in (LLAMA31_8B, LLAMA2_70B):
        for columns in (shape.hidden_size, shape.ffn_hidden_size):
            quantize.quantize_triton(
                bf16(shape.hidden_size, columns), Quantizers(transposed=True).forward
            )
    quantizer = Quantizers(transposed=True).forward
    quantize.rescale_triton(quantizer.state, quantizer.largest)
    weight = torch.empty(6144, 4096, dtype=torch.uint8, device=META)
    transpose.transpose_triton(weight, weight.new_empty(4096, 6144))


def launch_adapter(shape: ModelShape, quantizers: Quantizers) -> None:
    hidden, qkv = shape.hidden_size, shape.qkv_size
    x = bf16(TOKENS, hidden)
    g = bf16(TOKENS, qkv)
    t = bf16(TOKENS, RANK)
    a = bf16(RANK, hidden)
    b = bf16(qkv, RANK)
    dropout = lora.Dropout(torch.empty(1, dtype=torch.int64, device=META), 0.1)
    numbers = torch.empty(TOKENS, dtype=torch.int32, device=META)
    shared = dropout._replace(row_numbers=numbers)  # by ranks that share sequences
    for norm in (None, lora.Norm(fp32(TOKENS), bf16(hidden))):
        for dropped in (None, dropout, shared):
            lora.down_triton(x, norm, a, dropped)
            lora.down_backward_triton_(bf16(TOKENS, hidden), x, norm, t, a, dropped)
    for gradient in (None, quantizers.backward):
        quantizers.in_all_modes(
            lambda gradient=gradient: lora.up_backward_triton(g, t, b, 2.0, dropout, gradient)
        )


def launch_optimizer() -> None:
    """Launch the matrices of the 8B, whole and in halves, and the whole embedding.

    The embedding has fewer than 2^31 elements on one GPU.
    """
    weight, one = fp32(14336, 4096), torch.empty((), dtype=torch.float32, device=META)
    step = adamw.AdamWStep(1e-4, (0.9, 0.95), 1e-5, one, one, one)
    for moment, rounded in (
        (weight, None),
        (weight, bf16(14336, 4096)),
        (bf16(14336, 4096), bf16(14336, 4096)),
    ):
        adamw.adamw_triton(weight, weight, moment, moment, rounded, 0.1, step)
    for others in (None, bf16(1, 14336, 4096), bf16(3, 14336, 4096), bf16(7, 14336, 4096)):
        for total in (None, weight):
            accumulate.accumulate_triton(total, bf16(14336, 4096), others)
    for ranks in (1, 8):
        ids = torch.empty(ranks * TOKENS, dtype=torch.int64, device=META)
        accumulate.add_rows_triton(
            fp32(128256 // ranks, 4096),
            ids,
            bf16(ranks * TOKENS, 4096),
            128256 // ranks * (ranks - 1),
            ranks,
        )
