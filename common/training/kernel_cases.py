"""Test cases for each Triton kernel of a config, at the config's shapes, for the self-test and for
tuning.

A case is a function of the engine's name and its quantizers. It leaves its operands unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.config import RunConfig
from common.kernels import accumulate, adamw, cross_entropy, lora
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.kernels.rope import require_triton_shape, rope_tables
from common.model.block_ops import ENGINES
from common.model.linear_layers import DelayedScaling
from common.model.shapes import ModelShape
from common.training.build import DTYPES

Output = Tensor | QuantizedTensor | None


@dataclass(frozen=True)
class Sizes:
    """The parameters that determine the shapes of all ops."""

    shape: ModelShape
    sequence_length: int
    micro_batch_size: int
    fp8: bool
    lora_rank: int  # 0: all weights train
    kernels: str  # the engine of common/kernels
    dtype: torch.dtype

    @staticmethod
    def of(config: RunConfig, shape: ModelShape, sequence_length: int, lora_rank: int) -> Sizes:
        if config.kernels == "triton":
            require_triton_shape(shape)
        fp8 = config.linear_format.stores_fp8
        return Sizes(
            shape,
            sequence_length,
            config.micro_batch_size,
            fp8,
            lora_rank,
            config.kernels,
            DTYPES[config.precision],
        )

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length


class Draw:
    """Random tensors from a separate generator, which leaves the run's generators unchanged."""

    def __init__(self, device: torch.device):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(1)

    def __call__(
        self, *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=dtype, generator=self.generator).mul_(
            scale
        )


class Quantizers:
    """Quantizers of one engine: for a result, for a gradient, and for the activations that LoRA
    keeps in 8 bits.

    Each is None without FP8.
    """

    def __init__(self, sizes: Sizes, device: torch.device):
        self.scaling = DelayedScaling()
        trains = not sizes.lora_rank
        make: Callable[..., Quantizer | None] = (
            self.scaling.quantizer if sizes.fp8 else lambda **_: None
        )
        self.forward = make(transposed=trains)
        self.gradient = make(gradient=True, transposed=trains)
        self.kept = None if trains else make(transposed=False)
        if sizes.fp8:
            self.scaling.allocate(device)


Case = Callable[[str, Quantizers], tuple[Output, ...]]
Cases = Iterator[tuple[str, tuple[int, ...], Case]]  # op, shape


def kernel_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield cases one at a time, so that only one op's operands are in memory."""
    kinds = (
        norm_cases,
        rope_cases,
        swiglu_cases,
        adapter_cases if sizes.lora_rank else optimizer_cases,
        loss_cases,
    )
    for cases in kinds:
        yield from cases(sizes, draw)


def norm_cases(sizes: Sizes, draw: Draw) -> Cases:
    shape = sizes.shape
    size = (sizes.tokens, sizes.shape.hidden_size)
    eps = sizes.shape.norm_eps
    x, branch, d_n, d_x = (draw(*size, dtype=sizes.dtype) for _ in range(4))
    weight = draw(shape.hidden_size, dtype=sizes.dtype)
    rstd = (x.float().square().mean(-1) + eps).rsqrt()
    trains = not sizes.lora_rank
    yield (
        "add + RMS norm",
        size,
        lambda engine, q: ENGINES[engine].add_rms_norm(x, branch, weight, eps, q.forward),
    )
    yield (
        "RMS norm backward",
        size,
        lambda engine, q: ENGINES[engine].rms_norm_backward(
            d_n, x, rstd, weight, d_x, q.gradient, trains
        ),
    )
    if sizes.fp8:
        yield "quantize", size, lambda engine, q: (ENGINES[engine].quantize(x, q.forward),)


def rope_cases(sizes: Sizes, draw: Draw) -> Cases:
    shape = sizes.shape
    size = (sizes.tokens, sizes.shape.qkv_size)
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    cos, sin = rope_tables(shape, sizes.sequence_length, draw.device)
    qkv = draw(*size, dtype=sizes.dtype)
    yield (
        "RoPE",
        size,
        lambda engine, q: (ENGINES[engine].rope_(qkv.clone(), cos, sin, heads, kv_heads),),
    )
    parts = [
        draw(sizes.micro_batch_size, sizes.sequence_length, n, shape.head_dim, dtype=sizes.dtype)
        for n in (heads, kv_heads, kv_heads)
    ]

    def backward(engine: str, q: Quantizers) -> tuple[Output, ...]:
        # The adapters read the gradient in bf16.
        return (
            ENGINES[engine].rope_backward(
                *parts, cos, sin, None if sizes.lora_rank else q.gradient
            ),
        )

    yield "RoPE backward", size, backward


def swiglu_cases(sizes: Sizes, draw: Draw) -> Cases:
    size = (sizes.tokens, 2 * sizes.shape.ffn_hidden_size)
    gate_up = draw(*size, dtype=sizes.dtype)
    d_h = draw(sizes.tokens, sizes.shape.ffn_hidden_size, dtype=sizes.dtype)
    yield "SwiGLU", size, lambda engine, q: ENGINES[engine].swiglu(gate_up, q.forward, q.kept)

    def backward(engine: str, q: Quantizers) -> tuple[Output, ...]:
        kept = ENGINES[engine].swiglu(gate_up, q.forward, q.kept)[1] if q.kept else gate_up
        return (ENGINES[engine].swiglu_backward(d_h, kept, q.gradient),)

    yield "SwiGLU backward", size, backward


def loss_cases(sizes: Sizes, draw: Draw) -> Cases:
    size = (1, sizes.sequence_length, sizes.shape.vocab_size)
    logits = draw(*size, dtype=sizes.dtype, scale=3.0)
    labels = torch.randint(size[-1], size[:-1], device=draw.device, generator=draw.generator)

    def case(engine: str, _: Quantizers) -> tuple[Output, ...]:
        leaf = logits.clone().requires_grad_()
        loss, count = cross_entropy.ENGINES[engine](leaf, labels)
        return loss.detach(), count, torch.autograd.grad(loss.sum(), leaf)[0]

    yield "cross entropy", size, case


def optimizer_cases(sizes: Sizes, draw: Draw) -> Cases:
    size = (sizes.shape.ffn_hidden_size, sizes.shape.hidden_size)
    weight, gradient, first = (draw(*size, dtype=torch.float32) for _ in range(3))
    one = torch.ones((), device=draw.device)
    zero = torch.zeros((), device=draw.device)

    def update(engine: str, _: Quantizers) -> tuple[Output, ...]:
        state = (
            weight.clone(),
            gradient.clone(),
            first.clone(),
            first.square(),
            torch.empty_like(weight, dtype=sizes.dtype),
        )
        adamw.ENGINES[engine](*state, 0.1, adamw.AdamWStep(0.1, (0.9, 0.95), 1e-5, one, one, zero))
        return state

    yield "AdamW", size, update
    parts = draw(2, *size, dtype=sizes.dtype)
    yield (
        "accumulate",
        size,
        lambda engine, q: (accumulate.ENGINES[engine](weight.clone(), parts[0], parts[1:]),),
    )
    # Half of the ids belong to this rank's rows.
    ids = torch.randint(2 * size[0], size[:1], device=draw.device, generator=draw.generator)
    yield (
        "embedding's gradient",
        size,
        lambda engine, q: (accumulate.ADD_ROWS[engine](weight.clone(), ids, parts[0], 0, 2),),
    )


def adapter_cases(sizes: Sizes, draw: Draw) -> Cases:
    hidden = sizes.shape.hidden_size
    outputs = sizes.shape.qkv_size
    rank = sizes.lora_rank
    tokens = sizes.tokens
    new = partial(draw, dtype=sizes.dtype)
    x = new(tokens, hidden)
    a = new(rank, hidden)
    b = new(outputs, rank)
    t = new(tokens, rank)
    norm = lora.Norm(draw(tokens, dtype=torch.float32).abs() + 0.5, new(hidden))
    dropout = lora.Dropout(torch.tensor([2**40 + 7], device=draw.device), 0.1)
    yield (
        "adapter down",
        (tokens, hidden, rank),
        lambda engine, q: (lora.ENGINES[engine].down(x, norm, a, dropout),),
    )

    def down_backward(engine: str, _: Quantizers) -> tuple[Output, ...]:
        d_n = x.clone()
        return lora.ENGINES[engine].down_backward_(d_n, x, norm, t, a, dropout), d_n

    yield "adapter down backward", (tokens, hidden, rank), down_backward
    g = new(tokens, outputs)
    yield (
        "adapter up backward",
        (tokens, outputs, rank),
        lambda engine, q: lora.ENGINES[engine].up_backward(g, t, b, 2.0, dropout, q.gradient),
    )
