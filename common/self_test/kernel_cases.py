"""Test cases for the Triton kernels of a config, at the config's shapes.

The self-test and the tuning of kernels use them. A case is a function of an engine ("reference" or
"triton") and its quantizers. It returns the outputs of a kernel and leaves the operands unchanged.
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
from common.model.block_ops import KERNEL_ENGINES
from common.model.linear_layers import DelayedScaling
from common.model.precision import DTYPES
from common.model.shapes import ModelShape

Output = Tensor | QuantizedTensor | None


@dataclass(frozen=True)
class Sizes:
    """The parameters that determine the shapes and dtypes of all ops."""

    shape: ModelShape
    sequence_length: int  # tokens of a sequence that one rank holds
    micro_batch_size: int
    fp8: bool
    lora_rank: int  # 0: all weights train
    kernels: str  # "reference" or "triton"
    dtype: torch.dtype  # of activations
    context_parallel: int = 1  # ranks that share each sequence

    @staticmethod
    def of(config: RunConfig, shape: ModelShape, sequence_length: int, lora_rank: int) -> Sizes:
        """Return the sizes of a run. Raises ConfigError for an unsupported head dimension."""
        if config.kernels == "triton":
            require_triton_shape(shape)
        return Sizes(
            shape=shape,
            sequence_length=sequence_length // config.context_parallel,
            micro_batch_size=config.micro_batch_size,
            fp8=config.linear_format.in_fp8,
            lora_rank=lora_rank,
            kernels=config.kernels,
            dtype=DTYPES[config.precision],
            context_parallel=config.context_parallel,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.sequence_length


class Draw:
    """A source of normal random tensors. Its generator is separate from the run's global ones."""

    def __init__(self, device: torch.device):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(1)

    def __call__(
        self, *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> Tensor:
        drawn = torch.randn(*size, device=self.device, dtype=dtype, generator=self.generator)
        return drawn.mul_(scale)


class Quantizers:
    """Quantizers for one engine, None without FP8. `kept` is also None without LoRA."""

    def __init__(self, sizes: Sizes, device: torch.device):
        self.forward: Quantizer | None = None  # of a forward's result
        self.gradient: Quantizer | None = None
        # Of the packed projection's gradient. Adapters read it unquantized: None with LoRA.
        self.qkv_gradient: Quantizer | None = None
        self.kept: Quantizer | None = None  # of the activations that LoRA keeps in 8 bits
        self.scaling = DelayedScaling()
        if not sizes.fp8:
            return
        trains = not sizes.lora_rank
        self.forward = self.scaling.quantizer(transposed=trains)
        self.gradient = self.scaling.quantizer(gradient=True, transposed=trains)
        if trains:
            self.qkv_gradient = self.gradient
        else:
            self.kept = self.scaling.quantizer(transposed=False)
        self.scaling.allocate(device)


Case = Callable[[str, Quantizers], tuple[Output, ...]]
Cases = Iterator[tuple[str, tuple[int, ...], Case]]  # op, shape, case


def kernel_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield cases one at a time, so that the operands of only one op are in memory."""
    yield from norm_cases(sizes, draw)
    if sizes.shape.qk_norm:
        yield from qk_norm_cases(sizes, draw)
    else:
        yield from rope_cases(sizes, draw)
    yield from swiglu_cases(sizes, draw)
    if sizes.lora_rank:
        yield from adapter_cases(sizes, draw)
    else:
        yield from optimizer_cases(sizes, draw)
    yield from loss_cases(sizes, draw)


def norm_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the cases of the RMS norm and of quantization."""
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
        lambda engine, q: KERNEL_ENGINES[engine].add_rms_norm(x, branch, weight, eps, q.forward),
    )
    yield (
        "RMS norm backward",
        size,
        lambda engine, q: KERNEL_ENGINES[engine].rms_norm_backward(
            d_n, x, rstd, weight, d_x, q.gradient, trains
        ),
    )
    if sizes.fp8:
        yield "quantize", size, lambda engine, q: (KERNEL_ENGINES[engine].quantize(x, q.forward),)


def rope_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the cases of RoPE."""
    shape = sizes.shape
    size = (sizes.tokens, sizes.shape.qkv_size)
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    cos, sin = rope_tables(shape, sizes.sequence_length, draw.device)
    qkv = draw(*size, dtype=sizes.dtype)
    yield (
        "RoPE",
        size,
        lambda engine, q: (KERNEL_ENGINES[engine].rope_(qkv.clone(), cos, sin, heads, kv_heads),),
    )
    gradients = random_heads(sizes, draw, sizes.sequence_length, sizes.sequence_length)

    def backward(engine: str, q: Quantizers) -> tuple[Output, ...]:
        return (KERNEL_ENGINES[engine].rope_backward(*gradients, cos, sin, q.qkv_gradient),)

    yield "RoPE backward", size, backward


def qk_norm_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the cases of the norms of query and key heads with RoPE."""
    # Imported only for shapes with such norms, as in a run.
    from common.kernels import qk_norm

    shape = sizes.shape
    size = (sizes.tokens, sizes.shape.qkv_size)
    cos, sin = rope_tables(shape, sizes.sequence_length, draw.device)
    qkv = draw(*size, dtype=sizes.dtype)
    weights = (draw(shape.head_dim, dtype=sizes.dtype), draw(shape.head_dim, dtype=sizes.dtype))

    def forward(engine: str, _: Quantizers) -> tuple[Output, ...]:
        rotated = qkv.clone()
        before = qk_norm.IMPLEMENTATIONS[engine].norm_rope_(
            rotated, weights, shape.norm_eps, cos, sin, shape.num_heads, shape.num_kv_heads, True
        )
        return rotated, before

    yield "QK norm + RoPE", size, forward
    gradients = random_heads(sizes, draw, sizes.sequence_length, sizes.sequence_length)
    before = draw(
        sizes.tokens, (shape.num_heads + shape.num_kv_heads) * shape.head_dim, dtype=sizes.dtype
    )

    def backward(engine: str, q: Quantizers) -> tuple[Output, ...]:
        d_qkv, d_weights = qk_norm.IMPLEMENTATIONS[engine].norm_rope_backward(
            gradients,
            before,
            weights,
            shape.norm_eps,
            cos,
            sin,
            q.qkv_gradient,
            not sizes.lora_rank,
        )
        return d_qkv, *d_weights

    yield "QK norm + RoPE backward", size, backward


def random_heads(
    sizes: Sizes, draw: Draw, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query, key and value heads, each [batch, queries or keys, heads, head_dim].

    If ranks share each sequence, keys and values are in one tensor with tokens outermost, as in
    ContextAttention.
    """

    batch = sizes.micro_batch_size
    kv_heads = sizes.shape.num_kv_heads

    def random(*size: int) -> Tensor:
        return draw(*size, sizes.shape.head_dim, dtype=sizes.dtype)

    q = random(batch, queries, sizes.shape.num_heads)
    if sizes.context_parallel == 1:
        return q, random(batch, keys, kv_heads), random(batch, keys, kv_heads)
    k, v = random(keys, batch, 2 * kv_heads).transpose(0, 1).chunk(2, 2)
    return q, k, v


def swiglu_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the cases of SwiGLU."""
    size = (sizes.tokens, 2 * sizes.shape.ffn_hidden_size)
    gate_up = draw(*size, dtype=sizes.dtype)
    d_h = draw(sizes.tokens, sizes.shape.ffn_hidden_size, dtype=sizes.dtype)
    yield (
        "SwiGLU",
        size,
        lambda engine, q: KERNEL_ENGINES[engine].swiglu(gate_up, q.forward, q.kept),
    )

    def backward(engine: str, q: Quantizers) -> tuple[Output, ...]:
        kept: Tensor | QuantizedTensor = gate_up
        if q.kept:
            _, kept = KERNEL_ENGINES[engine].swiglu(gate_up, q.forward, q.kept)
        return (KERNEL_ENGINES[engine].swiglu_backward(d_h, kept, q.gradient),)

    yield "SwiGLU backward", size, backward


def loss_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the case of cross entropy."""
    size = (1, sizes.sequence_length, sizes.shape.vocab_size)
    logits = draw(*size, dtype=sizes.dtype, scale=3.0)
    labels = torch.randint(size[-1], size[:-1], device=draw.device, generator=draw.generator)

    def case(engine: str, _: Quantizers) -> tuple[Output, ...]:
        leaf = logits.clone().requires_grad_()
        loss, count = cross_entropy.IMPLEMENTATIONS[engine](leaf, labels)
        return loss.detach(), count, torch.autograd.grad(loss.sum(), leaf)[0]

    yield "cross entropy", size, case


def optimizer_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the cases of AdamW and of the accumulation of gradients."""
    size = (sizes.shape.ffn_hidden_size, sizes.shape.hidden_size)
    weight, gradient, first = (draw(*size, dtype=torch.float32) for _ in range(3))
    one = torch.ones((), device=draw.device)
    zero = torch.zeros((), device=draw.device)

    def update(engine: str, _: Quantizers) -> tuple[Output, ...]:
        state = (
            weight.clone(),
            gradient.clone(),
            first.clone(),
            first.square(),  # the second moment is not negative
            torch.empty_like(weight, dtype=sizes.dtype),
        )
        step = adamw.AdamWStep(0.1, (0.9, 0.95), 1e-5, one, one, zero)
        adamw.IMPLEMENTATIONS[engine](*state, 0.1, step)
        return state

    yield "AdamW", size, update
    parts = draw(2, *size, dtype=sizes.dtype)
    yield (
        "accumulate",
        size,
        lambda engine, q: (
            accumulate.IMPLEMENTATIONS[engine](weight.clone(), parts[0], parts[1:]),
        ),
    )
    # Half of the ids belong to this rank's rows.
    ids = torch.randint(2 * size[0], size[:1], device=draw.device, generator=draw.generator)
    yield (
        "embedding's gradient",
        size,
        lambda engine, q: (accumulate.ADD_ROWS[engine](weight.clone(), ids, parts[0], 0, 2),),
    )


def adapter_cases(sizes: Sizes, draw: Draw) -> Cases:
    """Yield the cases of LoRA's adapters."""
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
        lambda engine, q: (lora.IMPLEMENTATIONS[engine].down(x, norm, a, dropout),),
    )

    def down_backward(engine: str, _: Quantizers) -> tuple[Output, ...]:
        d_n = x.clone()
        return lora.IMPLEMENTATIONS[engine].down_backward_(d_n, x, norm, t, a, dropout), d_n

    yield "adapter down backward", (tokens, hidden, rank), down_backward
    g = new(tokens, outputs)
    yield (
        "adapter up backward",
        (tokens, outputs, rank),
        lambda engine, q: lora.IMPLEMENTATIONS[engine].up_backward(
            g, t, b, 2.0, dropout, q.gradient
        ),
    )
