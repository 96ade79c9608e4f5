"""The memory of a GPU as torch counts it, and what counts as a lack of it."""

from __future__ import annotations

import gc

import torch


def ran_out_of_memory(error: Exception) -> bool:
    """torch's own error, or what a library says that asked the driver itself."""
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "ALLOC_FAILED" in str(error)
        or "out of memory" in str(error)
    )


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to, and forget the peak."""
    # What a failed backward left to do refers to its graph, and so to the model, until torch runs the next backward.
    torch.zeros((), device=device, requires_grad=True).backward()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Of tensors; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
