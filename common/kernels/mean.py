"""The mean of one rank's gradients and those it pulled from its peers: out = (own + sum of pulled) / (1 + rows of pulled), added up in fp32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 2048, 4


def mean_reference(own: Tensor, pulled: Tensor, out: Tensor) -> None:
    """own, out: [n], pulled: [rows, n], all contiguous; own and pulled of one dtype."""
    out.copy_((own.float() + pulled.float().sum(0)) / (1 + len(pulled)))


@triton.jit
def _mean_of_ranks_kernel(own_ptr, pulled_ptr, out_ptr, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    total = tl.load(own_ptr + place, mask=mask, other=0.0).to(tl.float32)
    for row in tl.static_range(ROWS):
        total += tl.load(pulled_ptr + row * size + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (total / (ROWS + 1)).to(out_ptr.dtype.element_ty), mask=mask)


def mean_triton(own: Tensor, pulled: Tensor, out: Tensor) -> None:
    """As `mean_reference`: each value read once, the result written once."""
    grid = (triton.cdiv(own.numel(), BLOCK),)
    _mean_of_ranks_kernel[grid](own, pulled, out, own.numel(), len(pulled), BLOCK, num_warps=NUM_WARPS)


ENGINES = {"reference": mean_reference, "triton": mean_triton}
