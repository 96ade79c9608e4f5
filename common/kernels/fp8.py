"""Matrix products in FP8: number formats, scales, and the three products of a linear layer.

A linear layer y = x W^T, with x [M, K], W [N, K] and y [M, N], needs three products. With g the
gradient of y:

    fprop    y   = x W^T     sums over K       x rowwise, W rowwise
    dgrad    d_x = g W       sums over N       g rowwise, W columnwise
    wgrad    d_W = g^T x     sums over M       g columnwise, x columnwise

Hopper's tensor cores multiply FP8 only if both factors are contiguous along the summed dimension.
torch requires that layout on all GPUs. The exception is compute capability 10.x (sm_100, sm_103),
where torch 2.11 and newer accept any layout. On all other GPUs, each of the three tensors is needed
in two layouts: `rowwise`, the tensor itself, and `columnwise`, a copy of its transpose. The kernel
that computes a tensor also quantizes it. The same kernel or a second one writes the transpose
(kernels/quantize.py). A frozen weight has no wgrad, so its x and g are quantized rowwise only.

A tensor x is stored as clamp(x * scale, -F, F), where F is the largest number of the 8-bit format.
Products multiply by the inverse scale, 1 / scale. Their arguments `scale_a` and `scale_b`, named as
in torch, are inverse scales. The whole tensor has one scale:

    delayed scaling   scale = F / (HEADROOM * amax), with amax the largest |x| of the last HISTORY
                      optimizer steps. The kernel that computes x is launched once. It stores x and
                      records its amax for later steps. Elements beyond the scale's range saturate
                      and are counted.
    first step        There is no history yet, so the kernel is launched twice: first for the amax
                      of this x, then to store x with scale = F / amax. Weights are always
                      quantized in this way, because they are cast only once per optimizer step.

A NaN stays NaN, and an infinite element becomes NaN, so that the loss or the gradient norm shows it
and the run stops. The amax ignores NaN. If an element is infinite, so is the amax, and the scale
does not change.

Formats: Micikevicius et al., arXiv:2209.05433. e4m3 for weights and activations, e5m2 for
gradients, FNUZ on gfx94x and OCP elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from common import engines
from common.kernels.architecture import architecture, dtype_name, gpu_architecture

HISTORY = 4  # optimizer steps, as in NVIDIA's MLPerf v5.1 configs
# In delayed scaling, the amax may grow by this factor before an element saturates. It costs a third
# of a bit, log2(1.25).
HEADROOM = 1.25
# Architectures whose tensor cores read FP8 along either dimension. By calculation, this saves 2.9 %
# of the 8B's step on a B200 and 1.6 % of LoRA's. Never run there, where cuBLAS's kernels for other
# layouts may be slower: to compare, run `bench` with this tuple and with an empty one.
EVERY_LAYOUT = ("sm_100", "sm_103")
AMAX_FLOOR = 1e-12  # keeps the scale of a tensor of tiny values finite

# Indices of a quantizer's state. INVERSE, which products read, is first, because cuBLASLt requires
# it to be aligned to 16 bytes.
INVERSE, SCALE, AMAX, SATURATED = range(4)

NO_RANGE = nullcontext()


def fp8_dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return the device's dtypes (e4m3, e5m2): FNUZ on gfx94x, OCP elsewhere."""
    if architecture(device).startswith("gfx94"):
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


@cache
def takes_every_layout(device: torch.device) -> bool:
    """Return whether FP8 products on `device` accept factors of any layout.

    Columnwise copies are then not needed. On compute capability 10.x (pytorch#170693), two small
    products are tried. The self-test checks the products of a config at their real sizes.
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
    except (RuntimeError, ValueError):  # as with torch 2.10, which requires one layout
        return False
    # Each element is the sum of 32 products of ones.
    return all(bool((result == 32).all()) for result in products)


class QuantizedTensor(NamedTuple):
    """A matrix in the form that matrix products read. An unquantized (bf16) one has only `rowwise`.

    Its fields:
        `rowwise`: [rows, columns], contiguous.
        `columnwise`: the transpose, [columns, rows], contiguous. None if no product reads it.
        `inverse_scale`: fp32 [1], value = stored number * inverse_scale. None if unquantized.
    """

    rowwise: Tensor
    columnwise: Tensor | None = None
    inverse_scale: Tensor | None = None

    def for_wgrad(self) -> QuantizedTensor:
        """Return the part that wgrad reads: without `rowwise` if there is a columnwise copy."""
        if self.columnwise is None:
            return self
        return self._replace(rowwise=self.rowwise.new_empty(0, 0))


class Quantizer:
    """FP8 format and scale of one tensor of the network, such as the input of layer 3's `down`.

    `state`: on the device, fp32 [4] = (1 / scale, scale, amax so far in this optimizer step, number
        of elements that saturated).
    """

    def __init__(self, gradient: bool = False, transposed: bool = True, weight: bool = False):
        """Set the options. DelayedScaling.allocate sets dtype and state.

        `gradient`: use e5m2 instead of e4m3.
        `transposed`: write both layouts, if products on the device need both.
        `weight`: always scale by the current amax.
        """
        self.gradient = gradient
        self.transposed = transposed
        self.weight = weight
        self.dtype = torch.float8_e4m3fn
        self.state = torch.empty(4, device="meta")
        self.two_pass = True  # whether the kernel is launched twice
        self.recording = True  # whether amaxes are recorded; not in evaluations
        self.cached: QuantizedTensor | None = None  # see `quantize_weight`

    @property
    def largest(self) -> float:
        """Largest number of the format."""
        return torch.finfo(self.dtype).max

    @property
    def inverse_scale(self) -> Tensor:
        """1 / scale, fp32 [1], a view of the state: value = stored number * this."""
        return self.state[INVERSE : INVERSE + 1]


def new_scale(largest: Tensor | float, amax: Tensor, old: Tensor) -> Tensor:
    """Return largest / amax where that is a usable scale, else the old scale, else 1.

    `amax`, `old`: fp32, not negative, of one shape, on the device. `old` is 0 where there is no old
        scale.

    The quotient is not usable if amax is inf, or if it is 0 because all elements were 0 or NaN.
    Zeros are stored correctly with any scale. With a scale of 1, the first nonzero values may
    underflow for one step, as in Transformer Engine, which also starts with 1. A scale from
    AMAX_FLOOR would saturate all of them, and a second launch for such tensors would need a host
    synchronization.
    """
    scale = largest / amax.clamp(min=AMAX_FLOOR)
    usable = (amax > 0) & (scale > 0)  # largest / inf is 0, and every comparison with NaN is false
    return torch.where(usable, scale, torch.where(old > 0, old, 1.0))


def quantize_weight(
    weight: Tensor,
    quantizer: Quantizer | None,
    quantize: Callable[[Tensor, Quantizer | None], QuantizedTensor],
) -> QuantizedTensor:
    """Return `weight` [N, K] in the form that matrix products read.

    `quantizer`: None for an unquantized weight.
    `quantize`: the function that casts, one of quantize.IMPLEMENTATIONS.

    The weight is cast once per optimizer step. The quantizer keeps the cast weight until
    `step_done` or `reset` of model/linear_layers.py. One of them must follow every change of the
    weights.
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


def product_range(a: Tensor, b: Tensor, name: str = "gemm") -> AbstractContextManager:
    """Return a range that gives torch's profiler the size of the product launched inside.

    Only for products that no torch op launches: a torch op records the shapes of its inputs. The
    range is called "<name>: M x N x K", which common/measure/trace.py reads. Without a profiler,
    the context does nothing.

    `a`: [M, K].
    `b`: [K, N] or [N, K].
    `name`: begins with "gemm".
    """
    # Reading torch's flag for cheap checks takes 12 ns on an AMD EPYC, and the whole `with` of the
    # empty context 260 ns. torch._C._autograd._profiler_enabled() would take 80 ns, and a range
    # without a profiler 9,000 ns.
    if not profiler._is_profiler_enabled:
        return NO_RANGE
    rows, inner = a.shape
    return profiler.record_function(f"{name}: {rows} x {b.numel() // inner} x {inner}")


def product(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None
) -> Tensor:
    """Return the product a b, [M, N], of `a` [M, K] and `b` [K, N].

    `scale_a`, `scale_b`: required for FP8 factors, the inverse scales, fp32 [1]. The result is then
        bf16.

    FP8 products sum in the tensor cores' own precision, some 14 bits on Hopper (`use_fast_accum`).
    A step is then 3 % faster. The loss is not worse after 500 steps with eight seeds
    (docs/number_formats.md), or after 3,000 steps with sums of 32,768 terms (docs/results.md).
    Sums of terms with one sign are 10 % and more too small, though (common/model/llama.py).
    Other GPUs and the CPU sum in fp32 either way. A scale per row instead of one per tensor is not
    faster on an H200: 8.51 to 8.82 ms for the products of a layer of the 8B under load, and 8.55 to
    8.72 ms.
    """
    engine = product_engine(a.device, a.dtype).engine
    if engine.module:
        with product_range(a, b):
            return engines.module_of(engine).product(a, b, scale_a, scale_b)
    if scale_a is None or scale_b is None:
        return a @ b
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def fprop(x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """Return x W^T, [M, N], of `x` [M, K] and `weight` [N, K]."""
    return product(x.rowwise, weight.rowwise.t(), x.inverse_scale, weight.inverse_scale)


def dgrad(g: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """Return g W, [M, K], of `g` [M, N] and `weight` [N, K]."""
    if weight.columnwise is None:
        return product(g.rowwise, weight.rowwise, g.inverse_scale, weight.inverse_scale)
    return product(g.rowwise, weight.columnwise.t(), g.inverse_scale, weight.inverse_scale)


def wgrad(g: QuantizedTensor, x: QuantizedTensor) -> Tensor:
    """Return g^T x, [N, K], of `g` [M, N] and `x` [M, K]."""
    if g.columnwise is None or x.columnwise is None:
        return product(g.rowwise.t(), x.rowwise, g.inverse_scale, x.inverse_scale)
    return product(g.columnwise, x.columnwise.t(), g.inverse_scale, x.inverse_scale)
