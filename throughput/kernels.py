"""Each kernel on the real shapes: microseconds, bytes it must move, and the share of a plain copy's bandwidth on the same GPU.

    python -m throughput.kernels [--only NAME]

Needs a GPU. Random data, never zeros: the power that a GPU draws depends on them. Medians of 30 launches, delayed scaling (one pass).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from common.kernels import accumulate, adamw, cross_entropy, rms_norm, rope, swiglu
from common.kernels.fp8 import DelayedScaling, QuantizedTensor, Quantizer
from common.kernels.quantize import quantize_triton
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape

FP32, BF16, FP8 = 4, 2, 1  # bytes
SEQUENCE = 8192


@dataclass(frozen=True)
class Case:
    name: str
    launch: Callable[[], object]
    moved: int  # bytes read and written, each value once


def median_us(launch: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(3):
        launch()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) for a, b in pairwise(marks))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying 1 GiB."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * median_us(lambda: target.copy_(source)))


class Setting:
    """Random tensors of one model's sizes, and quantizers for the results of the kernels."""

    def __init__(self, shape: ModelShape, tokens: int, transposed: bool):
        self.shape, self.tokens, self.transposed = shape, tokens, transposed
        self.out = FP8 * (2 if transposed else 1)  # bytes per element of a quantized tensor
        self.scaling = DelayedScaling()
        self.forward, self.backward = (
            self.scaling.quantizer(transposed=transposed),
            self.scaling.quantizer(gradient=True, transposed=transposed),
        )
        self.kept = self.scaling.quantizer(transposed=False)
        self.scaling.allocate(torch.device("cuda"))

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    def warmed(self, launch: Callable[[], object]) -> Callable[[], object]:
        """`launch`, after a first step that found its scales: what is timed is the one pass of later steps."""
        launch()
        self.scaling.step_done()
        return launch


def row_wise(s: Setting) -> Iterator[Case]:
    hidden, n = s.shape.hidden_size, s.tokens * s.shape.hidden_size
    x, y, g = (s.random(s.tokens, hidden) for _ in range(3))
    weight = torch.rand(hidden, device="cuda", dtype=torch.bfloat16) + 0.5

    def norm(branch: torch.Tensor | None, quantizer: Quantizer | None) -> tuple[torch.Tensor, QuantizedTensor, torch.Tensor]:
        return rms_norm.add_rms_norm_triton(x, branch, weight, 1e-5, quantizer)

    residual, _, rstd = norm(y, None)

    def backward(quantizer: Quantizer | None) -> object:
        return rms_norm.rms_norm_backward_triton(y, residual, rstd, weight, g, quantizer, s.transposed)

    yield Case("quantize", s.warmed(lambda: quantize_triton(x, s.forward)), n * (BF16 + s.out))
    yield Case("norm, FP8", s.warmed(lambda: norm(None, s.forward)), n * (BF16 + s.out))
    yield Case("add + norm, FP8", s.warmed(lambda: norm(y, s.forward)), n * (3 * BF16 + s.out))
    yield Case("add + norm, bf16", lambda: norm(y, None), n * 4 * BF16)
    yield Case("norm backward, FP8", s.warmed(lambda: backward(s.backward)), n * (4 * BF16 + s.out))
    yield Case("norm backward, bf16", lambda: backward(None), n * 4 * BF16)


def rotation(s: Setting) -> Iterator[Case]:
    heads, kv_heads, head_dim = s.shape.num_heads, s.shape.num_kv_heads, s.shape.head_dim
    cos, sin = rope.rope_tables(s.shape, SEQUENCE, "cuda")
    qkv = s.random(s.tokens, s.shape.qkv_size)
    turned = 2 * BF16 * s.tokens * (heads + kv_heads) * head_dim
    yield Case("rope", lambda: rope.rope_packed_triton_(qkv, cos, sin, heads, kv_heads), turned)
    d_q, d_k, d_v = (s.random(s.tokens // SEQUENCE, SEQUENCE, count, head_dim) for count in (heads, kv_heads, kv_heads))

    def backward(quantizer: Quantizer | None) -> object:
        return rope.rope_packed_backward_triton(d_q, d_k, d_v, cos, sin, quantizer)

    yield Case("rope backward, FP8", s.warmed(lambda: backward(s.backward)), qkv.numel() * (BF16 + s.out))
    yield Case("rope backward, bf16", lambda: backward(None), qkv.numel() * 2 * BF16)


def feed_forward(s: Setting) -> Iterator[Case]:
    ffn, m = s.shape.ffn_hidden_size, s.tokens * s.shape.ffn_hidden_size
    gate_up, d_h = s.random(s.tokens, 2 * ffn), s.random(s.tokens, ffn)

    def forward(kept_quantizer: Quantizer | None) -> tuple[QuantizedTensor, torch.Tensor | QuantizedTensor]:
        return swiglu.swiglu_quantized_triton(gate_up, s.forward, kept_quantizer)

    def backward(kept: torch.Tensor | QuantizedTensor) -> object:
        return swiglu.swiglu_quantized_backward_triton(d_h, kept, s.backward)

    yield Case("swiglu, FP8", s.warmed(lambda: forward(None)), m * (2 * BF16 + s.out))
    yield Case("swiglu, FP8, input kept in FP8", s.warmed(lambda: forward(s.kept)), m * (2 * BF16 + s.out + 2 * FP8))
    kept = forward(s.kept)[1]
    yield Case("swiglu backward, FP8", s.warmed(lambda: backward(gate_up)), m * (3 * BF16 + 2 * s.out))
    yield Case("swiglu backward, FP8, input kept in FP8", lambda: backward(kept), m * (BF16 + 2 * FP8 + 2 * s.out))


def loss(s: Setting) -> Iterator[Case]:
    logits = s.random(1, SEQUENCE, s.shape.vocab_size)
    labels = torch.randint(0, s.shape.vocab_size, (1, SEQUENCE), device="cuda")
    yield Case("cross entropy forward", lambda: cross_entropy.cross_entropy_forward(logits, labels), logits.numel() * BF16)
    _, largest, total = cross_entropy.cross_entropy_forward(logits, labels)
    upstream = torch.ones(1, device="cuda")

    def backward() -> None:
        cross_entropy.cross_entropy_backward(logits, labels, largest, total, upstream)

    yield Case("cross entropy backward", backward, logits.numel() * 2 * BF16)


def update(s: Setting) -> Iterator[Case]:
    """Of the gate_up of one layer, halved between two ranks."""
    if not s.transposed:  # its matrices do not train
        return
    size = (s.shape.ffn_hidden_size, s.shape.hidden_size)
    weight, gradient, first = (torch.randn(*size, device="cuda") for _ in range(3))
    second, rounded, one = first.square(), s.random(*size), torch.ones((), device="cuda")
    step = adamw.Step(1e-4, (0.9, 0.95), 1e-5, one, one, torch.zeros((), device="cuda"))
    moved = weight.numel() * (7 * FP32 + BF16)
    yield Case("AdamW, and the weight rounded", lambda: adamw.adamw_triton(weight, gradient, first, second, rounded, 0.1, step), moved)
    part, others = s.random(*size), s.random(1, *size)
    yield Case("accumulate", lambda: accumulate.accumulate_triton(gradient, part), part.numel() * (2 * FP32 + BF16))
    both = part.numel() * (2 * FP32 + 2 * BF16)
    yield Case("accumulate, two ranks' mean", lambda: accumulate.accumulate_triton(gradient, part, others), both)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s")
    for shape, tokens, transposed in ((LLAMA31_8B, 16384, True), (LLAMA2_70B, 8192, False)):
        setting = Setting(shape, tokens, transposed)
        for case in (case for part in (row_wise, rotation, feed_forward, loss, update) for case in part(setting)):
            if only not in case.name:
                continue
            us = median_us(case.launch)
            rate = case.moved / (1e-6 * us)
            layout = "both layouts" if transposed else "rowwise"
            print(
                f"D {shape.hidden_size} {layout:16} {case.name:42} {us:8.1f} us  {rate / 1e12:5.2f} TB/s  {rate / copy:6.1%} of copy",
                flush=True,
            )


if __name__ == "__main__":
    main()
