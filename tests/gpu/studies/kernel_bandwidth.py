"""Time each kernel at the benchmarks' shapes, and compare its bandwidth with a copy's.

    PYTHONPATH=. python3 tests/gpu/studies/kernel_bandwidth.py [--only NAME]

Prints microseconds, the bandwidth (bytes that the kernel must move, per second), and its share of
the bandwidth of a copy on the same GPU. Needs a GPU. The data is random, because the power of a GPU
depends on the data. `launch_us` (throughput/timing.py) takes the times, with delayed scaling (one
pass).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common.gpu_kinds import GIB
from common.kernels import accumulate, adamw, cross_entropy, qk_norm, rms_norm, rope, swiglu
from common.kernels.quantize import quantize_triton
from common.model.families import shape_of
from common.model.linear_layers import DelayedScaling
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape
from throughput.timing import launch_us

# Bytes of a value.
FP32 = 4
BF16 = 2
FP8 = 1
SEQUENCE = 8192  # tokens per sequence
# Name, launch, and the bytes that the kernel must move if each value is read or written once.
TimedKernel = tuple[str, Callable[[], object], int]


def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype)


class Fp8Quantizers:
    """Quantizers with delayed scaling, for the kernels with a result in FP8.

    `transposed`: write both layouts where products need them.
    """

    def __init__(self, transposed: bool):
        self.scaling = DelayedScaling()
        self.forward = self.scaling.quantizer(transposed=transposed)
        self.gradient = self.scaling.quantizer(gradient=True, transposed=transposed)
        self.kept = self.scaling.quantizer(transposed=False)
        self.transposed = transposed
        self.scaling.allocate(torch.device("cuda"))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a quantized tensor, in all its layouts."""
        layouts = 2 if self.forward.transposed else 1
        return layouts * FP8

    def warmed(self, launch: Callable[..., object], *arguments: object) -> Callable[[], object]:
        """Launch the kernel once, which determines its scales, and return the launch.

        Later launches take the single pass of a later step.
        """
        launch(*arguments)
        self.scaling.step_done()
        return partial(launch, *arguments)


def quantizing(shape: ModelShape, tokens: int, transposed: bool) -> Iterator[TimedKernel]:
    """Yield kernels with a result in FP8, and the same kernels with a result in bf16.

    `transposed`: write both layouts where products need them.
    """
    fp8 = Fp8Quantizers(transposed)
    yield from norms(shape, tokens, fp8)
    yield from ropes(shape, tokens, fp8)
    yield from swiglus(shape, tokens, fp8)


def norms(shape: ModelShape, tokens: int, fp8: Fp8Quantizers) -> Iterator[TimedKernel]:
    """Yield the quantization of an activation, and the RMS norms."""
    hidden = shape.hidden_size
    n = tokens * hidden
    out = fp8.element_bytes
    x = draw(tokens, hidden)
    y = draw(tokens, hidden)
    g = draw(tokens, hidden)
    weight = draw(hidden)
    norm = rms_norm.add_rms_norm_triton
    norm_backward = rms_norm.rms_norm_backward_triton
    residual, _, rstd = norm(x, y, weight, 1e-5, None)
    backward = (y, residual, rstd, weight, g)
    launch = fp8.warmed(quantize_triton, x, fp8.forward)
    yield "quantize", launch, n * (BF16 + out)
    launch = fp8.warmed(norm, x, None, weight, 1e-5, fp8.forward)
    yield "norm, FP8", launch, n * (BF16 + out)
    launch = fp8.warmed(norm, x, y, weight, 1e-5, fp8.forward)
    yield "add + norm, FP8", launch, n * (3 * BF16 + out)
    yield "add + norm, bf16", partial(norm, x, y, weight, 1e-5, None), n * 4 * BF16
    launch = fp8.warmed(norm_backward, *backward, fp8.gradient, fp8.transposed)
    yield "norm backward, FP8", launch, n * (4 * BF16 + out)
    launch = partial(norm_backward, *backward, None, fp8.transposed)
    yield "norm backward, bf16", launch, n * 4 * BF16


def ropes(shape: ModelShape, tokens: int, fp8: Fp8Quantizers) -> Iterator[TimedKernel]:
    """Yield RoPE and its backward."""
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    cos, sin = rope.rope_tables(shape, SEQUENCE, "cuda")
    qkv = draw(tokens, shape.qkv_size)
    rotated = 2 * BF16 * tokens * (heads + kv_heads) * shape.head_dim
    yield "rope", partial(rope.rope_packed_triton_, qkv, cos, sin, heads, kv_heads), rotated
    d_q, d_k, d_v = (
        draw(tokens // SEQUENCE, SEQUENCE, count, shape.head_dim)
        for count in (heads, kv_heads, kv_heads)
    )
    rope_backward = partial(rope.rope_packed_backward_triton, d_q, d_k, d_v, cos, sin)
    launch = fp8.warmed(rope_backward, fp8.gradient)
    yield "rope backward, FP8", launch, qkv.numel() * (BF16 + fp8.element_bytes)
    yield "rope backward, bf16", partial(rope_backward, None), qkv.numel() * 2 * BF16


def swiglus(shape: ModelShape, tokens: int, fp8: Fp8Quantizers) -> Iterator[TimedKernel]:
    """Yield SwiGLU and its backward, with the input kept in bf16 or in FP8 for the backward."""
    ffn = shape.ffn_hidden_size
    n = tokens * ffn
    out = fp8.element_bytes
    gate_up = draw(tokens, 2 * ffn)
    d_h = draw(tokens, ffn)
    forward = swiglu.swiglu_quantized_triton
    backward = swiglu.swiglu_quantized_backward_triton
    launch = fp8.warmed(forward, gate_up, fp8.forward, None)
    yield "swiglu, FP8", launch, n * (2 * BF16 + out)
    launch = fp8.warmed(forward, gate_up, fp8.forward, fp8.kept)
    yield "swiglu, FP8, input kept in FP8", launch, n * (2 * BF16 + out + 2 * FP8)
    kept_input = forward(gate_up, fp8.forward, fp8.kept)[1]
    launch = fp8.warmed(backward, d_h, gate_up, fp8.gradient)
    yield "swiglu backward, FP8", launch, n * (3 * BF16 + 2 * out)
    launch = partial(backward, d_h, kept_input, fp8.gradient)
    yield "swiglu backward, FP8, input kept in FP8", launch, n * (BF16 + 2 * FP8 + 2 * out)


def head_norms(shape: ModelShape, tokens: int) -> Iterator[TimedKernel]:
    """Yield the norms of query and key heads with RoPE. `shape` must have such norms."""
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


def loss(shape: ModelShape) -> Iterator[TimedKernel]:
    """Yield cross-entropy and its backward, for one sequence."""
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


def update(shape: ModelShape) -> Iterator[TimedKernel]:
    """Yield the optimizer's kernels, for half of one layer's gate_up matrix (a shard of two)."""
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


def title_of(shape: ModelShape, layouts: str = "") -> str:
    """Return the beginning of a line: the hidden size, D, and the layouts of FP8 tensors."""
    return f"D {shape.hidden_size} {layouts:16}"


def report(kernels: Iterator[TimedKernel], title: str, copy: float, only: str) -> None:
    """Print a line for each kernel whose name contains `only`.

    `title`: beginning of the line. `copy`: bytes/s of a copy.
    """
    for name, launch, moved in kernels:
        if only in name:
            microseconds = launch_us(launch)
            rate = 1e6 * moved / microseconds
            speed = f"{rate / 1e12:5.2f} TB/s  {rate / copy:6.1%} of copy"
            print(f"{title} {name:42} {microseconds:8.1f} µs  {speed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time each kernel at the benchmarks' shapes.")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="time only kernels whose name contains NAME"
    )
    only = parser.parse_args().only
    source = draw(GIB // FP32, dtype=torch.float32)
    copy = 1e6 * 2 * GIB / launch_us(partial(torch.empty_like(source).copy_, source))
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s")
    for shape, tokens, transposed in ((LLAMA31_8B, 16384, True), (LLAMA2_70B, 8192, False)):
        title = title_of(shape, "both layouts" if transposed else "rowwise")
        report(quantizing(shape, tokens, transposed), title, copy, only)
        report(loss(shape), title, copy, only)
    qwen = shape_of("qwen3-8b")
    report(head_norms(qwen, 16384), title_of(qwen), copy, only)
    # Only for the 8B, because the matrices of the 70B are frozen.
    report(update(LLAMA31_8B), title_of(LLAMA31_8B), copy, only)


if __name__ == "__main__":
    main()
