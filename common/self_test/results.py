"""Checks and results of the self-test, and the error of an op in dB."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 24  # elements compared at a time


class Check(NamedTuple):
    """One op at one shape, and the function that measures its error."""

    op: str
    shape: str
    least: float  # minimum dB of a correct result
    measure: Callable[[], float]  # returns dB, NaN if a value is not finite


@dataclass
class OpResult:
    """Result of one op at one shape."""

    op: str
    shape: str
    db: float = math.nan  # the smallest of its results; NaN if one is not finite
    least: float = 0.0  # minimum dB
    error: str = ""  # message of an exception

    @property
    def good(self) -> bool:
        """Whether the op computed correctly."""
        return not self.error and self.db >= self.least

    def __str__(self) -> str:
        value = "not finite" if math.isnan(self.db) else f"{self.db:.1f} dB"
        return f"{self.op} {self.shape}: {self.error or value} (minimum {self.least:g} dB)"


@dataclass(frozen=True)
class EngineChoice:
    """The engine that a self-test chose for an operation, and why."""

    engine: str  # its name
    why: str
    # Engine -> ms of one layer on the slowest rank, in each measurement. Empty if none was timed.
    ms: dict[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        means = [f"{name} {statistics.fmean(times):.3f}" for name, times in self.ms.items()]
        times = f" (ms per layer: {', '.join(means)})" if means else ""
        return f"{self.engine}: {self.why}{times}"


@dataclass
class SelfTestResult:
    """The engines that a self-test chose, and the results of its ops."""

    attention: str = ""  # attention backend
    products: str = ""  # engine of matrix products
    swiglu: str = ""  # engine of SwiGLU; "" for a config that has no choice
    missing: list[str] = field(default_factory=list)  # why faster engines are not used
    engines: dict[str, EngineChoice] = field(default_factory=dict)  # by operation
    notes: list[str] = field(default_factory=list)  # problems of the times that are kept
    seconds: float = 0.0
    results: list[OpResult] = field(default_factory=list)

    @property
    def bad(self) -> list[OpResult]:
        """Results of ops that failed."""
        return [result for result in self.results if not result.good]

    def engine_lines(self) -> list[str]:
        """Return lines for the screen: the engines that were chosen by their times, and notes."""
        lines = [f"NOTE       {note}" for note in self.notes]
        for operation, choice in self.engines.items():
            if choice.ms:
                lines.append(f"engines    {operation} by {choice}")
        return lines

    @property
    def worst(self) -> OpResult:
        """The result with the smallest margin above its minimum."""

        def margin(result: OpResult) -> float:
            return result.db - result.least if result.good else -math.inf

        return min(self.results, key=margin)


def decibels(truth: Tensor, value: Tensor) -> float:
    """Return the signal-to-noise ratio in dB: inf if equal, NaN if a value is not finite."""
    signal = 0.0
    noise = 0.0
    truth_parts = truth.detach().flatten().split(CHUNK)
    value_parts = value.detach().flatten().split(CHUNK)
    for a, b in zip(truth_parts, value_parts, strict=True):
        signal += float(a.double().square().sum())
        noise += float((a.double() - b.double()).square().sum())
    if not math.isfinite(noise) or not math.isfinite(signal):
        return math.nan
    if not noise:
        return math.inf
    if not signal:
        return -math.inf
    return 10 * math.log10(signal / noise)


def all_finite(x: Tensor) -> bool:
    """Return whether every value of `x` is finite."""
    # aminmax returns NaN if any value is NaN, and unlike isfinite needs no memory.
    return all(math.isfinite(float(end)) for end in torch.aminmax(x.detach()))


@contextlib.contextmanager
def freed_memory(device: torch.device) -> Iterator[None]:
    """Free the memory that the block has used on a GPU, when it ends."""
    try:
        yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
