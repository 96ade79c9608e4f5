"""Quantization to FP8: the store that all kernels share, and the kernel that only casts.

A kernel that computes an operand of a matrix product calls `store_quantized` instead of tl.store.
The Python function of the kernel launches it once or twice (kernels/fp8.py), by `quantize_with` or
`launch_modes`. MODE says what a launch does:

    AMAX_ONLY          Record the amax and store nothing: the first of two launches.
    STORE              Store with the current scale: the second of two launches, or the only one in
                       an evaluation or a recomputed forward.
    STORE_AND_RECORD   Store, record the amax and count saturated elements: the only launch in
                       training, after the first step.
    UNQUANTIZED        Store in the dtype of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels import transpose
from common.kernels.architecture import AMD_CACHE_LINE, Tile, architecture, assert_contiguous
from common.kernels.fp8 import (
    AMAX,
    AMAX_FLOOR,
    INVERSE,
    SATURATED,
    SCALE,
    QuantizedTensor,
    Quantizer,
    new_scale,
)

# Triton kernels can use globals only if they are constexpr.
AMAX_ONLY, STORE, STORE_AND_RECORD, UNQUANTIZED = (tl.constexpr(mode) for mode in range(4))
# Cache modifier of a load that bypasses the caches of a single compute unit. ".cg" bypasses the L1
# on NVIDIA but is only a hint on AMD.
AMAX_CACHE = tl.constexpr(".cv" if torch.version.hip else ".cg")
# Whether kernels store both layouts of a tile. Not on NVIDIA, because the ptxas that ships with
# Triton stores wrong columns on Hopper (triton#11111, seen on an H200), however the tile is
# transposed. With ptxas 13, eight layers of the 8B took 644.1 ms so, and 636.6 ms with a separate
# transpose. At most 14 of 2,040 ms could be gained there, because transposes run at 3 TB/s.
# A CUDA kernel that writes both layouts, the transpose with tokens permuted within groups of 16,
# saved 13 to 20 % of the transpose's time on an H200. Together with the weight gradient's product,
# it took 6 to 8 % longer than the two kernels.
# On AMD it saves half of the transposes, which by calculation take 2.3 % (MI300X) to 3.7 % (MI355X)
# of an 8B step. Never timed there.
BOTH_FROM_ONE_TILE = bool(torch.version.hip)


def new_quantized(
    quantizer: Quantizer | None, shape: tuple[int, int], like: Tensor
) -> QuantizedTensor:
    """Return an uninitialized tensor of `shape`. Without a quantizer it has the dtype of `like`."""
    if quantizer is None:
        return QuantizedTensor(like.new_empty(shape))
    rowwise = like.new_empty(shape, dtype=quantizer.dtype)
    columnwise = None
    if quantizer.transposed:
        columnwise = like.new_empty(shape[::-1], dtype=quantizer.dtype)
    return QuantizedTensor(rowwise, columnwise, quantizer.inverse_scale)


def launch_modes(quantizer: Quantizer | None) -> Iterator[tl.constexpr]:
    """Yield the MODE of each launch of a kernel that computes a tensor of `quantizer`.

    If there are two, the scale is set between them from the amax that the first one recorded.
    """
    if quantizer is None:
        yield UNQUANTIZED
    elif not quantizer.two_pass:
        yield STORE_AND_RECORD if quantizer.recording else STORE
    elif quantizer.weight:  # its AMAX is 0 before and after, since only these launches use it
        yield AMAX_ONLY
        rescale(quantizer)
        yield STORE
    else:
        amax = quantizer.state[AMAX]
        before = amax.clone()
        amax.zero_()
        yield AMAX_ONLY
        after = torch.maximum(before, amax) if quantizer.recording else before
        rescale(quantizer)
        amax.copy_(after)
        yield STORE


def rescale(quantizer: Quantizer) -> None:
    """Set the scale from the recorded AMAX (see `fp8.new_scale`), and AMAX to 0."""
    engine = "triton" if quantizer.state.is_cuda else "reference"
    RESCALE[engine](quantizer.state, quantizer.largest)


def rescale_reference(state: Tensor, largest: float) -> None:
    """Do what `rescale` does. `state`: of a quantizer, fp32 [4]. `largest`: of its format."""
    scale = new_scale(largest, state[AMAX], state[SCALE])
    state[SCALE] = scale
    state[INVERSE] = 1.0 / scale
    state[AMAX] = 0.0


@triton.jit
def _rescale_kernel(state_ptr, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """Compute what `rescale_reference` computes, bit for bit. One program."""
    old = tl.load(state_ptr + 1)
    amax = tl.load(state_ptr + 2)
    # torch divides a number by a tensor in these two operations.
    scale = tl.div_rn(1.0, tl.maximum(amax, FLOOR)) * LARGEST
    usable = (amax > 0) & (scale > 0)
    scale = tl.where(usable, scale, tl.where(old > 0, old, 1.0))
    tl.store(state_ptr, tl.div_rn(1.0, scale))
    tl.store(state_ptr + 1, scale)
    tl.store(state_ptr + 2, 0.0)


def rescale_settings(arch: str) -> Tile:
    return Tile(rows=1, columns=1, warps=1)


def rescale_triton(state: Tensor, largest: float) -> None:
    """Triton version of `rescale_reference`.

    As torch operations, the 17 launches of each weight took a sixth of the host's time in a step of
    the 8B with half a sequence per GPU.
    """
    tile = rescale_settings(architecture(state.device))
    _rescale_kernel[(1,)](state, largest, AMAX_FLOOR, **tile.options)


RESCALE = {"reference": rescale_reference, "triton": rescale_triton}


def quantize_with(
    quantizer: Quantizer | None,
    shape: tuple[int, int],
    like: Tensor,
    launch: Callable[[QuantizedTensor, tl.constexpr], None],
    tiled: bool = False,
) -> QuantizedTensor:
    """Run a kernel that computes a tensor of `shape`, once or twice, and return the tensor.

    `like`: has the device of the result and, without a quantizer, its dtype.
    `launch(out, MODE)`: runs the kernel once. It writes `out.rowwise` and, unless None,
        `out.columnwise`.
    `tiled`: the kernel can write `out.columnwise`, because its tiles have enough rows.

    Also writes the transpose if the quantizer requests it.
    """
    result = new_quantized(quantizer, shape, like)
    out = kernel_output(result) if tiled else result._replace(columnwise=None)
    for mode in launch_modes(quantizer):
        launch(out, mode)
    if out.columnwise is None:
        fill_columnwise(result)
    return result


def kernel_output(quantized: QuantizedTensor) -> QuantizedTensor:
    """Return the part of `quantized` that a kernel writes: both layouts, or only `rowwise`."""
    return quantized if BOTH_FROM_ONE_TILE else quantized._replace(columnwise=None)


def fill_columnwise(quantized: QuantizedTensor) -> None:
    """Write `columnwise`, unless None, from `rowwise`. Reads and writes 1 byte per element."""
    rowwise = quantized.rowwise
    columnwise = quantized.columnwise
    if columnwise is None:
        return
    if rowwise.element_size() > 1:  # tests of the kernels store unrounded values
        columnwise.copy_(rowwise.t())
    else:
        transpose.IMPLEMENTATIONS["triton" if rowwise.is_cuda else "reference"](
            rowwise.view(torch.uint8), columnwise.view(torch.uint8)
        )


def state_and_largest(quantizer: Quantizer | None) -> tuple[Tensor | None, float]:
    """Return the arguments that kernels take from a quantizer: its state and LARGEST."""
    return (None, 0.0) if quantizer is None else (quantizer.state, quantizer.largest)


def quantize_reference(x: Tensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """Return `x` as an operand of matrix products, unquantized without a quantizer.

    `x`: [rows, columns] of any float dtype.
    """
    if quantizer is None:
        return QuantizedTensor(x)

    def launch(out: QuantizedTensor, mode: tl.constexpr) -> None:
        x_fp32 = x.float()
        scaled = x_fp32 * quantizer.state[SCALE]
        if mode != STORE:
            # NaN counts as 0, because the maximum of the kernels ignores NaN too.
            amax = x_fp32.abs().nan_to_num(nan=0.0, posinf=torch.inf).max()
            quantizer.state[AMAX] = torch.maximum(quantizer.state[AMAX], amax)
        if mode == STORE_AND_RECORD:
            quantizer.state[SATURATED] += (scaled.abs() > quantizer.largest).sum()
        if mode != AMAX_ONLY:
            clamped = scaled.clamp(-quantizer.largest, quantizer.largest)
            out.rowwise.copy_((clamped + 0.0 * x_fp32).to(quantizer.dtype))  # 0 * inf is NaN

    return quantize_with(quantizer, (x.shape[0], x.shape[1]), x, launch)


@triton.jit
def tile_mask(row, column, num_rows, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the in-bounds mask [R, C] of a tile.

    Columns are not tested if BLOCK_COLUMNS divides NUM_COLUMNS, which saves registers.
    """
    mask = tl.broadcast_to((row < num_rows)[:, None], row.shape[0], BLOCK_COLUMNS)
    if NUM_COLUMNS % BLOCK_COLUMNS != 0:
        mask = mask & (column < NUM_COLUMNS)[None, :]
    return mask


@triton.jit
def raise_amax(amax, state_ptr):
    """Raise the amax in a quantizer's state to `amax`, the amax of one program.

    Most programs find a larger one there already, and a load is cheaper than an atomic. The load
    bypasses the L1 cache, which does not see the stores of other multiprocessors. The atomic is
    relaxed, because its order does not matter. Triton's default orders all memory accesses of the
    program around each atomic, with which a cast of 50 µs took 950 µs on an H200.
    """
    if amax > tl.load(state_ptr + 2, cache_modifier=AMAX_CACHE):
        tl.atomic_max(state_ptr + 2, amax, sem="relaxed")


@triton.jit
def store_quantized(
    x,
    row,
    column,
    mask,
    out_ptr,
    columnwise_ptr,
    num_rows,
    num_columns,
    state_ptr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store the fp32 tile `x` [R, C], whose masked elements are 0, as MODE says.

    `row`: int64 [R].
    `column`: int [C].
    `mask`: [R, C].
    `out_ptr`: [num_rows, num_columns].
    `columnwise_ptr`: the transpose of out, or None.
    `state_ptr`: state of the quantizer. Offsets 1, 2 and 3 are SCALE, AMAX and SATURATED of
        kernels/fp8.py.
    """
    offset = out_ptr + row[:, None] * num_columns + column[None, :]
    if MODE == UNQUANTIZED:
        tl.store(offset, x.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        scale = tl.load(state_ptr + 1)
        if MODE != STORE:
            amax = tl.max(tl.abs(x))
            raise_amax(amax, state_ptr)
            if MODE == STORE_AND_RECORD and amax * scale > LARGEST:
                tl.atomic_add(
                    state_ptr + 3,
                    tl.sum((tl.abs(x) * scale > LARGEST).to(tl.float32)),
                    sem="relaxed",
                )
        if MODE != AMAX_ONLY:
            # NaN must stay NaN, which tl.clamp does not ensure, and inf must become NaN. 0 * x is
            # NaN for both, and 0 for a finite element.
            scaled = x * scale
            clamped = tl.where(
                scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled)
            )
            stored = (clamped + 0.0 * x).to(out_ptr.dtype.element_ty)
            tl.store(offset, stored, mask=mask)
            if columnwise_ptr is not None:
                place = column.to(tl.int64)[:, None] * num_rows + row[None, :]
                tl.store(columnwise_ptr + place, tl.trans(stored), mask=tl.trans(mask))


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    columnwise_ptr,
    state_ptr,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Quantize a tile of x, [num_rows, NUM_COLUMNS]. One program per tile."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = tile_mask(row, column, num_rows, NUM_COLUMNS, BLOCK_COLUMNS)
    x = tl.load(x_ptr + row[:, None] * NUM_COLUMNS + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    store_quantized(
        x,
        row,
        column,
        mask,
        out_ptr,
        columnwise_ptr,
        num_rows,
        NUM_COLUMNS,
        state_ptr,
        MODE,
        LARGEST,
    )


def quantize_settings(arch: str) -> Tile:
    # AMD: bf16 is read and the columnwise layout is stored in whole cache lines. Another XCD would
    # write the other half of a line, since successive programs run on different ones. Not timed.
    if arch.startswith("gfx"):
        return Tile(rows=AMD_CACHE_LINE, columns=AMD_CACHE_LINE // 2, warps=4)
    # sm_90: the fastest of seven tried on an H200, 89 % of a copy's bandwidth.
    return Tile(rows=16, columns=256, warps=4)


def quantize_triton(x: Tensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """Triton version of `quantize_reference`. x must be contiguous.

    Reads 2 bytes and writes 1 per element, plus the bytes of the transpose.
    """
    if quantizer is None:
        return QuantizedTensor(x)
    assert_contiguous("quantize", x)
    num_rows, num_columns = x.shape
    tile = quantize_settings(architecture(x.device))
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_columns, tile.columns))
    state, largest = state_and_largest(quantizer)

    def launch(out: QuantizedTensor, mode: tl.constexpr) -> None:
        _quantize_kernel[grid](
            x,
            out.rowwise,
            out.columnwise,
            state,
            num_rows,
            num_columns,
            mode,
            largest,
            tile.rows,
            tile.columns,
            **tile.options,
        )

    return quantize_with(quantizer, (num_rows, num_columns), x, launch, tiled=True)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Quantizer | None], QuantizedTensor]] = {
    "reference": quantize_reference,
    "triton": quantize_triton,
}
