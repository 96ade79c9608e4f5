"""Evidence of an out-of-memory error or a hang, which a rank writes next to its record.

Imported only after such a failure (common/training/guard.py). A timed run records no history of
allocations, because that would keep the stack of each. The list of allocated blocks that is written
here needs no history. `profile --memory` records a history outside of a timed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import OutOfMemory, first_line, write_record

ENTRIES = 200  # last entries of the flight recorder to keep: three steps of the 8B, 100 KB
UNITS = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
USE_LESS_MEMORY = (
    "use a smaller micro_batch_size, or recompute_layers, or offload_layers (LoRA), or more GPUs"
)
AVOID_FRAGMENTATION = "set PYTORCH_ALLOC_CONF to expandable_segments:True in [env] of the config"


def out_of_memory(error: torch.OutOfMemoryError, run_dir: Path | None, rank: int) -> OutOfMemory:
    """Return an error with the allocated memory, the memory lost to fragmentation, and what to try.

    Writes ranks/rank_<rank>.memory.txt and .memory.pickle in `run_dir`. The numbers come from the
    message of torch, which describes the moment of the failed allocation. Some of the memory has
    been freed since. The pickle is in torch's format, for pytorch.org/memory_viz. This project does
    not read it.
    """
    text = first_line(error).partition(" If reserved but")[0]
    asked = _gib(r"allocate {}", text)
    allocated = _gib(r"{} is allocated by PyTorch", text)
    fragmented = _gib(r"{} is reserved by PyTorch but", text)
    do = f"{USE_LESS_MEMORY}; profile --memory shows the allocations"
    with contextlib.suppress(Exception):  # a failure here must not hide the first one
        if run_dir and torch.cuda.is_initialized():
            summary = run_dir / "ranks" / f"rank_{rank}.memory.txt"
            summary.write_text(torch.cuda.memory_summary())
            snapshot = summary.with_suffix(".pickle")
            torch.cuda.memory._dump_snapshot(str(snapshot))
            do += f"; open {snapshot.name} at pytorch.org/memory_viz"
    if asked is None or allocated is None or fragmented is None:
        return OutOfMemory("the GPU's memory is full", text, do)
    is_set = any("expandable_segments" in os.environ.get(name, "") for name in SETTINGS)
    # Not on ROCm, where the first copy hung with expandable segments (pytorch#192259).
    if fragmented >= asked and not torch.version.hip and not is_set:
        do = f"{AVOID_FRAGMENTATION}; or {do}"
    reserved = allocated + fragmented  # 0 if the first allocation of the process failed
    share = fragmented / reserved if reserved else 0.0
    why = (
        f"an allocation of {asked:.2f} GiB failed; {allocated:.2f} GiB were allocated; "
        f"{fragmented:.2f} GiB ({share:.1%} of the reserved memory) were lost to fragmentation; "
        f"torch: {text}"
    )
    return OutOfMemory("the GPU's memory is full", why, do)


def _gib(words: str, text: str) -> float | None:
    """Return the size at {} of `words` in torch's message, in GiB, or None if it is not there."""
    match = re.search(words.format(r"([\d.]+) (bytes|[KMG]iB)"), text)
    return float(match[1]) * UNITS[match[2]] if match else None


def write_collectives(stack: Path) -> None:
    """Write ranks/rank_<k>.collectives.json next to `stack`, for launch/flight_recorder.py.

    The file has the last entries of torch's flight recorder. Call it from a thread other than the
    one that hangs. Never raises, because the caller could not handle an exception.
    """
    # There may be no process group yet, no recorder in this torch, or no space on the disk.
    with contextlib.suppress(Exception):
        name = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
        record = json.loads(getattr(torch._C._distributed_c10d, name)())
        record["entries"] = record.get("entries", [])[-ENTRIES:]
        write_record(stack.parent, f"{stack.stem}.collectives.json", json.dumps(record))
