"""Cross entropy of next-token logits, summed per sequence: loss = logsumexp(z) - z[label], natural logarithm.

Backward, for the upstream gradient g of the sequence's loss sum: dz = g * (softmax(z) - onehot(label)); 0 where the label is ignored.

Triton: the forward reads each row of logits once (online log-sum-exp, Milakov and Gimelshein, arXiv:1805.02867), the backward
reads it once more and writes the gradient over it. For vocabulary 128,256 in bf16 this moves 256,512 bytes per token forward and
513,024 backward (0.06 + 0.12 us on an H200 that copies at 4.3 TB/s) and saves a second buffer of 2.1 GB per sequence of 8,192. Plain
torch moves some 3.5 MB per token: a copy in fp32, its log-softmax, the gradient of that and a cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from common.kernels.architecture import Tile, architecture, assert_contiguous

IGNORE_INDEX = -100  # a label that does not count, as in Hugging Face

_IGNORE = tl.constexpr(IGNORE_INDEX)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


def cross_entropy_reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [batch, sequence, vocab]; labels: int [batch, sequence].

    Returns (loss_sum, count), both fp32 [batch]: the sum over the sequence's valid tokens and how many there are.
    Log-sum-exp and sums are computed in fp32 whatever the logits' dtype.
    """
    # torch's gradient of an ignored row is 0 times its softmax: NaN where a logit of it is NaN or inf.
    logits = logits.float().masked_fill((labels == IGNORE_INDEX)[..., None], 0.0)
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return losses.view_as(labels).sum(-1), count_valid(labels)


def count_valid(labels: Tensor) -> Tensor:
    """int [batch, sequence] -> fp32 [batch]."""
    return (labels != IGNORE_INDEX).sum(-1, dtype=torch.float32)


@triton.jit
def _cross_entropy_forward_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    max_ptr,
    sum_ptr,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program per row: its loss, its largest logit m and the sum of exp(z - m).

    A tile is DEPTH x LANES. Each lane has its own maximum and sum, so that threads synchronize only at the end of the row.
    exp(z - m) is exp2((z - m) * log2(e)), one instruction; scaling z itself would round large logits before the difference.
    """
    row = tl.program_id(0).to(
        tl.int64
    )  # 2**31 logits are reached at 16,744 tokens of vocabulary 128,256
    label = tl.load(labels_ptr + row)
    if label == _IGNORE:  # the row is not read
        tl.store(losses_ptr + row, 0.0)
        return
    logits_ptr += row * VOCAB
    # A label outside the vocabulary makes the loss NaN, which the loop stops at, instead of reading another row.
    label_logit = tl.load(
        logits_ptr + label, mask=(label >= 0) & (label < VOCAB), other=float("nan")
    ).to(tl.float32)
    lane = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_max = tl.full((LANES,), float("-inf"), tl.float32)
    lane_sum = tl.zeros((LANES,), tl.float32)
    for start in range(0, VOCAB, DEPTH * LANES):
        column = start + lane
        z = tl.load(logits_ptr + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, tl.max(z, 0))
        base = tl.where(
            new_max == float("-inf"), 0.0, new_max
        )  # -inf - -inf is NaN: a lane that has only seen -inf has sum 0
        lane_sum = lane_sum * tl.exp2((lane_max - base) * _LOG2_E) + tl.sum(
            tl.exp2((z - base[None, :]) * _LOG2_E), 0
        )
        lane_max = new_max
    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - row_max) * _LOG2_E), 0)
    tl.store(max_ptr + row, row_max)
    tl.store(sum_ptr + row, row_sum)
    tl.store(losses_ptr + row, (row_max - label_logit) + tl.log2(row_sum) * _LN_2)


@triton.jit
def _cross_entropy_backward_kernel(
    logits_ptr,
    labels_ptr,
    max_ptr,
    sum_ptr,
    upstream_ptr,
    sequence,
    upstream_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK columns of a row; the gradient is written over the logits. The upstream gradient takes no pass of its own:
    it is one factor with the row's 1 / sum. The one-hot is subtracted in fp32, before the only rounding.
    """
    blocks: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < VOCAB
    pointer = logits_ptr + row.to(tl.int64) * VOCAB + column
    z = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    label = tl.load(labels_ptr + row)
    upstream = tl.load(upstream_ptr + row // sequence * upstream_stride)
    softmax = tl.exp2((z - tl.load(max_ptr + row)) * _LOG2_E) * (upstream / tl.load(sum_ptr + row))
    d_logits = softmax - tl.where(column == label, upstream, 0.0)
    # Selected, not multiplied: an ignored row is 0 whatever its logits and its upstream gradient are (1 / count of a sequence
    # without valid tokens is inf), and its maximum and sum were never written.
    d_logits = tl.where(label == _IGNORE, 0.0, d_logits)
    tl.store(pointer, d_logits.to(logits_ptr.dtype.element_ty), mask=mask)


def _warps(arch: str) -> int:
    """256 threads, so that 2,048 columns are one load of 16 bytes of bf16 for each."""
    return 4 if arch.startswith("gfx") else 8


def cross_entropy_forward_settings(arch: str) -> Tile:
    """`columns`: the lanes of a row, each with its own log-sum-exp; `rows`: how many columns a lane takes at a time."""
    return Tile(rows=8, columns=2048, warps=_warps(arch))


def cross_entropy_backward_settings(arch: str) -> Tile:
    return Tile(rows=1, columns=4096, warps=_warps(arch))


def cross_entropy_forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [batch, sequence, vocab], labels: int [batch, sequence], both contiguous.

    Returns losses, and of each row the largest logit and sum(exp(z - largest)), all fp32 [batch, sequence].
    """
    assert_contiguous("cross entropy", logits, labels)
    losses, largest, total = logits.new_empty(3, *labels.shape, dtype=torch.float32).unbind()
    tile = cross_entropy_forward_settings(architecture(logits.device))
    _cross_entropy_forward_kernel[(labels.numel(),)](
        logits,
        labels,
        losses,
        largest,
        total,
        VOCAB=logits.shape[-1],
        LANES=tile.columns,
        DEPTH=tile.rows,
        **tile.options,
    )
    return losses, largest, total


def cross_entropy_backward(
    logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, d_loss_sum: Tensor
) -> None:
    """Overwrite `logits` with their gradient. d_loss_sum: fp32 [batch], of any stride, also 0; the others as of the forward."""
    assert_contiguous("cross entropy's backward", logits, labels, largest, total)
    vocab = logits.shape[-1]
    tile = cross_entropy_backward_settings(architecture(logits.device))
    grid = (labels.numel() * triton.cdiv(vocab, tile.columns),)
    _cross_entropy_backward_kernel[grid](
        logits, labels, largest, total, d_loss_sum, labels.shape[-1], d_loss_sum.stride(0),
        VOCAB=vocab, BLOCK=tile.columns, **tile.options,
    )  # fmt: skip


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        losses, largest, total = cross_entropy_forward(logits, labels)
        ctx.save_for_backward(
            logits, labels, largest, total
        )  # autograd keeps nothing where no gradient is wanted
        return losses.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss_sum: Tensor) -> tuple[Tensor, None]:
        logits, labels, largest, total = ctx.saved_tensors
        cross_entropy_backward(logits, labels, largest, total, d_loss_sum)
        # Autograd does not see what a kernel writes. Told of it, it refuses every later backward that would read these logits, this one
        # too.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None


def cross_entropy_triton(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As `cross_entropy_reference`; logits contiguous, in bf16, fp16 or fp32. Runs eagerly.

    The backward DESTROYS the logits: their memory becomes their gradient. Whoever else reads them must do so before; a backward
    that would read them later (a second one through this loss, with retain_graph; a second loss on the same logits; the op that
    made them, had it saved its output) raises RuntimeError. Where no gradient is wanted nothing is overwritten and nothing kept.
    A label that is neither in the vocabulary nor ignored gives a loss of NaN.

    Raises ValueError for logits that are not contiguous (copying gigabytes would go unnoticed) or labels of another shape.
    """
    if not logits.is_contiguous() or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy_triton: expected contiguous logits [batch, sequence, vocab] and labels [batch, sequence], "
            f"got {tuple(logits.shape)} with strides {logits.stride()} and {tuple(labels.shape)}"
        )
    return _CrossEntropy.apply(logits, labels.contiguous()), count_valid(labels)


ENGINES = {"reference": cross_entropy_reference, "triton": cross_entropy_triton}
