"""Checks of attention: forward and backward, compared with SDPA's math backend in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from common import engines
from common.kernels.attention import (
    attention_backends,
    attention_engine,
    attention_graph,
    causal_attention,
)
from common.self_test.kernel_cases import Draw, Sizes, random_heads
from common.self_test.results import Check, SelfTestResult, all_finite, decibels

# Minimum dB of a correct result. Probabilities and the result are rounded to bf16.
ATTENTION_DB = 30.0


def attention_checks(sizes: Sizes, draw: Draw, result: SelfTestResult) -> Iterator[Check]:
    """Yield the checks of attention. The first one also computes the results of the others."""
    shape = sizes.shape
    heads = f"{shape.num_heads}/{shape.num_kv_heads}"
    queries, keys = attention_lengths(sizes)[-1]
    length = f"{queries} of {keys}" if queries < keys else str(keys)
    text = f"[{sizes.micro_batch_size}, {length}, {heads}, {shape.head_dim}]"
    ratios: list[float] = []  # dB of the output, dQ, dK, dV

    def forward() -> float:
        heads = random_heads(sizes, draw, queries, keys)
        q, k, v = (tensor.requires_grad_() for tensor in heads)
        with attention_backends(draw.device.type, sizes.dtype):
            result.attention = backend_in_use(q, k, v)
            out = causal_attention(q, k, v)
            d_out = draw(*out.shape, dtype=sizes.dtype)
            gradients = torch.autograd.grad(out, (q, k, v), d_out)
        # The last key head of the last sequence, and the query heads that share it.
        group = shape.num_heads // shape.num_kv_heads
        truth = _attention_truth(
            q[-1, :, -group:], k[-1, :, -1], v[-1, :, -1], d_out[-1, :, -group:]
        )
        for true_values, values in zip(truth, (out, *gradients), strict=True):
            if all_finite(values):
                num_heads = true_values.shape[1]
                ratios.append(decibels(true_values, values[-1, :, -num_heads:]))
            else:
                ratios.append(math.nan)
        return ratios[0]

    yield Check("attention", text, ATTENTION_DB, forward)
    for index, name in enumerate(("dQ", "dK", "dV"), start=1):
        if ratios:  # unless `forward` raised
            measured = partial(ratios.__getitem__, index)
            yield Check(f"attention backward {name}", text, ATTENTION_DB, measured)


def attention_work(sizes: Sizes, draw: Draw) -> Callable[[], object]:
    """Return the attention of one layer, forward and backward, on packed projections.

    If ranks share each sequence, it is that of the first one, without the others' keys and values.
    """
    shape = sizes.shape
    parts = []
    for queries, keys in attention_lengths(sizes):
        size = (sizes.micro_batch_size, keys)
        projection = draw(*size, shape.qkv_size, dtype=sizes.dtype)
        packed = projection.unflatten(-1, (-1, shape.head_dim))
        q, k, v = packed.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=2)
        d_out = draw(sizes.micro_batch_size, queries, shape.attention_size, dtype=sizes.dtype)
        parts.append((q[:, -queries:], k, v, d_out))

    def work() -> None:
        with attention_backends(draw.device.type, sizes.dtype):
            for q, k, v, d_out in parts:
                attention_graph(q, k, v, keep=True).backward(d_out)

    return work


def attention_lengths(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys of each attention of a layer, the longest last.

    If ranks share each sequence, they are those of the first rank's two chunks.
    """
    length = sizes.sequence_length
    if sizes.context_parallel == 1:
        return [(length, length)]
    chunk = length // 2
    return [(chunk, chunk), (chunk, length * sizes.context_parallel)]


def backend_in_use(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the name of the attention backend that `causal_attention` would use for these tensors.

    It is "cudnn", "flash" or "math", on ROCm followed by the preferred library, or the name of an
    engine. Raises RuntimeError if no allowed backend supports the tensors.
    """
    engine = attention_engine(q.device, q.dtype).engine
    if engine.module and engine.name != engines.REPEATED_HEADS:
        return str(engine)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    # Fewer queries than keys are computed in two parts (prefix_attention.py), the larger unmasked.
    masked = q.shape[2] == k.shape[2]
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=masked, enable_gqa=True))
    if chosen == SDPBackend.ERROR:
        raise RuntimeError(
            f"no allowed backend takes {q.dtype} {tuple(q.shape)} with {k.shape[1]} key heads"
        )
    names = [chosen.name.lower().removesuffix("_attention")]
    if torch.version.hip:
        names.append(str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2])
    if engine.name == engines.REPEATED_HEADS:
        names = [engine.name, *names]
    return ", ".join(names)


def _attention_truth(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    """Return (out, dQ, dK, dV) of attention in fp32, each [queries or keys, heads, D].

    `q`, `d_out`: [queries, group, D], the query heads that share `k` and `v`.
    `k`, `v`: [keys, D].

    Computes one head at a time, because the math backend stores the scores of a head.
    """
    mask = causal_lower_right(len(q), len(k))
    k, v = (x.detach().float()[None, None].requires_grad_() for x in (k, v))
    heads: list[tuple[Tensor, ...]] = []
    for head in range(q.shape[1]):
        query = q[:, head].detach().float()[None, None].requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(out, (query, k, v), d_out[:, head].float()[None, None])
        heads.append(tuple(x[0, 0].detach() for x in (out, *gradients)))
    outs, d_q, d_k, d_v = (torch.stack(parts, 1) for parts in zip(*heads, strict=True))
    return outs, d_q, d_k.sum(1, keepdim=True), d_v.sum(1, keepdim=True)
