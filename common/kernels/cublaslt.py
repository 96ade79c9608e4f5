"""Matrix products by the fastest algorithm that cuBLASLt offers for each shape.

torch uses the first algorithm that cuBLASLt offers. On an H200 at its power limit, others of the
first eight are up to 7 % faster. With the fastest ones, all products of a layer take 3 % less time,
with bit-identical results. The first product of each shape is computed in the
self-test or the warm-up. All algorithms that give the bits of the first one are then timed on its
operands, which takes about two seconds per shape. The fastest one computes all later products of
that shape. A file stores this choice for later starts, which compare bits again but time nothing.

cuBLAS is column-major: it reads a row-major [R, C] matrix as a [C, R] matrix. Therefore out = a b
is requested as out^T = b^T a^T, with b as the first factor of cuBLAS and a as the second.

The numbers of attributes and types are from cublasLt.h and library_types.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from common.atomic_write import write_whole
from common.paths import cache_folder

# Number of algorithms requested from cuBLASLt. On an H200 nothing else made a product of the 8B or
# the 70B faster: 16 other cluster shapes and swizzles, a workspace of 64 MB, exchanged operands,
# rows split in 2 or 4, 4 multiprocessors left free, cuBLAS 13.10 instead of 13.1, or QuACK's
# products.
OFFERED = 8
KEPT = 5  # number of the fastest algorithms that are timed a second time, at length
ROUNDS = 3  # number of timed blocks of each of them, in turns
# Duration of a block, long enough for the clock to reach the value that the power limit allows.
BLOCK_MS = 75.0
# A shorter product is limited by its launch on the host. The first algorithm computes it. Timing
# the miniature's products took 42 s of its first start.
SHORTEST_MS = 0.05
LEAST_GAIN = 0.003  # a smaller relative gain is noise, and the first algorithm is used

COMPUTE_FP32 = 68
FP32 = 0
TYPES = {torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
# Attributes of an operation.
TRANSPOSE_FIRST = 3
TRANSPOSE_SECOND = 4
SCALE_OF_FIRST = 17
SCALE_OF_SECOND = 18
FAST_SUMS = 25
# Attribute of a preference. It is set to 0 bytes, because algorithms with a workspace split sums
# and so add in another order.
MAX_WORKSPACE = 1

ONE = c_float(1.0)
# Factor of a matrix that is added to the product. Adding the residual to the products of o and down
# would take 26 µs off 16.4 ms for a layer and sequence of the 8B on an H200, and round once less.
ZERO = c_float(0.0)
PRODUCTS: dict[tuple, Product] = {}  # shapes, strides and dtypes of both factors -> product
CHOICES: list[str] = []  # descriptions of the choices so far, for the records of a run


class Offer(ctypes.Structure):
    """An algorithm that cuBLASLt offers: cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def require() -> None:
    """Raise OSError if torch has not loaded cuBLASLt, as on AMD GPUs."""
    library()


@cache
def library() -> ctypes.CDLL:
    """Return the cuBLASLt that torch has loaded. Raises OSError if there is none."""
    loaded = re.search(r"/\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    if loaded is None:
        raise OSError("this torch has not loaded libcublasLt")
    return ctypes.CDLL(loaded[0])


def call(function: str, *arguments: object) -> None:
    """Call a function of cuBLASLt. Raises RuntimeError if it returns an error status."""
    status = getattr(library(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function} failed with cuBLAS status {status}")


def created(function: str, *arguments: object) -> c_void_p:
    """Return the object that one of the `...Create` functions of cuBLASLt creates."""
    pointer = c_void_p()
    call(function, byref(pointer), *arguments)
    return pointer


@cache
def handle() -> c_void_p:
    """Return the handle of cuBLASLt, which is created once."""
    return created("cublasLtCreate")


def layout(x: Tensor) -> c_void_p:
    """Return the descriptor of the memory layout of a matrix.

    Raises RuntimeError unless `x` is bf16 or FP8 with contiguous rows or columns.
    """
    if x.dtype not in TYPES or min(x.stride()) != 1:
        raise RuntimeError(
            f"unsupported factor of {x.dtype} with strides {x.stride()}: "
            "cuBLASLt takes bf16 and FP8, with contiguous rows or columns"
        )
    rows, columns = x.shape if x.stride(1) == 1 else (x.shape[1], x.shape[0])
    return created(
        "cublasLtMatrixLayoutCreate",
        TYPES[x.dtype],
        c_uint64(columns),
        c_uint64(rows),
        c_int64(max(x.stride())),
    )


def describe(x: Tensor) -> str:
    """Return dtype, shape and strides of a factor as text."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} strides {list(x.stride())}"


class Product:
    """A product out = a b of one shape, layout and dtype: its descriptors and its algorithm."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor):
        self.operation = created("cublasLtMatmulDescCreate", COMPUTE_FP32, FP32)
        self.first = layout(b)
        self.second = layout(a)
        self.out = layout(out)
        self.set(TRANSPOSE_FIRST, c_int(b.stride(1) != 1))
        self.set(TRANSPOSE_SECOND, c_int(a.stride(1) != 1))
        self.set(FAST_SUMS, c_int8(a.dtype.itemsize == 1))
        self.chosen: Offer | None = None
        # The name of this product in the file of choices.
        self.name = f"{describe(a)} x {describe(b)}"

    def set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        """Set an attribute of the operation."""
        call(
            "cublasLtMatmulDescSetAttribute",
            self.operation,
            attribute,
            byref(value),
            c_size_t(sizeof(value)),
        )

    def launch(self, offer: Offer, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Launch the product with an algorithm on the current stream."""
        result = (c_void_p(out.data_ptr()), self.out)
        call(
            "cublasLtMatmul",
            handle(),
            self.operation,
            byref(ONE),
            c_void_p(b.data_ptr()),
            self.first,
            c_void_p(a.data_ptr()),
            self.second,
            byref(ZERO),
            *result,
            *result,
            byref(offer),
            None,
            c_size_t(0),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def offers(self) -> list[Offer]:
        """Return at most OFFERED algorithms without a workspace, as cuBLASLt orders them."""
        preference = created("cublasLtMatmulPreferenceCreate")
        offers = (Offer * OFFERED)()
        count = c_int()
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            MAX_WORKSPACE,
            byref(c_uint64(0)),
            c_size_t(8),
        )
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            handle(),
            self.operation,
            self.first,
            self.second,
            self.out,
            self.out,
            preference,
            OFFERED,
            offers,
            byref(count),
        )
        return [offer for offer in offers[: count.value] if offer.status == 0]

    def choose(self, a: Tensor, b: Tensor, out: Tensor) -> Offer:
        """Return the fastest algorithm that gives the bits of the first one on these factors.

        Computes the product in `out`. Needs no other memory of that size. Raises RuntimeError if
        cuBLASLt offers no algorithm.
        """
        offers = self.offers()
        if not offers:
            raise RuntimeError(f"cuBLASLt offers no algorithm for {self.name}")
        first, *others = offers
        self.launch(first, a, b, out)
        expected = sums_of_bits(out)
        stored = kept_choices().get(self.name)
        if stored is not None and stored in map(fingerprint, offers):
            others = [offer for offer in others if fingerprint(offer) == stored]
        equal = [first]
        for offer in others:
            out.fill_(math.nan)  # shows elements that are not written
            with suppress(RuntimeError):  # cuBLASLt may refuse an algorithm that it has offered
                self.launch(offer, a, b, out)
                if all(map(torch.equal, sums_of_bits(out), expected)):
                    equal.append(offer)
        best = None
        for offer in equal:
            if fingerprint(offer) == stored:
                best = offer
                CHOICES.append(f"{self.name}: as in an earlier start")
                break
        if best is None:
            best = self.fastest(equal, a, b, out)
        self.launch(best, a, b, out)
        return best

    def fastest(self, equal: list[Offer], a: Tensor, b: Tensor, out: Tensor) -> Offer:
        """Return the fastest of `equal`, and store the choice in the file.

        The first one, which cuBLASLt recommends, is used unless another is faster by LEAST_GAIN.
        It is also used, and not stored, if the product is short.
        """
        launches = [partial(self.launch, offer, a, b, out) for offer in equal]
        short_times = [milliseconds(launch, 3) for launch in launches]
        if short_times[0] < SHORTEST_MS:
            return equal[0]
        by_time = sorted(range(len(equal)), key=short_times.__getitem__)
        kept = sorted({0, *by_time[:KEPT]})
        times: dict[int, list[float]] = {index: [] for index in kept}
        for _ in range(ROUNDS):
            for index in kept:
                count = math.ceil(BLOCK_MS / short_times[index])
                times[index].append(milliseconds(launches[index], count))
        medians = {index: statistics.median(times[index]) for index in kept}
        best = min(medians, key=medians.__getitem__)
        if medians[best] >= (1 - LEAST_GAIN) * medians[0]:
            best = 0
        CHOICES.append(
            f"{self.name}: {1e3 * medians[best]:.1f} µs, the first {1e3 * medians[0]:.1f}"
        )
        keep_choice(self.name, equal[best])
        return equal[best]


def sums_of_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the columns and of the rows of a bf16 matrix, read as integers.

    If a bit differs, they differ, unless differences cancel both in a row and in a column.
    """
    bits = x.view(torch.int16)
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


def fingerprint(offer: Offer) -> str:
    """Return the bytes of an algorithm in hexadecimal."""
    return bytes(offer.algorithm).hex()


def choices_path() -> Path:
    """Return the file of choices for this version of cuBLASLt and this GPU."""
    library().cublasLtGetVersion.restype = c_size_t
    version = library().cublasLtGetVersion()
    gpu = re.sub(r"\W+", "_", torch.cuda.get_device_name())
    return cache_folder("cublaslt") / f"{version}_{gpu}.json"


def kept_choices() -> dict[str, str]:
    """Return name of a product -> fingerprint of its algorithm, from the file of choices."""
    with suppress(OSError, ValueError):
        choices = json.loads(choices_path().read_text())
        if isinstance(choices, dict):
            return choices
    return {}


def keep_choice(name: str, offer: Offer) -> None:
    """Add a choice to the file.

    If ranks overwrite each other's choices, the next start times those products again.
    """
    path = choices_path()
    with suppress(OSError):  # the file is not necessary
        path.parent.mkdir(parents=True, exist_ok=True)
        choices = kept_choices() | {name: fingerprint(offer)}
        write_whole(path, json.dumps(choices, indent=1).encode())


def milliseconds(launch: Callable[[], None], count: int) -> float:
    """Return the mean time in ms of `count` launches in a row, after count // 2 untimed ones."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
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
    """Return the product a b, bf16 [M, N].

    `a`: [M, K], in FP8 with contiguous rows, in bf16 with contiguous rows or columns.
    `b`: [K, N], in FP8 with contiguous columns, in bf16 with contiguous rows or columns.
    `scale_a`, `scale_b`: given for FP8 factors, the inverse scales, fp32 [1].

    Raises RuntimeError for a product that cuBLASLt cannot compute.
    """
    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
    if key not in PRODUCTS:
        PRODUCTS[key] = Product(a, b, out)
    known = PRODUCTS[key]
    if scale_a is not None and scale_b is not None:
        known.set(SCALE_OF_FIRST, c_void_p(scale_b.data_ptr()))
        known.set(SCALE_OF_SECOND, c_void_p(scale_a.data_ptr()))
    if known.chosen is None:
        known.chosen = known.choose(a, b, out)
    else:
        known.launch(known.chosen, a, b, out)
    return out
