"""SwiGLU (Shazeer, arXiv:2002.05202).

    forward    h = silu(z) * up, with z the gate, silu(z) = z * s and s = sigmoid(z)
    backward   d_up = d_h * z * s
               d_gate = d_h * up * s * (1 + z * (1 - s)), with d_h the gradient of h

The kernels write h and the gradient of gate_up as operands of matrix products, in FP8 or bf16
(kernels/fp8.py). For the backward, the forward keeps gate_up, or a quantized copy that needs half
of the memory. The backward then computes from the quantized values.

torch.compile's backward computes both halves for every element: 1.18 ms a layer for 8,192 tokens of
ffn 14,336 on an H200, where moving the bytes takes 0.34 ms. With gate and up as two products, their
input would be read and quantized twice.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from common import engines
from common.kernels.architecture import (
    Tile,
    architecture,
    assert_contiguous,
    gpu_architecture,
)
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.kernels.quantize import (
    STORE,
    UNQUANTIZED,
    fill_columnwise,
    kernel_output,
    launch_modes,
    new_quantized,
    quantize_reference,
    quantize_with,
    state_and_largest,
    store_quantized,
    tile_mask,
)


def swiglu_engine(device: torch.device) -> engines.Choice:
    """Return the engine that computes SwiGLU after gate_up's product and before down's, in FP8.

    Raises ConfigError if SWIGLU_ENGINE names an engine that this machine cannot run.
    """
    return engines.in_use(engines.SWIGLU, gpu_architecture(device), "fp8")


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Return h, [..., ffn] in the dtype of `gate_up`, computed in fp32.

    `gate_up`: [..., 2 * ffn], gate first.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def swiglu_quantized_reference(
    gate_up: Tensor, quantizer: Quantizer | None, kept_quantizer: Quantizer | None = None
) -> tuple[QuantizedTensor, Tensor | QuantizedTensor]:
    """Return (h [M, ffn], kept), where `kept` is gate_up for the backward.

    `gate_up`: [M, 2 * ffn], gate first.
    `quantizer`: quantizer of h. Without one, h is in gate_up's dtype.
    `kept_quantizer`: quantizer of `kept`. Without one, gate_up itself is kept.
    """
    # With a quantizer, h is not rounded to gate_up's dtype before it is quantized.
    h = swiglu_reference(gate_up.float() if quantizer else gate_up)
    kept: Tensor | QuantizedTensor = gate_up
    if kept_quantizer:
        kept = quantize_reference(gate_up, kept_quantizer)
    return quantize_reference(h, quantizer), kept


def swiglu_quantized_backward_reference(
    d_h: Tensor, kept: Tensor | QuantizedTensor, quantizer: Quantizer | None
) -> QuantizedTensor:
    """Return the gradient of gate_up, [M, 2 * ffn].

    `d_h`: [M, ffn].
    `kept`: [M, 2 * ffn], result of the forward.
    `quantizer`: quantizer of the result. Without one, the result is in d_h's dtype.
    """
    if isinstance(kept, QuantizedTensor):
        assert kept.inverse_scale is not None
        kept = kept.rowwise.float() * kept.inverse_scale
    gate, up = kept.float().chunk(2, dim=1)
    s = torch.sigmoid(gate)
    d_gate = d_h.float() * up * s * (1 + gate * (1 - s))
    d_up = d_h.float() * gate * s
    d_gate_up = torch.cat((d_gate, d_up), dim=1)
    return quantize_reference(d_gate_up if quantizer else d_gate_up.to(d_h.dtype), quantizer)


@triton.jit
def _sigmoid(z):
    """Return 1 / (1 + exp(-z)), with 1 / y as rsqrt(y)^2: 5 instructions, exact to a few ulp.

    tl.sigmoid takes 13 instructions on NVIDIA and 25 on AMD, most of them for a division that is
    exact at the edges of fp32's range. With it, the kernels would be limited by computation instead
    of memory.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def _swiglu_quantized_kernel(
    gate_up_ptr,
    h_ptr,
    columnwise_ptr,
    state_ptr,
    kept_ptr,
    kept_state_ptr,
    num_rows,
    FFN: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    KEPT_MODE: tl.constexpr,
    KEPT_LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute a tile of h [num_rows, FFN] and, with `kept_ptr`, copy its gate and up.

    One program per tile. gate_up and its copy are [num_rows, 2 * FFN].
    """
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = tile_mask(row, column, num_rows, FFN, BLOCK_COLUMNS)
    gate_ptr = gate_up_ptr + row[:, None] * (2 * FFN) + column[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + FFN, mask=mask, other=0.0).to(tl.float32)
    if kept_ptr is not None:
        store_quantized(
            gate,
            row,
            column,
            mask,
            kept_ptr,
            None,
            num_rows,
            2 * FFN,
            kept_state_ptr,
            KEPT_MODE,
            KEPT_LARGEST,
        )
        store_quantized(
            up,
            row,
            column + FFN,
            mask,
            kept_ptr,
            None,
            num_rows,
            2 * FFN,
            kept_state_ptr,
            KEPT_MODE,
            KEPT_LARGEST,
        )
    h = gate * _sigmoid(gate) * up
    store_quantized(
        h, row, column, mask, h_ptr, columnwise_ptr, num_rows, FFN, state_ptr, MODE, LARGEST
    )


def swiglu_quantized_settings(arch: str) -> Tile:
    # On AMD, the 64 bytes of a column are half a cache line. The program with the other half runs
    # on the same one of 8 XCDs, and so writes through the same cache: both models have a multiple
    # of 8 column tiles.
    return Tile(rows=64, columns=64, warps=4)


def swiglu_quantized_triton(
    gate_up: Tensor, quantizer: Quantizer | None, kept_quantizer: Quantizer | None = None
) -> tuple[QuantizedTensor, Tensor | QuantizedTensor]:
    """Triton version of `swiglu_quantized_reference`. gate_up must be contiguous.

    `kept_quantizer`: must not be `transposed`.

    The same launches write h and the kept copy. There are two launches if one of the quantizers
    needs its amax first, else one.
    """
    assert not (kept_quantizer and kept_quantizer.transposed), (
        "no product reads the kept copy: its transpose is not written"
    )
    assert_contiguous("SwiGLU", gate_up)
    num_rows = gate_up.shape[0]
    ffn = gate_up.shape[1] // 2
    tile = swiglu_quantized_settings(architecture(gate_up.device))
    grid = (triton.cdiv(ffn, tile.columns), triton.cdiv(num_rows, tile.rows))
    h = new_quantized(quantizer, (num_rows, ffn), gate_up)
    out = kernel_output(h)
    kept = new_quantized(kept_quantizer, (num_rows, 2 * ffn), gate_up) if kept_quantizer else None
    state, largest = state_and_largest(quantizer)
    kept_rowwise = kept.rowwise if kept else None
    kept_state, kept_largest = state_and_largest(kept_quantizer)
    # If only one of the quantizers needs a second launch, that launch stores the other tensor
    # again, with the same bytes.
    again = STORE if quantizer else UNQUANTIZED
    for mode, kept_mode in zip_longest(
        launch_modes(quantizer), launch_modes(kept_quantizer), fillvalue=again
    ):
        _swiglu_quantized_kernel[grid](
            gate_up,
            out.rowwise,
            out.columnwise,
            state,
            kept_rowwise,
            kept_state,
            num_rows,
            ffn,
            mode,
            largest,
            kept_mode,
            kept_largest,
            tile.rows,
            tile.columns,
            **tile.options,
        )
    if out.columnwise is None:
        fill_columnwise(h)
    return h, gate_up if kept is None else kept


@triton.jit
def _swiglu_quantized_backward_kernel(
    d_h_ptr,
    kept_ptr,
    kept_inverse_scale_ptr,
    d_gate_up_ptr,
    columnwise_ptr,
    state_ptr,
    num_rows,
    FFN: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute the gradients of gate and up from a tile of d_h, [num_rows, FFN].

    One program per tile. gate_up and its gradient are [num_rows, 2 * FFN].
    """
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = tile_mask(row, column, num_rows, FFN, BLOCK_COLUMNS)
    d_h = tl.load(d_h_ptr + row[:, None] * FFN + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    gate_ptr = kept_ptr + row[:, None] * (2 * FFN) + column[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + FFN, mask=mask, other=0.0).to(tl.float32)
    if kept_inverse_scale_ptr is not None:
        inverse_scale = tl.load(kept_inverse_scale_ptr)
        gate *= inverse_scale
        up *= inverse_scale
    s = _sigmoid(gate)
    d_h_s = d_h * s
    d_gate = d_h_s * up * (1.0 + gate * (1.0 - s))
    d_up = d_h_s * gate
    store_quantized(
        d_gate,
        row,
        column,
        mask,
        d_gate_up_ptr,
        columnwise_ptr,
        num_rows,
        2 * FFN,
        state_ptr,
        MODE,
        LARGEST,
    )
    store_quantized(
        d_up,
        row,
        column + FFN,
        mask,
        d_gate_up_ptr,
        columnwise_ptr,
        num_rows,
        2 * FFN,
        state_ptr,
        MODE,
        LARGEST,
    )


def swiglu_quantized_backward_settings(arch: str) -> Tile:
    # sm_90: the fastest of 19 tried on an H200.
    return Tile(rows=32, columns=64, warps=4)


def swiglu_quantized_backward_triton(
    d_h: Tensor, kept: Tensor | QuantizedTensor, quantizer: Quantizer | None
) -> QuantizedTensor:
    """Triton version of `swiglu_quantized_backward_reference`. All tensors must be contiguous."""
    num_rows, ffn = d_h.shape
    if not isinstance(kept, QuantizedTensor):
        kept = QuantizedTensor(kept)
    kept_rowwise, _, kept_inverse_scale = kept
    assert_contiguous("SwiGLU's backward", d_h, kept_rowwise)
    tile = swiglu_quantized_backward_settings(architecture(d_h.device))
    grid = (triton.cdiv(ffn, tile.columns), triton.cdiv(num_rows, tile.rows))
    state, largest = state_and_largest(quantizer)

    def launch(out: QuantizedTensor, mode: tl.constexpr) -> None:
        _swiglu_quantized_backward_kernel[grid](
            d_h,
            kept_rowwise,
            kept_inverse_scale,
            out.rowwise,
            out.columnwise,
            state,
            num_rows,
            ffn,
            mode,
            largest,
            tile.rows,
            tile.columns,
            **tile.options,
        )

    return quantize_with(quantizer, (num_rows, 2 * ffn), d_h, launch, tiled=True)
