"""FP8 products that compute SwiGLU in their epilogues, by QuACK: gate_up's fprop and down's dgrad.

QuACK is an optional package (common/engines.py). The product that computes gate_up also writes h,
and the product for the gradient of h writes gate_up's gradient instead. So one kernel does the work
of a product and of a kernel of swiglu.py. Like the kernels, the first one can keep gate_up in 8
bits for LoRA. An evaluation does not store gate_up.

The epilogues round where the kernels do: gate_up and the gradient of h to bf16, before SwiGLU is
computed from them. Both products must know the scale of their result beforehand. In the first step,
when there is none, the separate kernels run.

QuACK writes the amax of each row of each tile. A small kernel reads them and does what
`store_quantized` does in other kernels: it records the amax, counts saturated elements, and turns
an infinite element into NaN. The result of QuACK does not show which elements saturated and which
were rounded to the format's largest number. In a row of a tile with an element beyond the scale's
range, the kernel counts them all. It therefore never counts fewer than other kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.architecture import Tile, architecture, assert_contiguous
from common.kernels.fp8 import QuantizedTensor, Quantizer, product_range
from common.kernels.quantize import fill_columnwise, new_quantized, raise_amax
from common.paths import cache_folder

WITH_SWIGLU = "gemm + SwiGLU"  # name of these products in a profile
NAN_BYTE = tl.constexpr(0x7F)  # in both formats of sm_90


def require() -> ModuleType:
    """Import the package, after setting its cache of compiled kernels.

    Raises ImportError or AttributeError if the package cannot be used. QuACK identifies installed
    packages by "site-packages" in their path. If it is installed elsewhere, it raises TypeError.
    """
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_folder("quack")))
    try:
        return importlib.import_module("common.kernels.quack_epilogues")
    except TypeError as error:
        package = importlib.util.find_spec("quack")
        folder = Path(package.origin or "").parent.parent if package else Path()
        if "site-packages" in folder.parts:
            raise ImportError(str(error)) from error
        what = f"QuACK must be installed in a site-packages folder, not in {folder}"
        raise ImportError(what) from error


@triton.jit
def _finish_swiglu_kernel(
    amax_ptr,
    stored_ptr,
    state_ptr,
    num_rows,
    num_tiles,
    FFN: tl.constexpr,
    HALVES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_BITS: tl.constexpr,
    RECORDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Finish BLOCK_ROWS rows. One program each. `stored_ptr`: uint8 [num_rows, HALVES * FFN]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tile = tl.arange(0, BLOCK_TILES)
    inside = (row < num_rows)[:, None] & (tile < num_tiles)[None, :]
    place = row[:, None] * num_tiles + tile[None, :]
    partial = tl.load(amax_ptr + place, mask=inside, other=0.0)
    amax = tl.max(partial)
    if RECORDING:
        raise_amax(amax, state_ptr)
    scale = tl.load(state_ptr + 1)
    if amax * scale > LARGEST:
        for number in range(num_tiles):
            own = tl.load(amax_ptr + row * num_tiles + number, mask=row < num_rows, other=0.0)
            beyond = own * scale > LARGEST
            if tl.max(beyond.to(tl.int32)) > 0:
                column = tl.arange(0, BLOCK_COLUMNS)
                mask = beyond[:, None] & (column < TILE_COLUMNS)[None, :]
                column += number * TILE_COLUMNS
                mask = mask & (column < FFN)[None, :]
                element = row[:, None] * (HALVES * FFN) + column[None, :]
                if RECORDING:
                    count = tl.zeros([], dtype=tl.float32)
                    for half in tl.static_range(HALVES):
                        bits = tl.load(stored_ptr + element + half * FFN, mask=mask, other=0)
                        count += tl.sum(((bits & 127) == LARGEST_BITS).to(tl.float32))
                    tl.atomic_add(state_ptr + 3, count, sem="relaxed")
                first = row * (HALVES * FFN) + number * TILE_COLUMNS
                tl.store(
                    stored_ptr + first,
                    tl.full([BLOCK_ROWS], NAN_BYTE, tl.uint8),
                    mask=own == float("inf"),
                )


@cache
def largest_byte(dtype: torch.dtype) -> int:
    """Return the bits of an 8-bit format's largest number."""
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float32, device="cpu")
    return int(largest.to(dtype).view(torch.uint8))


def finish_swiglu_settings(arch: str) -> Tile:
    return Tile(rows=8, columns=256, warps=4)


def finish_swiglu(
    out: QuantizedTensor, quantizer: Quantizer, amax: Tensor, columns: int, halves: int
) -> QuantizedTensor:
    """Record the amax and the saturated elements of a product's FP8 result, and transpose it.

    `out`: has `rowwise` [M, halves * ffn], written by the product.
    `amax`: fp32 [M, tiles], of the values before scaling. Each tile has `columns` columns of each
        half.

    The docstring of the module defines the count of saturated elements.
    """
    assert_contiguous("SwiGLU's finish", out.rowwise, amax)
    num_rows, num_tiles = amax.shape
    ffn = out.rowwise.shape[1] // halves
    tile = finish_swiglu_settings(architecture(amax.device))
    _finish_swiglu_kernel[(triton.cdiv(num_rows, tile.rows),)](
        amax,
        out.rowwise.view(torch.uint8),
        quantizer.state,
        num_rows,
        num_tiles,
        ffn,
        halves,
        columns,
        quantizer.largest,
        largest_byte(quantizer.dtype),
        quantizer.recording,
        tile.rows,
        triton.next_power_of_2(num_tiles),
        triton.next_power_of_2(columns),
        **tile.options,
    )
    fill_columnwise(out)
    return out


def scale_of(quantizer: Quantizer) -> Tensor:
    """Return the factor that turns values into stored numbers, fp32 [1]: a view of the state."""
    return quantizer.state[1:2]


def gate_up_swiglu(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    quantizer: Quantizer,
    kept_quantizer: Quantizer | None,
    keep: bool,
) -> tuple[Tensor | QuantizedTensor | None, QuantizedTensor]:
    """Return (gate_up = x W^T [M, 2 * ffn], h [M, ffn]).

    `x`: FP8 [M, D].
    `weight`: FP8 [2 * ffn, D], gate first.
    `quantizer`: quantizer of h. It must have a scale already, and so must `kept_quantizer`.
    `kept_quantizer`: quantizer of gate_up. Without one, gate_up is in bf16.
    `keep`: without it, gate_up is not stored, and None is returned in its place.
    """
    rows = x.rowwise.shape[0]
    features = weight.rowwise.shape[0]
    h = new_quantized(quantizer, (rows, features // 2), x.rowwise)
    gate_up: QuantizedTensor | None = None
    kept_scale: Tensor | None = None
    if keep and kept_quantizer:
        gate_up = new_quantized(kept_quantizer, (rows, features), x.rowwise)
        kept_scale = scale_of(kept_quantizer)
    elif keep:
        gate_up = QuantizedTensor(x.rowwise.new_empty(rows, features, dtype=torch.bfloat16))
    out = None if gate_up is None else gate_up.rowwise
    with product_range(x.rowwise, weight.rowwise, WITH_SWIGLU):
        amax, kept_amax, columns = require().forward(
            x, weight, scale_of(quantizer), h.rowwise, out, kept_scale
        )
    h = finish_swiglu(h, quantizer, amax, columns, halves=1)
    if gate_up is None:
        return None, h
    if kept_quantizer is None:
        return gate_up.rowwise, h
    return finish_swiglu(gate_up, kept_quantizer, kept_amax, columns, halves=2), h


def down_swiglu_backward(
    g: QuantizedTensor,
    weight: QuantizedTensor,
    gate_up: Tensor | QuantizedTensor,
    quantizer: Quantizer,
) -> QuantizedTensor:
    """Return the gradient of gate_up, [M, 2 * ffn].

    `g`: FP8 [M, D], the gradient of down's result.
    `weight`: FP8 [D, ffn]. Its `columnwise` is read.
    `gate_up`: [M, 2 * ffn], from `gate_up_swiglu`.
    `quantizer`: quantizer of the result. It must have a scale already.
    """
    assert weight.columnwise is not None
    if isinstance(gate_up, Tensor):
        gate_up = QuantizedTensor(gate_up)
    num_rows, num_columns = gate_up.rowwise.shape
    d_gate_up = new_quantized(quantizer, (num_rows, num_columns), gate_up.rowwise)
    weight = QuantizedTensor(weight.columnwise, None, weight.inverse_scale)
    out = d_gate_up.rowwise
    with product_range(g.rowwise, weight.rowwise, WITH_SWIGLU):
        amax, columns = require().backward(g, weight, scale_of(quantizer), gate_up, out)
    return finish_swiglu(d_gate_up, quantizer, amax, columns, halves=2)
