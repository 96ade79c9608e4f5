"""How much fits into a GPU's memory: the largest batch, found by trying, and what counts as a lack of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, by doubling and bisecting; 0 if none does."""
    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def ran_out_of_memory(error: RuntimeError) -> bool:
    """torch's own error, or what a library says that asked the driver itself."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error) or "out of memory" in str(error)


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to, and forget the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Of tensors; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
