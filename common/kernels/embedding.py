"""The gradient of an embedding, added by rows: of 128,256 rows a micro-batch of the 8B reads at most 8,192.

A dense gradient is 1 GB of zeros for each micro-batch, which is written, reduced and added. Equal ids are summed in fp32, in the order of
the tokens, so that a sum never depends on which program comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.architecture import Tile, architecture


def add_rows_reference(total: Tensor, ids: Tensor, rows: Tensor, first: int, ranks: int) -> Tensor:
    """total: fp32 [n, D], rows `first` to `first` + n of the gradient, changed in place. ids: int64 [tokens]; rows: [tokens, D], contiguous, the
    gradient of each token. Adds the rows / `ranks` whose id is among these n, and returns `total`. Not deterministic on a GPU.
    """
    mine = (ids >= first) & (ids < first + len(total))
    return total.index_add_(0, ids[mine] - first, rows[mine].float() / ranks)


@triton.jit
def _add_rows_kernel(total_ptr, ids_ptr, order_ptr, rows_ptr, tokens, first, end, size, ranks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.program_id(0)
    token = tl.load(ids_ptr + place)
    before = tl.load(ids_ptr + place - 1, mask=place > 0, other=-1)
    if (token != before) & (token >= first) & (token < end):  # the first of equal ids adds up the rows of all
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < size
        places = place + tl.arange(0, ROWS)
        same = tl.load(ids_ptr + places, mask=places < tokens, other=-1) == token
        value = tl.zeros([COLUMNS], dtype=tl.float32)
        while tl.max(same.to(tl.int32)) > 0:
            row = tl.load(order_ptr + places, mask=same, other=0)
            part = tl.load(rows_ptr + row[:, None] * size + column, mask=same[:, None] & inside, other=0.0)
            value += tl.sum(part.to(tl.float32), axis=0)
            places += ROWS
            same = tl.load(ids_ptr + places, mask=places < tokens, other=-1) == token
        target = total_ptr + (token - first) * size + column
        tl.store(target, tl.load(target, mask=inside, other=0.0) + value / ranks, mask=inside)


def add_rows_settings(arch: str) -> Tile:
    return Tile(rows=16, columns=512, warps=4)  # 16 rows: " the" is 400 of 8,192 tokens, and one program adds them all; not timed


def add_rows_triton(total: Tensor, ids: Tensor, rows: Tensor, first: int, ranks: int) -> Tensor:
    """As `add_rows_reference`, and deterministic."""
    ids, order = torch.sort(ids, stable=True)
    tile = add_rows_settings(architecture(total.device))
    grid = (len(ids), triton.cdiv(total.shape[1], tile.columns))
    sizes = len(ids), first, first + len(total), total.shape[1], ranks
    _add_rows_kernel[grid](total, ids, order, rows, *sizes, tile.rows, tile.columns, **tile.options)
    return total


ENGINES = {"reference": add_rows_reference, "triton": add_rows_triton}
