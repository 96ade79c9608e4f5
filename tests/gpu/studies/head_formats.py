"""The output head with each of its three products in FP8, for the study fp8_head.py.

    logits = x W^T      d_x = d_logits W      d_W = d_logits^T x

The label's column of d_logits is exact: the quantized matrix has 0 there, and p - 1 is gathered and
added in fp32. Products apply scales to their result, so a scale per row of the first factor is
free: per token in d_x, per row of the vocabulary in d_W. x and W have one scale each.

On a CPU, products of FP8 numbers are emulated in bf16, which holds them exactly, with sums in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from block_formats import E4M3, E5M2, Element, round_to
from fast_emulation import _round
from torch import Tensor

from common.kernels.cross_entropy import count_valid, cross_entropy_forward
from common.model.llama import Head

LEAST_SCALE = 1e-30  # of rows of zeros
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


@dataclass(frozen=True)
class Rounding:
    """How a matrix is rounded to FP8."""

    element: Element
    stochastic: bool = False
    by_row: bool = True  # a scale per row, else one for the matrix


NEAREST = Rounding(E4M3)
STOCHASTIC = Rounding(E4M3, stochastic=True)
TENSOR = Rounding(E4M3, by_row=False)
TENSOR_STOCHASTIC = replace(TENSOR, stochastic=True)
GRADIENTS: dict[str, Rounding] = {  # of the softmax
    "e4m3 row": NEAREST,
    "e5m2 row": Rounding(E5M2),
    "e4m3 row stochastic": STOCHASTIC,
    "e5m2 row stochastic": Rounding(E5M2, stochastic=True),
    "e4m3 tensor": TENSOR,
    "e4m3 tensor stochastic": TENSOR_STOCHASTIC,
}
OTHERS: dict[str, Rounding | None] = {  # of x in d_W, and of W in d_x
    "bf16": None,
    "e4m3": TENSOR,
    "e4m3 stochastic": TENSOR_STOCHASTIC,
}


class Quantized(NamedTuple):
    """A matrix [rows, columns] = values * inverse_scale."""

    values: Tensor  # FP8 on a GPU; on a CPU bf16, which holds the same numbers
    inverse_scale: Tensor  # fp32 [rows, 1] or [1, 1]

    def dequantize(self) -> Tensor:
        return self.values.float().double() * self.inverse_scale


def quantize(x: Tensor, rounding: Rounding, amax: float | None = None) -> Quantized:
    """Quantize [rows, columns]. `amax`: of the whole matrix, if `x` is a part of it."""
    x = x.float()
    element = rounding.element
    if rounding.by_row:
        largest = x.abs().amax(1, keepdim=True)
    else:
        largest = x.abs().amax().view(1, 1) if amax is None else x.new_full((1, 1), amax)
    inverse = (largest / element.largest).clamp(min=LEAST_SCALE)
    scaled = x.div(inverse).contiguous()
    if rounding.stochastic:
        scaled = round_to(scaled, element, stochastic=True)
    values = scaled.clamp_(-element.largest, element.largest).to(DTYPES[element])
    return Quantized(values if x.is_cuda else values.bfloat16(), inverse)


def unscaled_product(a: Quantized, b: Quantized, fast_sums: bool) -> Tensor:
    """Return the product of the values in bf16, [M, N], of a [M, K] and b [N, K]."""
    if a.values.dtype == torch.bfloat16:
        return a.values @ b.values.t()
    one = torch.ones(1, device=a.values.device)
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_sums,
    )


def multiply(a: Quantized, b: Quantized, fast_sums: bool) -> Tensor:
    """Return a b^T in fp32, [M, N], of a [M, K] and b [N, K]. The tensor cores' result is bf16."""
    product = unscaled_product(a, b, fast_sums)
    return product.float().mul_(a.inverse_scale).mul_(b.inverse_scale.t())


# Kernels that quantize the softmax straight from the logits


@triton.jit
def _softmax(logits, lse, labels, upstream, token, column, tokens, VOCAB: tl.constexpr):
    """Return upstream * softmax of a tile, with 0 in the label's column and outside."""
    mask = (token < tokens) & (column < VOCAB)
    z = tl.load(logits + token * VOCAB + column, mask=mask, other=float("-inf")).to(tl.float32)
    there = token < tokens
    shift = tl.load(lse + token, mask=there, other=0.0)
    p = tl.exp(z - shift) * tl.load(upstream + token, mask=there, other=0.0)
    return tl.where(column == tl.load(labels + token, mask=there, other=-1), 0.0, p)


@triton.jit
def _amax_kernel(
    logits,
    lse,
    labels,
    upstream,
    by_token,
    by_column,
    tokens,
    VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the largest element of each token and of each vocabulary row, in one pass."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p = _softmax(logits, lse, labels, upstream, token, column, tokens, VOCAB)
    bits = p.to(tl.int32, bitcast=True)  # ordered like the floats, which are not negative
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.atomic_max(by_token + row, tl.max(bits, 1), mask=row < tokens)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.atomic_max(by_column + row, tl.max(bits, 0), mask=row < VOCAB)


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    logits,
    lse,
    labels,
    upstream,
    amax,
    out,
    seed,
    tokens,
    VOCAB: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST_STEP: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a tile of the softmax to `out`: [tokens, VOCAB], or TRANSPOSED [VOCAB, tokens]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if TRANSPOSED:
        mask = (row < VOCAB) & (place < tokens)
        there = row < VOCAB
        index = row * tokens + place
        p = _softmax(logits, lse, labels, upstream, place, row, tokens, VOCAB)
    else:
        mask = (row < tokens) & (place < VOCAB)
        there = row < tokens
        index = row * VOCAB + place
        p = _softmax(logits, lse, labels, upstream, row, place, tokens, VOCAB)
    largest = tl.load(amax + row, mask=there, other=1.0)
    inverse = tl.maximum(tl.div_rn(largest, LARGEST), 1e-30)  # LEAST_SCALE
    noise = p
    if STOCHASTIC:
        # A hash of index and seed (lowbias32), some ten instructions, where Philox has sixty.
        bits = index.to(tl.uint32) ^ seed.to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        noise = ((bits ^ (bits >> 16)) >> 8).to(tl.float32) * (1.0 / 16777216.0)
    y = _round(tl.div_rn(p, inverse), noise, MANTISSA, LEAST_STEP, LARGEST, STOCHASTIC)
    tl.store(out + index, y.to(out.dtype.element_ty), mask=mask)


def softmax_amaxes(softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Return the largest element of each token [T, 1] and of each vocabulary row [V, 1]."""
    tokens, vocab = softmax.logits.shape
    by_token = torch.zeros(tokens, 1, device=softmax.logits.device)
    by_column = torch.zeros(vocab, 1, device=softmax.logits.device)
    grid = (triton.cdiv(tokens, 64), triton.cdiv(vocab, 128))
    _amax_kernel[grid](
        *softmax,
        by_token.view(torch.int32),
        by_column.view(torch.int32),
        tokens,
        VOCAB=vocab,
        ROWS=64,
        COLUMNS=128,
    )
    return by_token, by_column


def quantize_softmax(
    softmax: Softmax, amax: Tensor, rounding: Rounding, transposed: bool
) -> Quantized:
    """Quantize the softmax by the kernel. `amax`: of the rows of the result."""
    tokens, vocab = softmax.logits.shape
    element = rounding.element
    shape = (vocab, tokens) if transposed else (tokens, vocab)
    device = softmax.logits.device
    dtype = DTYPES[element] if device.type == "cuda" else torch.bfloat16
    out = torch.empty(shape, device=device, dtype=dtype)
    _quantize_kernel[(triton.cdiv(shape[0], 64), triton.cdiv(shape[1], 64))](
        *softmax,
        amax,
        out,
        int(torch.randint(2**31 - 1, ())) if rounding.stochastic else 0,
        tokens,
        VOCAB=vocab,
        TRANSPOSED=transposed,
        MANTISSA=element.mantissa_bits,
        LEAST_STEP=2.0 ** (element.min_exponent - element.mantissa_bits),
        LARGEST=element.largest,
        STOCHASTIC=rounding.stochastic,
        ROWS=64,
        COLUMNS=64,
    )
    return Quantized(out, (amax / element.largest).clamp(min=LEAST_SCALE))


BY_KERNEL = [False]  # see install_kernel


# The head


class Softmax(NamedTuple):
    """What the softmax without the label's column is computed from."""

    logits: Tensor  # [T, V]
    lse: Tensor  # fp32 [T], log of the sum of exp(logits)
    labels: Tensor  # int64 [T]
    upstream: Tensor  # fp32 [T], gradient of each token's loss

    def matrix(self) -> Tensor:
        """Return upstream * softmax with 0 in the label's column, fp32 [T, V]."""
        p = (self.logits.float() - self.lse[:, None]).exp_().mul_(self.upstream[:, None])
        return p.scatter_(1, self.labels[:, None], 0.0)

    def label_part(self) -> Tensor:
        """Return upstream * (p - 1) of the label's column, fp32 [T]."""
        z = self.logits.gather(1, self.labels[:, None])[:, 0].float()
        return (z - self.lse).expm1() * self.upstream

    def quantized(self, rounding: Rounding, transposed: bool) -> Quantized:
        """Return the softmax [T, V], or its transpose, in FP8 with a scale per row."""
        if BY_KERNEL[0]:
            return quantize_softmax(self, softmax_amaxes(self)[transposed], rounding, transposed)
        p = self.matrix()
        return quantize(p.t() if transposed else p, rounding)


def softmax_of(logits: Tensor, labels: Tensor, upstream: Tensor | None = None) -> Softmax:
    if logits.is_cuda:
        _, largest, total = cross_entropy_forward(logits[None], labels[None])
        lse = (largest + total.log())[0]
    else:
        lse = logits.float().logsumexp(1)
    return Softmax(logits, lse, labels, torch.ones_like(lse) if upstream is None else upstream)


@dataclass(frozen=True)
class HeadFormat:
    """Formats of the head's three products. None: bf16."""

    forward: bool = False
    dgrad: Rounding | None = None
    wgrad: Rounding | None = None
    other: Rounding = TENSOR  # of x and W
    fast_sums: bool = True  # the tensor cores' own precision, as common/kernels/fp8.py has it


class FormatHead(torch.autograd.Function):
    """Losses of tokens, fp32 [T], from x [T, D], W [V, D] and labels [T]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, form: HeadFormat) -> Tensor:
        if form.forward:
            logits = multiply(quantize(x, form.other), quantize(weight, form.other), form.fast_sums)
            logits = logits.to(x.dtype)
        else:
            logits = x @ weight.t()
        softmax = softmax_of(logits, labels)
        ctx.save_for_backward(x, weight, *softmax[:3])
        ctx.form = form
        return softmax.lse - logits.gather(1, labels[:, None])[:, 0].float()

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, logits, lse, labels = ctx.saved_tensors
        softmax = Softmax(logits, lse, labels, d_losses.contiguous())
        form = ctx.form
        d_logits = None if form.dgrad and form.wgrad else bf16_gradient(softmax)
        d_x = input_gradient(softmax, weight, form) if form.dgrad else d_logits @ weight
        d_weight = weight_gradient(softmax, x, form) if form.wgrad else d_logits.t() @ x
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None, None


def bf16_gradient(softmax: Softmax) -> Tensor:
    """Return d_logits as shipped, label included: rounded once to the dtype of the logits."""
    d_logits = softmax.matrix()
    d_logits.scatter_(1, softmax.labels[:, None], softmax.label_part()[:, None])
    return d_logits.to(softmax.logits.dtype)


def input_gradient(softmax: Softmax, weight: Tensor, form: HeadFormat) -> Tensor:
    """Return d_x in fp32, in FP8 without the label's column."""
    d_logits = softmax.quantized(form.dgrad, transposed=False)
    d_x = multiply(d_logits, quantize(weight.t(), form.other), form.fast_sums)
    return d_x.addcmul_(softmax.label_part()[:, None], weight[softmax.labels].float())


def weight_gradient(softmax: Softmax, x: Tensor, form: HeadFormat) -> Tensor:
    """Return d_W in fp32, in FP8 without the label's column."""
    d_logits = softmax.quantized(form.wgrad, transposed=True)
    d_weight = multiply(d_logits, quantize(x.t(), form.other), form.fast_sums)
    return d_weight.index_add_(0, softmax.labels, softmax.label_part()[:, None] * x.float())


@contextmanager
def head_format(form: HeadFormat | None) -> Iterator[None]:
    """Let every Head compute in `form`. None: as shipped."""

    def forward(self: Head, x_BSD: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x_BSD).flatten(0, 1)
        losses = FormatHead.apply(x, self.output.weight, labels_BS.flatten().long(), form)
        return losses.view_as(labels_BS).sum(-1), count_valid(labels_BS)

    if form is None:
        yield
    else:
        with mock.patch.object(Head, "forward", forward):
            yield


def install_kernel(softmax: Softmax) -> None:
    """Let `Softmax.quantized` use the kernel if it rounds almost as plain torch does.

    Its exp may differ in the last bits, which changes elements near a tie. Stochastic rounding
    draws other numbers, so the sums are compared.
    """
    some = Softmax(*(each[:512].contiguous() for each in softmax))
    p = some.matrix()
    right = True
    for transposed, amax in enumerate(softmax_amaxes(some)):
        plain = p.t().contiguous() if transposed else p
        for name in ("e4m3 row", "e5m2 row", "e4m3 row stochastic"):
            rounding = GRADIENTS[name]
            made = quantize_softmax(some, amax, rounding, bool(transposed)).dequantize()
            expected = quantize(plain, rounding).dequantize()
            # A scale may differ in its last bits.
            differ = float(((made - expected).abs() > 1e-5 * expected).double().mean())
            sums = [float(each.sum() / plain.double().sum() - 1) for each in (made, expected)]
            right &= abs(sums[0] - sums[1]) < 5e-3 and (rounding.stochastic or differ < 1e-3)
            print(
                f"kernel, {'columns' if transposed else 'rows'}, {name}: {differ:.1e} of the "
                f"elements differ, sum off by {sums[0]:+.1e}, in plain torch {sums[1]:+.1e}",
                flush=True,
            )
    BY_KERNEL[0] = right
    print(f"the softmax is quantized by {'the kernel' if right else 'plain torch'}", flush=True)


def random_softmax(device: torch.device, tokens: int, vocab: int) -> Softmax:
    """Return a softmax of random logits and labels, to compare and time kernels."""
    logits = (2 * torch.randn(tokens, vocab, device=device)).bfloat16()
    labels = torch.randint(vocab, (tokens,), device=device)
    return softmax_of(logits, labels, torch.full((tokens,), 1 / tokens, device=device))
