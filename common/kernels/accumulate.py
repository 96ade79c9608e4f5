"""Add the gradient of a micro-batch, in the dtype of its reduction, to an fp32 total.

The result is total + part, or part alone for the first micro-batch. While matrix products run at
the same time, torch's add of two dtypes reaches only half of the memory bandwidth (2.2 of 4.2 TB/s
on an H200). If ranks exchange their parts unreduced (sharding/copy_engine.py), the same pass
computes their mean.

The gradient of the embedding is added row by row. The dense gradient of the 8B's embedding would be
1 GB per micro-batch. A sequence makes at most 8,192 of its 128,256 rows nonzero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.architecture import Tile, architecture, assert_contiguous


def accumulate_reference(
    total: Tensor | None, part: Tensor, others: Tensor | None = None
) -> Tensor:
    """Add `part` to `total` in place and return the sum. Without a total, return `part` in fp32.

    `total`: fp32.
    `part`: shaped like `total`, contiguous, of any float dtype.
    `others`: [n, *part.shape], contiguous, in part's dtype. If given, the mean of `part` and these
        n tensors is added, computed in fp32.
    """
    if others is not None:
        part = (part.float() + others.float().sum(0)) / (1 + len(others))
    return part.float() if total is None else total.add_(part)


@triton.jit
def _accumulate_kernel(
    total_ptr,
    part_ptr,
    others_ptr,
    size,
    OTHERS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add BLOCK elements of part, or of its mean with OTHERS tensors, to total. One program each.

    `others_ptr`: [OTHERS, size], or None if OTHERS is 0.
    FIRST: total is overwritten instead of added to.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    value = tl.load(part_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if OTHERS > 0:
        for _ in tl.static_range(OTHERS):
            value += tl.load(others_ptr + place, mask=mask, other=0.0).to(tl.float32)
            others_ptr += size
        value /= OTHERS + 1
    if not FIRST:
        value += tl.load(total_ptr + place, mask=mask, other=0.0)
    tl.store(total_ptr + place, value, mask=mask)


def accumulate_settings(arch: str) -> Tile:
    # Small tiles let concurrent matrix products start sooner. sm_90: 96 to 99 % of a copy's
    # bandwidth on an H200, as with 4096 columns.
    return Tile(rows=1, columns=1024, warps=4)


def accumulate_triton(total: Tensor | None, part: Tensor, others: Tensor | None = None) -> Tensor:
    """Triton version of `accumulate_reference`. A new total never shares its memory with `part`."""
    assert_contiguous("accumulate", total, part, others)
    first = total is None
    total = torch.empty_like(part, dtype=torch.float32) if total is None else total
    tile = accumulate_settings(architecture(part.device))
    grid = (triton.cdiv(part.numel(), tile.columns),)
    count = 0 if others is None else len(others)
    _accumulate_kernel[grid](
        total, part, others, part.numel(), count, first, tile.columns, **tile.options
    )
    return total


IMPLEMENTATIONS = {"reference": accumulate_reference, "triton": accumulate_triton}


def add_rows_reference(total: Tensor, ids: Tensor, rows: Tensor, first: int, ranks: int) -> Tensor:
    """Add the gradients of tokens to this rank's rows of the embedding's gradient.

    `total`: fp32 [n, D], rows `first` to `first` + n - 1 of the gradient, changed in place.
    `ids`: int64 [tokens], the token ids of all ranks.
    `rows`: [tokens, D], contiguous, the gradient of each token.
    `ranks`: divisor, for the mean over the ranks.

    Returns `total`. Not deterministic on a GPU.
    """
    own = (ids >= first) & (ids < first + len(total))
    return total.index_add_(0, ids[own] - first, rows[own].float() / ranks)


@triton.jit
def _add_rows_kernel(
    total_ptr,
    ids_ptr,
    order_ptr,
    rows_ptr,
    tokens,
    first,
    end,
    size,
    ranks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add COLUMNS columns of the gradients of one token id to total.

    One program per sorted token and block of columns. Only programs of an id's first token add.

    `total_ptr`: fp32 [end - first, size], the rows of token ids `first` to `end` - 1.
    `ids_ptr`: int64 [tokens], sorted.
    `order_ptr`: int64 [tokens], the row of `rows_ptr` of each sorted token.
    `rows_ptr`: [tokens, size].
    """
    place = tl.program_id(0)
    token = tl.load(ids_ptr + place)
    before = tl.load(ids_ptr + place - 1, mask=place > 0, other=-1)
    # The program of the first of several equal ids adds up the rows of all.
    if (token != before) & (token >= first) & (token < end):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < size
        places = place + tl.arange(0, ROWS)
        same = tl.load(ids_ptr + places, mask=places < tokens, other=-1) == token
        # Rows of equal ids are summed in the order of the tokens, so the result is deterministic.
        value = tl.zeros([COLUMNS], dtype=tl.float32)
        while tl.max(same.to(tl.int32)) > 0:
            row = tl.load(order_ptr + places, mask=same, other=0)
            part = tl.load(
                rows_ptr + row[:, None] * size + column, mask=same[:, None] & inside, other=0.0
            )
            value += tl.sum(part.to(tl.float32), axis=0)
            places += ROWS
            same = tl.load(ids_ptr + places, mask=places < tokens, other=-1) == token
        target = (token - first) * size + column
        total = tl.load(total_ptr + target, mask=inside, other=0.0)
        tl.store(total_ptr + target, total + value / ranks, mask=inside)


def add_rows_settings(arch: str) -> Tile:
    # 16 rows, because some 400 of 8,192 tokens are " the", which one program adds up. Not timed.
    return Tile(rows=16, columns=512, warps=4)


def add_rows_triton(total: Tensor, ids: Tensor, rows: Tensor, first: int, ranks: int) -> Tensor:
    """Triton version of `add_rows_reference`. Deterministic."""
    assert_contiguous("add_rows", total, rows)
    ids, order = torch.sort(ids, stable=True)
    tile = add_rows_settings(architecture(total.device))
    grid = (len(ids), triton.cdiv(total.shape[1], tile.columns))
    _add_rows_kernel[grid](
        total,
        ids,
        order,
        rows,
        len(ids),
        first,
        first + len(total),
        total.shape[1],
        ranks,
        tile.rows,
        tile.columns,
        **tile.options,
    )
    return total


ADD_ROWS = {"reference": add_rows_reference, "triton": add_rows_triton}
