"""Which software this package really ran on, and how what is installed compares. Standard library only.

A line here means: trained and tested by us with exactly these. Nothing was ever run on ROCm, so nothing on ROCm is tried.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass

from preflight.rows import Row, graded, skipped

OLDEST_TORCH = (2, 9)  # as launch/environment.py wants it


@dataclass(frozen=True)
class Stack:
    python: str  # major.minor
    torch: str  # without its local part
    backend: str  # "CUDA 13.0", "ROCm 7.2", "CPU"
    triton: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch or 'missing'}, {self.backend}, triton {self.triton or 'missing'}"


TESTED = {
    Stack("3.12", "2.11.0", "CUDA 13.0", "3.6.0"): "1, 2 and 4 x H200",
    Stack("3.11", "2.13.0", "CPU", "3.7.1"): "the miniatures, 2 cores",
}
UNKNOWN = "built for ?"
TESTED_DRIVERS = {"nvidia": "580"}  # branch; CUDA 13.0 asks for it or newer


def installed(cuda: str | None, hip: str | None) -> Stack:
    """`cuda` and `hip` are torch.version's of a process that imported torch; None where none could."""
    backend = f"CUDA {cuda}" if cuda else f"ROCm {'.'.join(hip.split('.')[:2])}" if hip else UNKNOWN if cuda is None else "CPU"
    torch = _version("torch").partition("+")[0]
    return Stack(".".join(platform.python_version_tuple()[:2]), torch, backend, _version("triton", "pytorch-triton-rocm").partition("+")[0])


def _version(*names: str) -> str:
    """Of the first of these packages that is there; "" if none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def judge_software(stack: Stack) -> Row:
    oldest = ".".join(map(str, OLDEST_TORCH))
    if tuple(int(part) for part in re.findall(r"\d+", stack.torch)[:2]) < OLDEST_TORCH:
        return Row("software", "refuse", str(stack), f"torch >= {oldest}", f"install torch {oldest} or newer")
    if stack.backend == UNKNOWN:
        return skipped("software", f"{stack}: no process came so far as to say what torch is built for")
    near = next((tested for tested in TESTED if tested.backend.split()[0] == stack.backend.split()[0]), None)
    wanted = f"{near}: {TESTED[near]}" if near else f"nothing on {stack.backend} was ever run by us"
    do = "untried by us: run the tests (./run_tests.sh) before you trust it"
    return graded("software", str(stack), wanted, do, warn=stack not in TESTED)


def judge_driver(vendor: str, driver: str) -> Row:
    if vendor == "none":
        return skipped("driver", "no GPU is used")
    tested = TESTED_DRIVERS.get(vendor)
    wanted = f"{tested}.x, as tested" if tested else "none was ever tried by us"
    untried = tested is None or driver.split(".")[0] != tested
    return graded("driver", driver or "the driver does not say", wanted, "untried: look at the other rows twice", warn=untried)
