"""Memory: that of a GPU as torch counts it, that of the host, and out-of-memory errors."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from common.errors import OutOfMemory
from common.gpu_kinds import GIB
from launch.preflight.host import available_memory


def ran_out_of_memory(error: Exception) -> bool:
    """Return whether `error` is torch's own out-of-memory error or that of a library.

    Libraries that ask the driver for memory themselves are recognized by their messages.
    """
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "ALLOC_FAILED" in str(error)
        or "out of memory" in str(error)
    )


def free_memory(device: torch.device) -> None:
    """Release all unreferenced memory and reset the peak."""
    # A failed backward leaves work that refers to its graph, and so to the model, until torch runs
    # the next backward.
    torch.zeros((), device=device, requires_grad=True).backward()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors in bytes, 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def require_host_memory(what: str, needed: float) -> None:
    """Raise OutOfMemory if `what`, measured on the CPU, needs more bytes than the host can give.

    Without this check, Linux would end some process of the machine when its memory is full.
    """
    available = available_memory(Path("/"))
    if needed > available:
        raise OutOfMemory(
            f"{what} does not fit in the memory of this host",
            f"it needs about {needed / GIB:.0f} GiB, and {available / GIB:.0f} GiB are available",
            "choose a smaller model, fewer layers or a smaller batch, or measure on a GPU",
        )
