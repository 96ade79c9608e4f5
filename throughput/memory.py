"""Memory of a GPU (as torch counts it) and of the host, and out-of-memory errors."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from common.errors import OutOfMemory
from common.gpu_kinds import GIB
from common.machine.host import available_memory

OUT_OF_MEMORY = "out of memory"  # error of a row


def ran_out_of_memory(error: Exception) -> bool:
    """Return whether `error` is an out-of-memory error, of torch, of a library or of a rank.

    The errors of libraries that allocate memory from the driver are recognized by their messages.
    """
    return (
        isinstance(error, torch.OutOfMemoryError)
        or getattr(error, "kind", "") == OutOfMemory.kind
        or "ALLOC_FAILED" in str(error)
        or OUT_OF_MEMORY in str(error)
    )


def free_memory(device: torch.device) -> None:
    """Release all unreferenced memory and reset the peak."""
    # After a failed backward, the autograd engine refers to the graph, and so to the model, until
    # the next backward runs.
    torch.zeros((), device=device, requires_grad=True).backward()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def require_host_memory(what: str, needed: float) -> None:
    """Raise OutOfMemory if `what`, measured on the CPU, needs more bytes than are available.

    Without this check, Linux would kill a process of this machine, not necessarily this one.
    """
    available = available_memory(Path("/"))
    if needed > available:
        raise OutOfMemory(
            f"{what} does not fit in the memory of this host",
            f"it needs about {needed / GIB:.0f} GiB, and {available / GIB:.0f} GiB are available",
            "choose a smaller model, fewer layers or a smaller batch, or measure on a GPU",
        )
