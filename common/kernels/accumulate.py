"""Add a micro-batch's gradient, in the dtype in which it was reduced, to an fp32 one: total + part, or part alone if it is the first.

torch's add of two dtypes moves its bytes at half of the speed (2.2 of 4.2 TB/s on an H200), beside products that want the memory as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 4096, 8


def accumulate_reference(total: Tensor | None, part: Tensor) -> Tensor:
    """total: fp32, changed in place; part: of the same shape, contiguous. Without a total, a new one that is `part`."""
    return part.float() if total is None else total.add_(part)


@triton.jit
def _accumulate_kernel(total_ptr, part_ptr, size, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    value = tl.load(part_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if not FIRST:
        value += tl.load(total_ptr + place, mask=mask, other=0.0)
    tl.store(total_ptr + place, value, mask=mask)


def accumulate_triton(total: Tensor | None, part: Tensor) -> Tensor:
    """As `accumulate_reference`; a new total never shares its memory with `part`."""
    first = total is None
    total = torch.empty_like(part, dtype=torch.float32) if total is None else total
    grid = (triton.cdiv(part.numel(), BLOCK),)
    _accumulate_kernel[grid](total, part, part.numel(), first, BLOCK, num_warps=NUM_WARPS)
    return total


ENGINES = {"reference": accumulate_reference, "triton": accumulate_triton}
