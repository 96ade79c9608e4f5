"""Matrix products by the fastest algorithm that cuBLASLt offers: an engine, chosen by MATMUL_ENGINE = "cublaslt" in a config's [env].

torch takes the algorithm that cuBLASLt names first. On an H200 at its power limit others of the first eight are up to 7 % faster, and a layer's
products 3 % in all, bit for bit the same numbers (docs/log.md). So at the first product of each shape, which is in the self-test or the warm-up,
all that give the first one's bits are timed on its operands, about a second for each shape; from then on the fastest computes it.

cuBLAS counts columns first: what lies in memory as rows of a [R, C] is a [C, R] to it. So out = a b is asked for as out^T = b^T a^T, with b as cuBLAS'
first factor and a as its second. Numbers of attributes and types: cublasLt.h and library_types.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.kernels.engines import MATMUL_ENGINE

OFFERED, KEPT = 8, 5  # algorithms that are asked for, and those of them that are timed at length
ROUNDS, BLOCK_MS = (
    3,
    75.0,
)  # the kept ones in turn; so long that the clock has found what the power limit leaves to each
LEAST_GAIN = 0.003  # below it the first stays: noise
COMPUTE_FP32, FP32 = 68, 0
TYPES = {torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
TRANSPOSE_FIRST, TRANSPOSE_SECOND, SCALE_OF_FIRST, SCALE_OF_SECOND, FAST_SUMS = (
    3,
    4,
    17,
    18,
    25,
)  # attributes of an operation
MAX_WORKSPACE = 1  # attribute of a preference: an algorithm that needs a workspace splits sums, in another order
ONE, ZERO = c_float(1.0), c_float(0.0)
PRODUCTS: dict[tuple, Product] = {}
CHOICES: list[str] = []  # for the log


class Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded. Raises ConfigError for another engine's name, and where torch has none."""
    name, otherwise = (
        os.environ[MATMUL_ENGINE],
        f"remove {MATMUL_ENGINE} from [env]: torch's products are used then",
    )
    if name != "cublaslt":
        raise ConfigError(
            f"{MATMUL_ENGINE} = {name!r} is no engine",
            'known is "cublaslt"',
            f"write it so, or {otherwise}",
        )
    loaded = re.search(r"/\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    if loaded is None or not torch.cuda.is_available():
        raise ConfigError(
            f'{MATMUL_ENGINE} = "cublaslt" cannot be used here',
            "it is for NVIDIA GPUs and a torch that is built for them",
            otherwise,
        )
    return ctypes.CDLL(loaded[0])


def call(function: str, *arguments: object) -> None:
    if status := getattr(library(), function)(*arguments):
        raise RuntimeError(f"{function} failed with cuBLAS status {status}")


def created(function: str, *arguments: object) -> c_void_p:
    made = c_void_p()
    call(function, byref(made), *arguments)
    return made


@cache
def handle() -> c_void_p:
    return created("cublasLtCreate")


def layout(x: Tensor) -> c_void_p:
    """How x lies in memory, [R, C] or the transpose of one."""
    if x.dtype not in TYPES or min(x.stride()) != 1:
        raise RuntimeError(
            f"no product of {x.dtype} with strides {x.stride()}: cuBLASLt takes bf16 and FP8, with contiguous rows or columns"
        )
    rows, columns = x.shape if x.stride(1) == 1 else (x.shape[1], x.shape[0])
    return created(
        "cublasLtMatrixLayoutCreate",
        TYPES[x.dtype],
        c_uint64(columns),
        c_uint64(rows),
        c_int64(max(x.stride())),
    )


class Product:
    """out = a b for factors of one shape, layout and dtype: cuBLASLt's descriptors of it, and the algorithm that was chosen."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor):
        self.operation = created("cublasLtMatmulDescCreate", COMPUTE_FP32, FP32)
        self.first, self.second, self.out = layout(b), layout(a), layout(out)
        self.set(TRANSPOSE_FIRST, c_int(b.stride(1) != 1))
        self.set(TRANSPOSE_SECOND, c_int(a.stride(1) != 1))
        self.set(FAST_SUMS, c_int8(a.dtype.itemsize == 1))
        self.chosen: Offer | None = None

    def set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        call(
            "cublasLtMatmulDescSetAttribute",
            self.operation,
            attribute,
            byref(value),
            c_size_t(sizeof(value)),
        )

    def launch(self, offer: Offer, a: Tensor, b: Tensor, out: Tensor) -> None:
        factors = (
            byref(ONE),
            c_void_p(b.data_ptr()),
            self.first,
            c_void_p(a.data_ptr()),
            self.second,
        )
        result, workspace = (c_void_p(out.data_ptr()), self.out), (None, c_size_t(0))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (
            handle(),
            self.operation,
            *factors,
            byref(ZERO),
            *result,
            *result,
            byref(offer),
            *workspace,
            stream,
        )
        call("cublasLtMatmul", *arguments)

    def offers(self) -> list[Offer]:
        """In the order of how fast cuBLASLt thinks that they are."""
        preference, found, count = (
            created("cublasLtMatmulPreferenceCreate"),
            (Offer * OFFERED)(),
            c_int(),
        )
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            MAX_WORKSPACE,
            byref(c_uint64(0)),
            c_size_t(8),
        )
        arguments = self.operation, self.first, self.second, self.out, self.out, preference
        call("cublasLtMatmulAlgoGetHeuristic", handle(), *arguments, OFFERED, found, byref(count))
        return [offer for offer in found[: count.value] if offer.status == 0]

    def choose(self, a: Tensor, b: Tensor, out: Tensor) -> Offer:
        """The fastest of those that compute the bits of the first, on these factors. Leaves the product in `out`."""
        offers = self.offers()
        if not offers:
            raise RuntimeError(
                f"cuBLASLt offers no algorithm for {list(a.shape)} x {list(b.shape)} in {a.dtype}"
            )
        first, *others = offers
        self.launch(first, a, b, out)
        bits, other = out.view(torch.int16), torch.empty_like(out)
        equal = [first]
        for offer in others:
            other.fill_(math.nan)  # what is not written shows
            with suppress(RuntimeError):  # refused, though it was offered
                self.launch(offer, a, b, other)
                equal += [offer] * torch.equal(other.view(torch.int16), bits)
        launches = [partial(self.launch, offer, a, b, other) for offer in equal]
        once = [milliseconds(launch, 3) for launch in launches]
        kept = sorted({0, *sorted(range(len(once)), key=once.__getitem__)[:KEPT]})
        rounds = [
            [milliseconds(launches[i], math.ceil(BLOCK_MS / once[i])) for i in kept]
            for _ in range(ROUNDS)
        ]
        medians = dict(zip(kept, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        best = min(medians, key=medians.__getitem__)
        if medians[best] >= (1 - LEAST_GAIN) * medians[0]:
            best = 0
        CHOICES.append(
            f"{list(a.shape)} x {list(b.shape)}: {1e3 * medians[best]:.1f} us, the first {1e3 * medians[0]:.1f}"
        )
        return equal[best]


def milliseconds(launch: Callable[[], None], count: int) -> float:
    """Time of a launch, the mean of `count` back to back, after half as many that are not counted."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(count // 2 + count):
        if number == count // 2:
            begin.record()
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def product(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None
) -> Tensor:
    """a: [M, K], b: [K, N], each with contiguous rows or columns, in bf16; or in FP8, a with contiguous rows, b with contiguous columns, and
    their scales, fp32 [1], value = number * scale. -> a b, bf16 [M, N].

    Raises RuntimeError for what cuBLASLt cannot compute, ConfigError where there is none.
    """
    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
    known = PRODUCTS.get(key)
    if known is None:
        known = PRODUCTS[key] = Product(a, b, out)
    if scale_a is not None and scale_b is not None:
        known.set(SCALE_OF_FIRST, c_void_p(scale_b.data_ptr()))
        known.set(SCALE_OF_SECOND, c_void_p(scale_a.data_ptr()))
    if known.chosen is None:
        known.chosen = known.choose(a, b, out)
    else:
        known.launch(known.chosen, a, b, out)
    return out
