"""FP8 operands of matrix products: tensorwise scales, the cast with its transpose, and the product itself.

A tensor x is stored as clamp(x * scale) in e4m3 or e5m2, with scale = F / (headroom * amax), F the format's largest number and
amax = max|x|; the product multiplies by 1 / scale. Two recipes say which amax:
    current   of this very tensor: the kernel that makes it runs twice, first for the amax alone;
    delayed   the largest of the last HISTORY optimizer steps: one pass, and what exceeds it saturates and is counted. A quantizer that
              has no history yet scales as `current` does.
Formats: Micikevicius et al., arXiv:2209.05433. e4m3 forward and e5m2 for gradients, FNUZ on gfx94x and OCP elsewhere.

Hopper multiplies FP8 only where both operands are contiguous along the contraction, and torch asks for that layout on every GPU. dgrad
therefore needs the weight transposed and wgrad both of its operands: whoever makes an operand writes it in both layouts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels import transpose

RECIPES = ("delayed", "current")
HISTORY = 4  # optimizer steps; as in NVIDIA's MLPerf v5.1 configs
HEADROOM = 1.25  # of the delayed recipe: amax may grow by so much before anything saturates; a quarter of a bit
AMAX_FLOOR = 1e-12  # a tensor of zeros has a finite scale too

# The columns of a quantizer's state. cuBLASLt wants the scale it reads, the inverse, at a multiple of 16 bytes.
INVERSE, SCALE, AMAX, CLIPPED = range(4)
# What a kernel does with the values it has made. Triton sees globals only as constexpr.
AMAX_ONLY, STORE, STORE_AND_RECORD, PLAIN = (tl.constexpr(mode) for mode in range(4))


def fp8_dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(e4m3, e5m2) as the GPU has them: FNUZ on gfx94x, OCP elsewhere."""
    fnuz = device.type == "cuda" and torch.version.hip and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94")
    return (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) if fnuz else (torch.float8_e4m3fn, torch.float8_e5m2)


class QuantizedTensor(NamedTuple):
    """One operand of matrix products. In bf16, `rowwise` is all there is."""

    rowwise: Tensor  # [rows, columns], contiguous
    columnwise: Tensor | None = None  # [columns, rows], contiguous: the transposed; None where no product asks for it
    scale: Tensor | None = None  # fp32 [1]: what stored values are multiplied with

    def for_wgrad(self) -> QuantizedTensor:
        """What a weight gradient needs of it: without the row-major copy where there is a transposed one."""
        return self if self.columnwise is None else self._replace(rowwise=self.rowwise.new_empty(0, 0))


class Quantizer:
    """One FP8 tensor of the network, e.g. the input of layer 3's `down`: its format and, on the device, its scale.

    `state`: fp32 [4] = 1 / scale, scale, amax so far in this optimizer step, number of elements that saturated.
    """

    def __init__(self, gradient: bool = False, transposed: bool = True, weight: bool = False):
        """`gradient`: e5m2 instead of e4m3. `transposed`: write both layouts. `weight`: always scaled by its current amax."""
        self.gradient, self.transposed, self.weight = gradient, transposed, weight
        self.dtype = torch.float8_e4m3fn
        self.state = torch.empty(4, device="meta")
        self.two_pass, self.recording = True, True
        self.cached: QuantizedTensor | None = None  # see `quantize_weight`

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def scale(self) -> Tensor:
        """What stored values are multiplied with: fp32 [1], a view that changes with the scale."""
        return self.state[INVERSE : INVERSE + 1]

    def rescale(self, headroom: float = 1.0) -> None:
        """scale := F / (headroom * amax)."""
        scale = self.largest / (self.state[AMAX] * headroom).clamp(min=AMAX_FLOOR)
        self.state[SCALE] = scale
        self.state[INVERSE] = 1.0 / scale


def new_quantized(quantizer: Quantizer | None, shape: tuple[int, int], like: Tensor) -> QuantizedTensor:
    """Memory for an operand of `shape`; without a quantizer in the dtype of `like`."""
    if quantizer is None:
        return QuantizedTensor(like.new_empty(shape))
    columns = like.new_empty(shape[::-1], dtype=quantizer.dtype) if quantizer.transposed else None
    return QuantizedTensor(like.new_empty(shape, dtype=quantizer.dtype), columns, quantizer.scale)


def launch_modes(quantizer: Quantizer | None) -> Iterator[tl.constexpr]:
    """The MODE of each launch that makes an operand of `quantizer`; between two, its new scale."""
    if quantizer is None:
        yield PLAIN
    elif not quantizer.two_pass:
        yield STORE_AND_RECORD if quantizer.recording else STORE
    else:
        amax = quantizer.state[AMAX]
        before = amax.clone()
        amax.zero_()
        yield AMAX_ONLY
        quantizer.rescale()
        amax.copy_(torch.maximum(before, amax) if quantizer.recording else before)
        yield STORE


def quantize_with(
    quantizer: Quantizer | None, shape: tuple[int, int], like: Tensor, launch: Callable[[QuantizedTensor, tl.constexpr], None]
) -> QuantizedTensor:
    """Let a kernel make the rows of an operand of `shape`, in one pass or two. `launch(operand, MODE)` runs it once.

    Without a quantizer the operand is in the dtype of `like`, and MODE is PLAIN.
    """
    operand = new_quantized(quantizer, shape, like)
    for mode in launch_modes(quantizer):
        launch(operand, mode)
    fill_columnwise(operand)
    return operand


def fill_columnwise(operand: QuantizedTensor) -> None:
    """Write `columnwise`, where wanted, from `rowwise`: one byte read and one written per element, in a kernel of its own.

    Kernels that wrote both layouts from one tile were up to 14 % faster on an H200, but their columns came out wrong there, by what looks
    like a defect of ptxas 12.9 (triton#11111; docs/log.md).
    """
    if operand.columnwise is None:
        return
    rows, columns = operand.rowwise, operand.columnwise
    if rows.element_size() > 1:  # unrounded, in tests of the kernels
        columns.copy_(rows.t())
    else:
        transpose.ENGINES["triton" if rows.is_cuda else "reference"](rows.view(torch.uint8), columns.view(torch.uint8))


def quantize_reference(x: Tensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """x: [rows, columns] of any float dtype -> the operand that a product reads; without a quantizer x itself."""
    if quantizer is None:
        return QuantizedTensor(x)

    def launch(operand: QuantizedTensor, mode: tl.constexpr) -> None:
        x_fp32 = x.float()
        scaled = x_fp32 * quantizer.state[SCALE]
        if mode != STORE:
            quantizer.state[AMAX] = torch.maximum(quantizer.state[AMAX], x_fp32.abs().max())
        if mode == STORE_AND_RECORD:
            quantizer.state[CLIPPED] += (scaled.abs() > quantizer.largest).sum()
        if mode != AMAX_ONLY:
            operand.rowwise.copy_(scaled.clamp(-quantizer.largest, quantizer.largest).to(quantizer.dtype))

    return quantize_with(quantizer, (x.shape[0], x.shape[1]), x, launch)


@triton.jit
def tile_mask(row, column, num_rows, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """[R, C]: which elements of a tile there are. Where columns come out even, they take no register."""
    mask = tl.broadcast_to((row < num_rows)[:, None], row.shape[0], BLOCK_COLUMNS)
    if NUM_COLUMNS % BLOCK_COLUMNS != 0:
        mask = mask & (column < NUM_COLUMNS)[None, :]
    return mask


@triton.jit
def record(x, scale, state_ptr, MODE: tl.constexpr, LARGEST: tl.constexpr):
    """Enter the fp32 tile `x` (0 where masked) into a quantizer's amax, and count what saturates."""
    amax = tl.max(tl.abs(x))
    raise_amax(amax, state_ptr)
    if MODE == STORE_AND_RECORD and amax * scale > LARGEST:
        tl.atomic_add(state_ptr + 3, tl.sum((tl.abs(x) * scale > LARGEST).to(tl.float32)), sem="relaxed")


@triton.jit
def raise_amax(amax, state_ptr):
    """Enter a program's largest value into a quantizer's amax.

    Most tiles are below the largest so far: a load (past the L1 cache, which would not see the others) is cheaper than an atomic. Relaxed,
    because nothing hangs on the order: triton's default orders all of the program's memory around each atomic, which made a cast of 50 us
    one of 950 (docs/log.md).
    """
    if amax > tl.load(state_ptr + 2, cache_modifier=".cg"):
        tl.atomic_max(state_ptr + 2, amax, sem="relaxed")


@triton.jit
def store_quantized(x, row, column, mask, rows_ptr, num_columns, state_ptr, MODE: tl.constexpr, LARGEST: tl.constexpr):
    """Store the fp32 tile `x` [R, C] (0 where masked) of an operand as MODE says. row: int64 [R], column: int [C], mask: [R, C]."""
    place = rows_ptr + row[:, None] * num_columns + column[None, :]
    if MODE == PLAIN:
        tl.store(place, x.to(rows_ptr.dtype.element_ty), mask=mask)
    else:
        scale = tl.load(state_ptr + 1)
        if MODE != STORE:
            record(x, scale, state_ptr, MODE, LARGEST)
        if MODE != AMAX_ONLY:
            # Not tl.clamp: NaN must stay NaN, and stop the run.
            x = x * scale
            x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
            tl.store(place, x.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_kernel(
    x_ptr, rows_ptr, state_ptr, num_rows,
    num_columns: tl.constexpr, MODE: tl.constexpr, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = tile_mask(row, column, num_rows, num_columns, BLOCK_COLUMNS)
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    store_quantized(x, row, column, mask, rows_ptr, num_columns, state_ptr, MODE, LARGEST)


BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 16, 256, 4  # of seven tried on an H200 89 % of a copy (docs/log.md)


def quantize_triton(x: Tensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """As `quantize_reference`; x contiguous. 2 bytes read and 1 written per element, and the transposed layout."""
    if quantizer is None:
        return QuantizedTensor(x)
    num_rows, num_columns = x.shape
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(num_columns, BLOCK_COLUMNS))

    def launch(operand: QuantizedTensor, mode: tl.constexpr) -> None:
        _quantize_kernel[grid](
            x,
            operand.rowwise,
            quantizer.state,
            num_rows,
            num_columns,
            mode,
            quantizer.largest,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )

    return quantize_with(quantizer, (num_rows, num_columns), x, launch)


ENGINES: dict[str, Callable[[Tensor, Quantizer | None], QuantizedTensor]] = {"reference": quantize_reference, "triton": quantize_triton}


def quantize_weight(
    weight: Tensor, quantizer: Quantizer | None, quantize: Callable[[Tensor, Quantizer | None], QuantizedTensor]
) -> QuantizedTensor:
    """weight: [N, K] -> the weight as matrix products read it; without a quantizer the weight itself.

    The cast is made by `quantize` (one of ENGINES) once per optimizer step: the quantizer keeps it until `DelayedScaling.step_done` or
    `DelayedScaling.reset`, which belong after every change of the weights.
    """
    if quantizer is None:
        return QuantizedTensor(weight)
    if quantizer.cached is None:
        quantizer.cached = quantize(weight, quantizer)
    return quantizer.cached


def matmul(a: QuantizedTensor, b: QuantizedTensor, fast: bool) -> Tensor:
    """a: [M, K], b: [N, K] -> a b^T, bf16 [M, N]. `fast`: accumulate in the tensor cores' own precision (Hopper), some 14 bits."""
    if a.scale is None or b.scale is None:
        return a.rowwise @ b.rowwise.t()
    return torch._scaled_mm(a.rowwise, b.rowwise.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def dgrad(g: QuantizedTensor, weight: QuantizedTensor, fast: bool) -> Tensor:
    """g: [M, N], weight: [N, K] -> g W, [M, K]."""
    if g.scale is None or weight.scale is None:
        return g.rowwise @ weight.rowwise
    assert weight.columnwise is not None
    return matmul(g, QuantizedTensor(weight.columnwise, None, weight.scale), fast)


def wgrad(g: QuantizedTensor, x: QuantizedTensor, fast: bool) -> Tensor:
    """g: [M, N], x: [M, K] -> g^T x, [N, K]."""
    if g.scale is None or x.scale is None:
        return g.rowwise.t() @ x.rowwise
    assert g.columnwise is not None and x.columnwise is not None
    return matmul(QuantizedTensor(g.columnwise, None, g.scale), QuantizedTensor(x.columnwise, None, x.scale), fast)


class DelayedScaling:
    """The scales of all quantizers of a model, on one device, and how they follow the amaxes."""

    def __init__(self, recipe: str = "delayed"):
        """`recipe`: one of RECIPES."""
        self.recipe = recipe
        self.quantizers: list[Quantizer] = []

    def quantizer(self, **kind: bool) -> Quantizer:
        self.quantizers.append(Quantizer(**kind))
        return self.quantizers[-1]

    def allocate(self, device: torch.device) -> None:
        formats = fp8_dtypes(device)
        for quantizer in self.quantizers:
            quantizer.dtype = formats[quantizer.gradient]
        self.state = torch.zeros(len(self.quantizers), 4, dtype=torch.float32, device=device)
        self.history = torch.zeros(HISTORY, len(self.quantizers), dtype=torch.float32, device=device)
        self.follows = torch.tensor(
            [not quantizer.weight for quantizer in self.quantizers], device=device
        )  # history; weights keep the scale of their cast
        self.largest = torch.tensor([quantizer.largest for quantizer in self.quantizers], dtype=torch.float32, device=device)
        for quantizer, state in zip(self.quantizers, self.state, strict=True):
            quantizer.state = state
        self.reset()

    def reset(self) -> None:
        """As before the first step: no history."""
        self.state.zero_()
        self.history.zero_()
        self.steps = 0
        self._choose_passes()

    def _choose_passes(self) -> None:
        """For the next step; casts of the old weights are dropped."""
        for quantizer in self.quantizers:
            quantizer.cached = None
            quantizer.two_pass = quantizer.weight or self.recipe == "current" or self.steps == 0

    def attach(self, model: torch.nn.Module) -> None:
        """Record the largest values of every training forward of `model`. An evaluation must leave no trace in the scales of training."""
        model.register_forward_pre_hook(lambda model, _: self.record(model.training))

    def tensors(self) -> list[Tensor]:
        """What training changes in place: [quantizers, 4] and [HISTORY, quantizers], fp32."""
        return [self.state, self.history]

    def record(self, recording: bool) -> None:
        for quantizer in self.quantizers:
            quantizer.recording = recording

    def step_done(self) -> None:
        """After an optimizer step: new scales from the amaxes of the last HISTORY steps, computed on the device."""
        if self.recipe == "delayed":
            self.history[1:] = self.history[:-1].clone()
            self.history[0] = self.state[:, AMAX]
            amax = self.history.amax(0)
            # Where nothing but zeros was seen, the old scale stays: one from the floor would make the next real value saturate.
            scale = torch.where((amax > 0) & self.follows, self.largest / (amax * HEADROOM).clamp(min=AMAX_FLOOR), self.state[:, SCALE])
            self.state[:, SCALE] = scale
            self.state[:, INVERSE] = 1.0 / scale
        self.state[:, AMAX] = 0.0
        self.steps += 1
        self._choose_passes()

    def take_clipped(self) -> int:
        """Elements that saturated since the last call; the host waits for the device."""
        clipped = int(self.state[:, CLIPPED].sum())
        self.state[:, CLIPPED] = 0.0
        return clipped
