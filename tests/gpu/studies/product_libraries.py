"""Time the FP8 products of a layer by torch's cuBLASLt, by another cuBLASLt and by QuACK.

    PYTHONPATH=. python3 tests/gpu/studies/product_libraries.py 8b|70b [LIBRARY]

One GPU of sm_90, with QuACK. LIBRARY: the file libcublasLt.so.13 of another nvidia-cublas.

Each library computes a product with the fastest of its first eight algorithms
(kernels/cublaslt.py), and QuACK with the fastest of TILES. Then all take turns under load. Weights
of the 70B are frozen, so it has no wgrad.

Predicted for an H200 with cuBLAS 13.10.0.20 after 13.1: within 1 %, because no release note names
Hopper. Predicted for the fastest of both for each product: 0.4 % of a step of the 8B, because
QuACK's product of qkv was 5 % faster than cuBLASLt's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from quack.epilogue.frontend import gemm_epilogue
from torch import Tensor

from common.kernels import cublaslt, quack_swiglu
from common.model.shapes import LLAMA2_70B, LLAMA31_8B

TOKENS = 8192
ROUNDS = 3
BLOCK_MS = 300.0  # clocks are those of a step only after some 0.3 s
CHOICE_BLOCK_MS = 75.0
# Rows and columns of a tile, multiprocessors that share a tile's rows and columns, and whether two
# groups of warps take turns between sums and epilogue.
TILES = (
    (128, 192, 2, 1, True),
    (128, 160, 2, 1, True),
    (128, 208, 2, 1, True),
    (256, 208, 2, 1, False),
    (256, 192, 2, 1, False),
    (256, 128, 2, 1, False),
    (128, 256, 2, 1, False),
    (128, 256, 1, 2, False),
)
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


@gemm_epilogue()
def scaled(acc, scale_a, scale_b):
    return {"D": acc * (scale_a * scale_b)}


class Library:
    """A cuBLASLt, with the state that kernels/cublaslt.py keeps for it."""

    def __init__(self, library: ctypes.CDLL):
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = library.cublasLtGetVersion()
        self.state = {"library": lambda: library, "PRODUCTS": {}, "kept_choices": dict}
        self.state |= {"keep_choice": lambda name, offer: None}
        with mock.patch.multiple(cublaslt, **self.state):
            handle = cublaslt.created("cublasLtCreate")
        self.state["handle"] = lambda: handle

    def product(self, a: Tensor, b: Tensor, one: Tensor) -> Tensor:
        with mock.patch.multiple(cublaslt, **self.state):
            return cublaslt.product(a, b, one, one)


def loaded(path: Path) -> ctypes.CDLL:
    """Load a second cuBLASLt, which must find its own functions before torch's."""
    return ctypes.CDLL(str(path.resolve()), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)


def by_quack(tile: tuple, a: Tensor, b: Tensor, one: Tensor) -> Tensor:
    """Return the product a b, bf16."""
    from common.kernels.quack_epilogues import ATTRIBUTES

    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    tile_rows, tile_columns, cluster_rows, cluster_columns, pingpong = tile
    scaled.gemm(
        a,
        b.t(),
        out,
        epi_args={"scale_a": one, "scale_b": one},
        tile_M=tile_rows,
        tile_N=tile_columns,
        cluster_M=cluster_rows,
        cluster_N=cluster_columns,
        pingpong=pingpong,
        post_init_attrs=ATTRIBUTES if pingpong else ATTRIBUTES[:1] + ATTRIBUTES[3:],
    )
    return out


def draw(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).to(dtype)


def factors(weight: tuple[int, int], product: str) -> tuple[Tensor, Tensor]:
    """Return the factors of a product, in the layouts of kernels/fp8.py."""
    rows, columns = weight
    if product == "fprop":
        return draw(TOKENS, columns, E4M3), draw(rows, columns, E4M3).t()
    if product == "dgrad":
        return draw(TOKENS, rows, E5M2), draw(columns, rows, E4M3).t()
    return draw(rows, TOKENS, E5M2), draw(columns, TOKENS, E4M3).t()


def block(work: Callable, count: int) -> float:
    """Return the mean microseconds of `count` launches in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / count


def in_turns(works: dict[str, Callable], block_ms: float, rounds: int) -> dict[str, float]:
    """Return the median microseconds of each work. Blocks take turns after an untimed round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(1 + rounds):
        for name, work in works.items():
            count = 3 if number == 0 else max(3, int(1e3 * block_ms / times[name][0]))
            times[name].append(block(work, count))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def fastest_by_quack(a: Tensor, b: Tensor, one: Tensor, expected: Tensor) -> tuple[str, Callable]:
    """Return the fastest of TILES whose result equals `expected`, and how it was chosen."""
    works = {}
    for tile in TILES:
        work = partial(by_quack, tile, a, b, one)
        try:
            equal = torch.equal(work(), expected)
            works[f"{tile}, equal bits: {equal}"] = work
        except Exception as error:
            print(f"  {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    times = in_turns(works, CHOICE_BLOCK_MS, 2)
    name = min(times, key=times.__getitem__)
    return name, works[name]


def measure(
    name: str, weight: tuple[int, int], product: str, libraries: dict[str, Library]
) -> dict[str, float]:
    """Print and return the microseconds of one product by each library."""
    a, b = factors(weight, product)
    one = torch.ones(4, device="cuda")[:1]
    works = {which: partial(each.product, a, b, one) for which, each in libraries.items()}
    expected = works["torch's"]()
    equal = [torch.equal(work(), expected) for work in works.values()]
    tile, works["QuACK"] = fastest_by_quack(a, b, one, expected)
    us = in_turns(works, BLOCK_MS, ROUNDS)
    tflops = 2e-6 * a.shape[0] * a.shape[1] * b.shape[1] / us["torch's"]
    others = ", ".join(f"{which} {each:8.1f}" for which, each in us.items())
    print(
        f"{name:8} {product:6} {others} µs, {tflops:6.0f} TFLOP/s; equal bits of libraries: "
        f"{equal}; QuACK {tile}",
        flush=True,
    )
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("8b", "70b"))
    parser.add_argument("library", type=Path, nargs="?", metavar="LIBRARY")
    arguments = parser.parse_args()
    shape = LLAMA31_8B if arguments.model == "8b" else LLAMA2_70B
    quack_swiglu.require()
    torch.ones(16, 16, device="cuda", dtype=torch.bfloat16).mm(torch.ones(16, 16).cuda().bfloat16())
    libraries = {"torch's": Library(cublaslt.library())}
    if arguments.library:
        libraries["other"] = Library(loaded(arguments.library))
        assert libraries["other"].version != libraries["torch's"].version
    versions = {which: each.version for which, each in libraries.items()}
    print(f"{torch.cuda.get_device_name()}: cuBLASLt {versions}", flush=True)
    weights = {
        "qkv": (shape.qkv_size, shape.hidden_size),
        "o": (shape.hidden_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.ffn_hidden_size),
        "gate_up": (2 * shape.ffn_hidden_size, shape.hidden_size),
    }
    rows = []
    for name, weight in weights.items():
        for product in ("fprop", "dgrad", "wgrad") if shape is LLAMA31_8B else ("fprop", "dgrad"):
            try:
                rows.append(measure(name, weight, product, libraries))
            except Exception:
                traceback.print_exc()
    for which in rows[0]:
        print(f"{which:8} {len(rows)} products: {sum(row[which] for row in rows):.1f} µs")
    print(f"the fastest of each: {sum(min(row.values()) for row in rows):.1f} µs")


if __name__ == "__main__":
    main()
