"""Time of each kernel on the real shapes, and its bandwidth as a share of a plain copy's.

    python -m throughput.kernels [--only NAME]

Prints microseconds, the rate of the bytes that the kernel must move, and the share of a copy's
bandwidth on the same GPU. Needs a GPU. Data is random, never zeros, since the power that a GPU
draws depends on the data. Times are medians of the launches that fill 20 ms, with delayed scaling
(one pass).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common.kernels import accumulate, adamw, cross_entropy, qk_norm, rms_norm, rope, swiglu
from common.kernels.quantize import quantize_triton
from common.model.families import shape_of
from common.model.linear_layers import DelayedScaling
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape
from launch.preflight.measure import median_s

FP32, BF16, FP8 = 4, 2, 1  # bytes
SEQUENCE = 8192
GIB = 1 << 30
GPU = torch.device("cuda")
SECONDS = 0.02
# Name, launch, and the bytes that it must read and write, each value once.
Case = tuple[str, Callable[[], object], int]


def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype)


def quantizing(shape: ModelShape, tokens: int, transposed: bool) -> Iterator[Case]:
    """Yield kernels with a result in FP8, and the same kernels with a result in bf16.

    `transposed`: write both layouts where products need them.
    """
    scaling = DelayedScaling()
    forward = scaling.quantizer(transposed=transposed)
    gradient = scaling.quantizer(gradient=True, transposed=transposed)
    kept = scaling.quantizer(transposed=False)
    scaling.allocate(torch.device("cuda"))
    out = FP8 * (2 if forward.transposed else 1)  # bytes per element of a quantized tensor
    hidden = shape.hidden_size
    ffn = shape.ffn_hidden_size
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    n = tokens * hidden
    m = tokens * ffn

    def warmed(launch: Callable[..., object], *arguments: object) -> Callable[[], object]:
        """Return the launch, after a first step that found its scales.

        What is timed is therefore the single pass of later steps.
        """
        launch(*arguments)
        scaling.step_done()
        return partial(launch, *arguments)

    x = draw(tokens, hidden)
    y = draw(tokens, hidden)
    g = draw(tokens, hidden)
    weight = draw(hidden)
    norm = rms_norm.add_rms_norm_triton
    norm_backward = rms_norm.rms_norm_backward_triton
    residual, _, rstd = norm(x, y, weight, 1e-5, None)
    backward = (y, residual, rstd, weight, g)
    yield "quantize", warmed(quantize_triton, x, forward), n * (BF16 + out)
    yield "norm, FP8", warmed(norm, x, None, weight, 1e-5, forward), n * (BF16 + out)
    yield "add + norm, FP8", warmed(norm, x, y, weight, 1e-5, forward), n * (3 * BF16 + out)
    yield "add + norm, bf16", partial(norm, x, y, weight, 1e-5, None), n * 4 * BF16
    yield (
        "norm backward, FP8",
        warmed(norm_backward, *backward, gradient, transposed),
        n * (4 * BF16 + out),
    )
    yield "norm backward, bf16", partial(norm_backward, *backward, None, transposed), n * 4 * BF16

    cos, sin = rope.rope_tables(shape, SEQUENCE, "cuda")
    qkv = draw(tokens, shape.qkv_size)
    turned = 2 * BF16 * tokens * (heads + kv_heads) * shape.head_dim
    yield "rope", partial(rope.rope_packed_triton_, qkv, cos, sin, heads, kv_heads), turned
    d_q, d_k, d_v = (
        draw(tokens // SEQUENCE, SEQUENCE, count, shape.head_dim)
        for count in (heads, kv_heads, kv_heads)
    )
    rope_backward = partial(rope.rope_packed_backward_triton, d_q, d_k, d_v, cos, sin)
    yield "rope backward, FP8", warmed(rope_backward, gradient), qkv.numel() * (BF16 + out)
    yield "rope backward, bf16", partial(rope_backward, None), qkv.numel() * 2 * BF16

    gate_up = draw(tokens, 2 * ffn)
    d_h = draw(tokens, ffn)
    swiglu_forward = swiglu.swiglu_quantized_triton
    swiglu_backward = swiglu.swiglu_quantized_backward_triton
    yield "swiglu, FP8", warmed(swiglu_forward, gate_up, forward, None), m * (2 * BF16 + out)
    yield (
        "swiglu, FP8, input kept in FP8",
        warmed(swiglu_forward, gate_up, forward, kept),
        m * (2 * BF16 + out + 2 * FP8),
    )
    kept_input = swiglu_forward(gate_up, forward, kept)[1]
    yield (
        "swiglu backward, FP8",
        warmed(swiglu_backward, d_h, gate_up, gradient),
        m * (3 * BF16 + 2 * out),
    )
    yield (
        "swiglu backward, FP8, input kept in FP8",
        partial(swiglu_backward, d_h, kept_input, gradient),
        m * (BF16 + 2 * FP8 + 2 * out),
    )


def head_norms(shape: ModelShape, tokens: int) -> Iterator[Case]:
    """Yield the norms of query and key heads with RoPE, for a model that has them."""
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    cos, sin = rope.rope_tables(shape, SEQUENCE, "cuda")
    qkv = draw(tokens, shape.qkv_size)
    weights = (draw(shape.head_dim), draw(shape.head_dim))
    before = qk_norm.qk_norm_rope_triton_(
        qkv, weights, shape.norm_eps, cos, sin, heads, kv_heads, True
    )
    assert before is not None
    forward = partial(
        qk_norm.qk_norm_rope_triton_, qkv, weights, shape.norm_eps, cos, sin, heads, kv_heads
    )
    yield "q/k norm + rope", partial(forward, False), 2 * BF16 * before.numel()
    yield "q/k norm + rope, heads kept", partial(forward, True), 3 * BF16 * before.numel()
    d_q, d_k, d_v = (
        draw(tokens // SEQUENCE, SEQUENCE, count, shape.head_dim)
        for count in (heads, kv_heads, kv_heads)
    )
    backward = partial(
        qk_norm.qk_norm_rope_backward_triton,
        (d_q, d_k, d_v),
        before,
        weights,
        shape.norm_eps,
        cos,
        sin,
        None,
    )
    yield "q/k norm + rope backward, bf16", backward, BF16 * (2 * qkv.numel() + before.numel())


def loss(shape: ModelShape) -> Iterator[Case]:
    logits = draw(1, SEQUENCE, shape.vocab_size)
    labels = torch.randint(0, shape.vocab_size, (1, SEQUENCE), device="cuda")
    yield (
        "cross entropy forward",
        partial(cross_entropy.cross_entropy_forward, logits, labels),
        logits.numel() * BF16,
    )
    _, largest, total = cross_entropy.cross_entropy_forward(logits, labels)
    backward = partial(
        cross_entropy.cross_entropy_backward,
        logits,
        labels,
        largest,
        total,
        torch.ones(1, device="cuda"),
    )
    yield "cross entropy backward", backward, logits.numel() * 2 * BF16


def update(shape: ModelShape) -> Iterator[Case]:
    """Yield the optimizer's kernels for one layer's gate_up matrix, halved between two ranks."""
    size = (shape.ffn_hidden_size, shape.hidden_size)
    weight, gradient, first = (draw(*size, dtype=torch.float32) for _ in range(3))
    one = torch.ones((), device="cuda")
    zero = torch.zeros((), device="cuda")
    state = (weight, gradient, first, first.square(), draw(*size))
    step = adamw.AdamWStep(1e-4, (0.9, 0.95), 1e-5, one, one, zero)
    yield (
        "AdamW, and the weight rounded",
        partial(adamw.adamw_triton, *state, 0.1, step),
        weight.numel() * (7 * FP32 + BF16),
    )
    part = draw(*size)
    others = draw(1, *size)
    yield (
        "accumulate",
        partial(accumulate.accumulate_triton, gradient, part),
        part.numel() * (2 * FP32 + BF16),
    )
    mean_of_two = partial(accumulate.accumulate_triton, gradient, part, others)
    yield "accumulate, two ranks' mean", mean_of_two, part.numel() * (2 * FP32 + 2 * BF16)


def report(cases: Iterator[Case], title: str, copy: float, only: str) -> None:
    """Print a line per case with `only` in its name. `copy`: bytes per second of a plain copy."""
    for name, launch, moved in cases:
        if only in name:
            seconds = median_s(launch, GPU, SECONDS)
            rate = moved / seconds
            speed = f"{rate / 1e12:5.2f} TB/s  {rate / copy:6.1%} of copy"
            print(f"{title} {name:42} {1e6 * seconds:8.1f} us  {speed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time each kernel on the real shapes.")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="only kernels with NAME in their name"
    )
    only = parser.parse_args().only
    source = draw(GIB // FP32, dtype=torch.float32)
    copy = 2 * GIB / median_s(partial(torch.empty_like(source).copy_, source), GPU, SECONDS)
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s")
    for shape, tokens, transposed in ((LLAMA31_8B, 16384, True), (LLAMA2_70B, 8192, False)):
        title = f"D {shape.hidden_size} {'both layouts' if transposed else 'rowwise':16}"
        report(quantizing(shape, tokens, transposed), title, copy, only)
        report(loss(shape), title, copy, only)
    qwen = shape_of("qwen3-8b")
    report(head_norms(qwen, 16384), f"D {qwen.hidden_size} {'':16}", copy, only)
    # Only the 8B: the matrices of 70B do not train.
    report(update(LLAMA31_8B), f"D {LLAMA31_8B.hidden_size} {'':16}", copy, only)


if __name__ == "__main__":
    main()
