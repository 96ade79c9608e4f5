"""Time the twelve FP8 products of an 8B layer by torch's cuBLASLt and by another. One GPU of sm_90.

    PYTHONPATH=.:tests/gpu/studies python3 tests/gpu/studies/cublas_versions.py LIBRARY

LIBRARY: the file libcublasLt.so.13 of another nvidia-cublas. Both libraries are in one process and
take turns, each with the fastest of its first eight algorithms (kernels/cublaslt.py). Choices are
made anew, in shorter blocks than in a start.

Predicted for 13.10.0.20 after 13.1: within 1 % (16.4 ms for both directions of a layer and
sequence), because no release note names Hopper.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from transposed_quantize import in_turns

from common.kernels import cublaslt
from common.model.shapes import LLAMA31_8B

TOKENS = 8192
HIDDEN = LLAMA31_8B.hidden_size
FFN = LLAMA31_8B.ffn_hidden_size
# Rows and columns of each weight.
WEIGHTS = {
    "qkv": (LLAMA31_8B.qkv_size, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
BLOCK_MS = 40.0  # of the choice
ROUNDS = 1
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


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


def draw(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).to(dtype)


def factors(name: str, product: str) -> tuple[Tensor, Tensor]:
    """Return the factors of a product, in the layouts of kernels/fp8.py."""
    rows, columns = WEIGHTS[name]
    if product == "fprop":
        return draw(TOKENS, columns, E4M3), draw(rows, columns, E4M3).t()
    if product == "dgrad":
        return draw(TOKENS, rows, E5M2), draw(columns, rows, E4M3).t()
    return draw(rows, TOKENS, E5M2), draw(columns, TOKENS, E4M3).t()


def measure(name: str, product: str, old: Library, new: Library) -> tuple[float, float]:
    """Print and return the microseconds of one product by both libraries."""
    a, b = factors(name, product)
    one = torch.ones(4, device="cuda")[:1]
    equal = torch.equal(old.product(a, b, one), new.product(a, b, one))
    works = {"old": partial(old.product, a, b, one), "new": partial(new.product, a, b, one)}
    us = in_turns(works, 1, graphs=False)
    tflops = [2e-6 * a.shape[0] * a.shape[1] * b.shape[1] / us[which] for which in works]
    print(
        f"{name:8} {product:6} {us['old']:8.1f} {us['new']:8.1f} µs, {tflops[0]:6.0f} "
        f"{tflops[1]:6.0f} TFLOP/s, {us['new'] / us['old'] - 1:+7.2%}, equal bits: {equal}",
        flush=True,
    )
    return us["old"], us["new"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, metavar="LIBRARY", help="another libcublasLt.so.13")
    path = parser.parse_args().library
    torch.ones(16, 16, device="cuda", dtype=torch.bfloat16).mm(torch.ones(16, 16).cuda().bfloat16())
    cublaslt.BLOCK_MS = BLOCK_MS
    cublaslt.ROUNDS = ROUNDS
    old = Library(cublaslt.library())
    new = Library(loaded(path))
    print(f"{torch.cuda.get_device_name()}: cuBLASLt {old.version} and {new.version}", flush=True)
    assert old.version != new.version
    totals = []
    for name in WEIGHTS:
        for product in ("fprop", "dgrad", "wgrad"):
            try:
                totals.append(measure(name, product, old, new))
            except Exception:
                traceback.print_exc()
    of_old, of_new = (sum(times) for times in zip(*totals, strict=True))
    print(f"{len(totals)} products: {of_old:.1f} {of_new:.1f} µs, {of_new / of_old - 1:+.2%}")


if __name__ == "__main__":
    main()
