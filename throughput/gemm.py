"""Measure matrix products on one GPU in FP16, BF16 and FP8, and copies of memory.

The products are calls of torch, and run in the BLAS libraries that torch uses.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common.kernels.fp8 import fp8_dtypes
from common.measure.tables import Column, Plot, PublishedValues, Table, time_columns
from throughput.result import Result, TimedRow
from throughput.timing import REPEAT_MS, WARMUP_MS, kernel_ms, per_second

# (M, K, N) -> description: squares, and the products for 16,384 tokens of Llama 70B (hidden size
# 8192, FFN 28672, 64 heads and 8 key-value heads of 128) with tensor parallelism 8. The shapes
# come from an article by SemiAnalysis (published.json, gemm_llama_70b).
SHAPES = {
    (4096, 4096, 4096): "square 4K",
    (8192, 8192, 8192): "square 8K",
    (16384, 16384, 16384): "square 16K",
    (16384, 8192, 1280): "fused QKV",
    (16384, 1024, 8192): "attention output",
    (16384, 8192, 7168): "FFN GEMM 1",
    (16384, 3584, 8192): "FFN GEMM 2",
}
CPU_DIVISOR = 32  # on a CPU, each size is divided by this
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# FP8 scaling -> dimension along which elements share a scale; None: one scale for the tensor.
SCALINGS = {"tensorwise": None, "rowwise": 1}
COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}  # size of copies within a memory
HOST_BYTES = 2**28  # size of copies between host and device
TIMES = time_columns("Samples", "Median", ".3f")
METHOD = (
    f"Each call is timed separately: {WARMUP_MS:.0f} ms of untimed calls, then {REPEAT_MS:.0f} ms "
    "of timed ones. On a GPU, events time the calls and the L2 cache is overwritten before each "
    "(Triton's do_bench). Inputs are normal(0, 1). p10 and p90 are percentiles."
)

TABLES = (
    Table(
        "summary",
        "Average and best of the shapes",
        (
            Column("precision", "Precision"),
            Column("call", "Call"),
            Column("library", "Library"),
            Column("shapes", "Shapes measured", "", "d"),
            Column("average", "Average TFLOP/s", "", ",.4g"),
            Column("best", "Best TFLOP/s", "", ",.4g"),
            Column("best_percent", "Best, % of peak", "", ".1f"),
            Column("best_shape", "Best shape"),
        ),
        keys=("precision", "call", "library", "shapes"),
        value="average",
        formulas=("Average: mean of the TFLOP/s of all shapes, without weights.",),
        published=(PublishedValues("gemm_gpus", (), "tflops"),),
        sort="average",
    ),
    Table(
        "gemm",
        "Matrix products",
        (
            Column("shape", "M x K x N"),
            Column("description", "Product"),
            Column("precision", "Precision"),
            Column("call", "Call"),
            Column("library", "Library"),
            Column("tflops", "TFLOP/s", "", ",.4g"),
            Column("percent", "% of peak", "", ".1f"),
            *TIMES,
            Column("intensity", "Intensity", "FLOP/byte", ",.0f"),
        ),
        keys=("shape", "precision", "call", "library"),
        value="tflops",
        formulas=(
            METHOD,
            "TFLOP/s = 2 M K N / median / 1e12. % of peak: of the dense peak of this GPU kind in "
            "this precision. Intensity = 2 M K N / bytes, if A, B and the result move once.",
            "matmul: torch.matmul(A [M, K], B [K, N]). linear: F.linear(A [M, K], W [N, K]). "
            "_scaled_mm: A [M, K] and W [N, K] in FP8 (e4m3), with one scale per tensor "
            "(tensorwise) or per row of A and of W (rowwise), result in bf16, use_fast_accum. "
            "Quantization is not timed.",
            "Library: the one that torch is set to prefer "
            "(torch.backends.cuda.preferred_blas_library). torch may use another one for products "
            "that this library does not support. For _scaled_mm there is no choice.",
        ),
        plots=(
            Plot(
                "roofline",
                "Roofline: products and measured copy bandwidth",
                "intensity",
                "tflops",
                "precision",
            ),
        ),
        published=(
            PublishedValues("gemm_llama_70b", ("shape", "precision", "call"), "tflops"),
            PublishedValues("gemm_square", (), "tflops"),
            PublishedValues("gemm_libraries", (), "tflops"),
        ),
        sort="tflops",
    ),
    Table(
        "copy",
        "Copies of memory",
        (
            Column("copy", "Copy"),
            Column("mebibytes", "Size", "MiB", ",d"),
            Column("gbps", "GB/s", "", ",.1f"),
            *TIMES,
        ),
        keys=("copy",),
        value="gbps",
        formulas=(
            "GB/s = bytes / median / 1e9. Within one memory, a byte that is read and written "
            "counts twice; between host and device, once. Host memory is pinned.",
        ),
    ),
)


def measure(options: argparse.Namespace, result: Result) -> None:
    """Measure copies and products."""
    torch.manual_seed(0)
    device = options.device
    chosen = shapes(options.shape, options.device)
    measure_copies(device, result)
    for shape, description in chosen.items():
        for precision, call, library in variants(device, options.precision):
            row = {
                "table": "gemm",
                "shape": "x".join(map(str, shape)),
                "description": description,
                "precision": precision,
                "call": call,
                "library": library,
            }
            result.attempt(row, partial(product, shape, precision, call, library, result))
    summarize(result)
    note_roofs(result)


def shapes(
    wanted: list[tuple[int, int, int]] | None, device: str
) -> dict[tuple[int, int, int], str]:
    """Return (M, K, N) -> description: of the `wanted` shapes, or of all.

    On a CPU the sizes are smaller.
    """
    if wanted:
        return {shape: SHAPES.get(shape, "--shape") for shape in wanted}
    if device == "cuda":
        return dict(SHAPES)
    small = {}
    for (m, k, n), text in SHAPES.items():
        shape = (m // CPU_DIVISOR, k // CPU_DIVISOR, n // CPU_DIVISOR)
        small[shape] = f"{text} / {CPU_DIVISOR}"
    return small


def variants(device: str, precision: str | None) -> Iterator[tuple[str, str, str]]:
    """Yield precision, call and library of each variant of a product.

    `precision`: yield only variants in this precision. The library is "" if torch offers no choice.
    """
    names = libraries() if device == "cuda" else [""]
    for dtype in DTYPES:
        for call in ("matmul", "linear"):
            yield from ((dtype, call, name) for name in names if precision in (None, dtype))
    if precision in (None, "fp8"):
        yield from (("fp8", f"_scaled_mm {scaling}", "") for scaling in SCALINGS)


def libraries() -> list[str]:
    """Return the names that torch.backends.cuda.preferred_blas_library accepts."""
    return ["hipblas", "hipblaslt", "ck"] if torch.version.hip else ["cublas", "cublaslt"]


@contextlib.contextmanager
def preferred(library: str) -> Iterator[None]:
    """Make torch prefer `library` inside the block. "" changes nothing.

    Raises RuntimeError if torch does not accept `library` on this GPU.
    """
    if not library:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    try:
        # torch's type stub does not declare `name`.
        backend: Any = torch.backends.cuda.preferred_blas_library(library)
        selected = backend.name.lower()
        if selected != library.replace("hip", "cu"):  # torch names ROCm's libraries like CUDA's
            raise RuntimeError(f"torch selected {selected} instead of {library}")
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def product(
    shape: tuple[int, int, int], precision: str, call: str, library: str, result: Result
) -> TimedRow:
    """Time one variant of a product."""
    m, k, n = shape
    work, width = launch_of(shape, precision, call, result.device)
    with preferred(library):
        times = kernel_ms(work, result.device)
    flops = 2 * m * k * n
    tflops = per_second(times, flops) / 1e12
    moved = width * (m * k + k * n) + 2 * m * n
    values = {
        "tflops": tflops,
        "percent": result.percent(tflops, precision),
        "intensity": flops / moved,
    }
    return TimedRow(values, times)


def launch_of(
    shape: tuple[int, int, int], precision: str, call: str, device: str
) -> tuple[Callable[[], Tensor], int]:
    """Return a function that computes the product, and the bytes per element of its operands.

    The operands are random tensors on `device`.
    """
    m, k, n = shape
    if precision == "fp8":
        dimension = SCALINGS[call.rpartition(" ")[2]]
        a, scale_a = quantized(torch.randn(m, k, device=device), dimension)
        w, scale_w = quantized(torch.randn(n, k, device=device), dimension)
        options: Any = {
            "scale_a": scale_a,
            "scale_b": scale_w.t(),
            "out_dtype": torch.bfloat16,
            "use_fast_accum": True,
        }
        return partial(torch._scaled_mm, a, w.t(), **options), 1
    draw = partial(torch.randn, device=device, dtype=DTYPES[precision])
    if call == "matmul":
        return partial(torch.matmul, draw(m, k), draw(k, n)), 2
    return partial(F.linear, draw(m, k), draw(n, k)), 2


def quantized(x: Tensor, dimension: int | None) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, columns] to e4m3. Return the result and its fp32 scale, x / result.

    The scale is a scalar, or [rows, 1] if `dimension` is 1.
    """
    dtype = fp8_dtypes(x.device)[0]
    largest = x.abs().amax() if dimension is None else x.abs().amax(dimension, keepdim=True)
    scale = largest.float() / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def measure_copies(device: str, result: Result) -> None:
    """Add the rows of table "copy": within device memory, and on a GPU to and from host memory."""
    within = "within device memory" if device == "cuda" else "within host memory"
    copies = [(within, COPY_BYTES[device], device, device)]
    if device == "cuda":
        copies.append(("host to device", HOST_BYTES, "cpu", device))
        copies.append(("device to host", HOST_BYTES, device, "cpu"))
    for name, size, source, target in copies:
        row = {"table": "copy", "copy": name, "mebibytes": size >> 20}
        result.attempt(row, partial(timed_copy, size, source, target))


def timed_copy(size: int, source: str, target: str) -> TimedRow:
    """Time copies of `size` bytes from device `source`'s memory to `target`'s.

    Host memory beside a GPU is pinned. Within one memory each byte counts twice.
    """
    pinned = "cpu" if source != target else ""
    drawn = torch.randint(
        256, (size,), device=source, dtype=torch.uint8, pin_memory=source == pinned
    )
    copied = torch.empty(size, device=target, dtype=torch.uint8, pin_memory=target == pinned)
    device = "cuda" if "cuda" in (source, target) else "cpu"
    times = kernel_ms(lambda: copied.copy_(drawn, non_blocking=True), device)
    moved = size if pinned else 2 * size
    return TimedRow({"gbps": per_second(times, moved) / 1e9}, times)


def summarize(result: Result) -> None:
    """Add a row of table "summary" for each precision, call and library that was measured."""
    groups: dict[tuple, list[dict]] = {}
    for row in result.rows:
        if row["table"] == "gemm" and "error" not in row:
            groups.setdefault((row["precision"], row["call"], row["library"]), []).append(row)
    for (precision, call, library), rows in groups.items():
        best = max(rows, key=lambda row: row["tflops"])
        result.add(
            {
                "table": "summary",
                "precision": precision,
                "call": call,
                "library": library,
                "shapes": len(rows),
                "average": statistics.mean(row["tflops"] for row in rows),
                "best": best["tflops"],
                "best_percent": best["percent"],
                "best_shape": best["shape"],
            }
        )


def note_roofs(result: Result) -> None:
    """Add note "roofline": bandwidth of a copy within the memory in TB/s, and the GPU's peaks."""
    copies = [row["gbps"] for row in result.rows if row["table"] == "copy" and "gbps" in row]
    if not copies:
        return
    gbps = copies[0]
    bandwidth = [f"copy, measured: {gbps:,.0f} GB/s", gbps / 1e3]
    machine = result.data["machine"]
    peaks = []
    for name, key in (("16 bits", "peak_tflops_16_bits"), ("FP8", "peak_tflops_fp8")):
        if key in machine:
            label = f"{machine['kind']}, dense peak {name}: {machine[key]:,.0f}"
            peaks.append([label, machine[key]])
    result.note("roofline", {"bandwidth": bandwidth, "peaks": peaks})
