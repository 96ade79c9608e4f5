"""Matrix products in FP8: formats, scales and how they follow the training, and the three products of a linear layer.

A linear layer y = x W^T, with x [M, K], W [N, K] and y [M, N], costs three products. With g the gradient of y:

    fprop    y   = x W^T     sums over K       x rowwise, W rowwise
    dgrad    d_x = g W       sums over N       g rowwise, W columnwise
    wgrad    d_W = g^T x     sums over M       g columnwise, x columnwise

Hopper's tensor cores multiply FP8 only where both factors are contiguous along the summed dimension, and torch asks for that layout on
every GPU but those of compute capability 10.x (sm_100, sm_103), from torch 2.11 on. Elsewhere each of the three tensors is needed in two
layouts: `rowwise`, as it is, and `columnwise`, its transpose written out. The kernel that makes a tensor quantizes it and writes the
transpose, or one more kernel does (kernels/quantize.py). A frozen weight has no wgrad: there x and g are quantized rowwise only.

A tensor x is stored as clamp(x * scale, -F, F) in an 8-bit format whose largest number is F, and the product multiplies by 1 / scale.
There is one scale for the whole tensor:
    delayed scaling   scale = F / (HEADROOM * amax), amax the largest |x| of the last HISTORY optimizer steps. The kernel that makes x is
                      launched once: it stores x and records its amax for later steps. Elements beyond the scale saturate and are counted.
    first step        There is no history yet. The kernel is launched twice: once for the amax of this very x, then to store it with
                      scale = F / amax. Weights are always quantized in this way, as they are cast only once per optimizer step.
A NaN stays NaN and an infinite element becomes NaN, so that the loss or the gradient norm shows it and the run stops.
The amax is that of the other elements where one is NaN, and infinite where one is infinite: then the scale stays as it is.

Formats: Micikevicius et al., arXiv:2209.05433. e4m3 for weights and activations, e5m2 for gradients, FNUZ on gfx94x and OCP elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from common import engines
from common.kernels.architecture import architecture, dtype_name, gpu_architecture

HISTORY = 4  # optimizer steps; as in NVIDIA's MLPerf v5.1 configs
HEADROOM = 1.25  # of delayed scaling: amax may grow by this factor before anything saturates; costs a quarter of a bit
EVERY_LAYOUT = ("sm_100", "sm_103")  # whose tensor cores read FP8 along either dimension
AMAX_FLOOR = 1e-12  # keeps the scale of a tensor of tiny values finite

# The columns of a quantizer's state. cuBLASLt requires the scale that it reads, the inverse, at a multiple of 16 bytes.
INVERSE, SCALE, AMAX, CLIPPED = range(4)


def fp8_dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(e4m3, e5m2) as the GPU has them: FNUZ on gfx94x, OCP elsewhere."""
    fnuz = architecture(device).startswith("gfx94")
    return (
        (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        if fnuz
        else (torch.float8_e4m3fn, torch.float8_e5m2)
    )


@cache
def takes_every_layout(device: torch.device) -> bool:
    """Whether FP8 products here take factors of any layout, so that nothing is transposed. Two small products decide.

    Asked on compute capability 10.x alone (pytorch#170693). The self-test proves the products of a config at their sizes.
    """
    if architecture(device) not in EVERY_LAYOUT:
        return False
    e4m3, e5m2 = fp8_dtypes(device)
    gradient = torch.ones(32, 32, device=device).to(e5m2)
    other = torch.ones(32, 32, device=device).to(e4m3)
    scale = torch.ones(1, device=device)
    try:
        products = (
            product(gradient, other, scale, scale),
            product(gradient.t(), other, scale, scale),
        )
    except (RuntimeError, ValueError):  # as torch 2.10 does, which asks for one layout
        return False
    return all(bool((found == 32).all()) for found in products)


class QuantizedTensor(NamedTuple):
    """A matrix in the form that matrix products read. An unquantized one (bf16) has only `rowwise`."""

    rowwise: Tensor  # [rows, columns], contiguous
    # [columns, rows], contiguous: the transpose; None where no product reads it
    columnwise: Tensor | None = None
    scale: Tensor | None = None  # fp32 [1]: value = stored number * scale

    def for_wgrad(self) -> QuantizedTensor:
        """The part that wgrad reads: without `rowwise` where there is a columnwise copy."""
        return (
            self if self.columnwise is None else self._replace(rowwise=self.rowwise.new_empty(0, 0))
        )


class Quantizer:
    """The FP8 format and, on the device, the scale of one tensor of the network, e.g. of the input of layer 3's `down`.

    `state`: fp32 [4] = 1 / scale, scale, amax so far in this optimizer step, number of elements that saturated.
    """

    def __init__(self, gradient: bool = False, transposed: bool = True, weight: bool = False):
        """`gradient`: e5m2 instead of e4m3. `transposed`: write both layouts, where products need them. `weight`: always scaled by its current amax."""
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
        """The factor that turns stored numbers into values: fp32 [1], a view that changes with the scale."""
        return self.state[INVERSE : INVERSE + 1]

    def rescale(self) -> None:
        """scale := F / amax, by the rules of `new_scale`."""
        scale = new_scale(self.largest, self.state[AMAX], self.state[SCALE])
        self.state[SCALE] = scale
        self.state[INVERSE] = 1.0 / scale


def new_scale(largest: Tensor | float, amax: Tensor, old: Tensor) -> Tensor:
    """largest / amax where that is a scale, else the old scale, else 1; all on the device. amax, old: fp32, not negative, of one shape.

    It is no scale where amax is 0 (nothing but zeros or NaN was seen) or inf; the old one is 0 where there is none. Zeros are stored
    correctly with any scale. With 1 the first values after them may underflow for one step, as in Transformer Engine, which starts with 1,
    too. A scale from AMAX_FLOOR would make every one of them saturate, and choosing two launches for such a tensor would take a host sync.
    """
    scale = largest / amax.clamp(min=AMAX_FLOOR)
    usable = (amax > 0) & (scale > 0)  # largest / inf is 0, and no comparison with NaN is true
    return torch.where(usable, scale, torch.where(old > 0, old, 1.0))


def quantize_weight(
    weight: Tensor,
    quantizer: Quantizer | None,
    quantize: Callable[[Tensor, Quantizer | None], QuantizedTensor],
) -> QuantizedTensor:
    """weight: [N, K] -> the weight as matrix products read it; without a quantizer the weight itself.

    The cast is made by `quantize` (one of quantize.ENGINES) once per optimizer step: the quantizer keeps it until
    `step_done` or `reset` of model/linear_layers.py, one of which must follow every change of the weights.
    """
    if quantizer is None:
        return QuantizedTensor(weight)
    if quantizer.cached is None:
        quantizer.cached = quantize(weight, quantizer)
    return quantizer.cached


def product_engine(device: torch.device, dtype: torch.dtype) -> engines.Choice:
    """Return the engine that `product` uses for tensors of this device and dtype.

    Raises ConfigError if MATMUL_ENGINE names an engine that this machine cannot run.
    """
    return engines.in_use(engines.PRODUCTS, gpu_architecture(device), dtype_name(dtype))


def product(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None
) -> Tensor:
    """a: [M, K], b: [K, N] -> a b, [M, N]; in FP8 with both scales, in bf16.

    In FP8 all sum in the tensor cores' own precision, some 14 bits on Hopper (`use_fast_accum`): a step is 3 % faster, and eight seeds of
    500 steps show no loss by it (docs/number_formats.md). Other GPUs and the CPU sum in fp32 either way.
    """
    engine = product_engine(a.device, a.dtype).engine
    if engine.module:
        return engines.module_of(engine).product(a, b, scale_a, scale_b)
    if scale_a is None or scale_b is None:
        return a @ b
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def matmul(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """fprop. a: [M, K], b: [N, K] -> a b^T, [M, N]."""
    return product(a.rowwise, b.rowwise.t(), a.scale, b.scale)


def dgrad(g: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """g: [M, N], weight: [N, K] -> g W, [M, K]."""
    if weight.columnwise is None:
        return product(g.rowwise, weight.rowwise, g.scale, weight.scale)
    return matmul(g, QuantizedTensor(weight.columnwise, None, weight.scale))


def wgrad(g: QuantizedTensor, x: QuantizedTensor) -> Tensor:
    """g: [M, N], x: [M, K] -> g^T x, [N, K]."""
    if g.columnwise is None or x.columnwise is None:
        return product(g.rowwise.t(), x.rowwise, g.scale, x.scale)
    return matmul(
        QuantizedTensor(g.columnwise, None, g.scale), QuantizedTensor(x.columnwise, None, x.scale)
    )
