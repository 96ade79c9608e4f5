"""What a rank leaves beside its record when a GPU's memory was full, or when it hangs. Imported then only (common/training/guard.py).

A run records no history of its allocations: it would keep every stack, and `profile --memory` does that where no clock runs. What is written
here needs none: the blocks that the allocator holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import OutOfMemory, write_record

ENTRIES = 200  # of the flight recorder's 2,000 the last ones: three steps of the 8B, 100 KB
UNITS = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SMALLER = (
    "use a smaller micro_batch_size, or recompute_layers, or offload_layers (LoRA), or more GPUs"
)
GAPS = "set PYTORCH_ALLOC_CONF to expandable_segments:True in [env] of the config"


def out_of_memory(error: torch.OutOfMemoryError, run_dir: Path | None, rank: int) -> OutOfMemory:
    """The peak, what lies in gaps, and what to try. Leaves ranks/rank_<rank>.memory.txt and .memory.pickle in `run_dir`.

    The numbers are those of torch's message, of the moment when the allocation failed: later some of it is free again. The pickle is torch's
    own format, which pytorch.org/memory_viz opens; nothing here reads it.
    """
    text = str(error).splitlines()[0].partition(" If reserved but")[0]
    asked, allocated, gaps = (
        _gib(words, text)
        for words in (
            r"allocate {}",
            r"{} is allocated by PyTorch",
            r"{} is reserved by PyTorch but",
        )
    )
    do = f"{SMALLER}; profile --memory shows what holds it"
    with contextlib.suppress(Exception):  # the first failure counts
        if run_dir and torch.cuda.is_initialized():
            place = run_dir / "ranks" / f"rank_{rank}.memory"
            place.with_suffix(".memory.txt").write_text(torch.cuda.memory_summary())
            torch.cuda.memory._dump_snapshot(str(place.with_suffix(".memory.pickle")))
            do += f", {place.name}.pickle at pytorch.org/memory_viz what the allocator held"
    if asked is None or allocated is None or gaps is None:
        return OutOfMemory("the GPU's memory is full", text, do)
    # expandable_segments is not advised on ROCm: a first copy hung with it (pytorch#192259).
    if (
        gaps >= asked
        and not torch.version.hip
        and not any("expandable_segments" in os.environ.get(name, "") for name in SETTINGS)
    ):
        do = f"{GAPS}; or {do}"
    share = gaps / (allocated + gaps)
    why = f"{asked:.2f} GiB more were needed at {allocated:.2f} GiB allocated; {gaps:.2f} GiB ({share:.1%} of the reserved) lie in gaps. torch: {text}"
    return OutOfMemory("the GPU's memory is full", why, do)


def _gib(words: str, text: str) -> float | None:
    found = re.search(words.format(r"([\d.]+) (bytes|[KMG]iB)"), text)
    return float(found[1]) * UNITS[found[2]] if found else None


def write_collectives(stack: Path) -> None:
    """ranks/rank_<k>.collectives.json beside `stack`: the last entries of torch's flight recorder, for launch/flight_recorder.py.

    To be called by another thread than the one that hangs. Does not raise: there is no one to tell.
    """
    with contextlib.suppress(
        Exception
    ):  # no process group yet, a torch without the recorder, a full disk
        name = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
        record = json.loads(getattr(torch._C._distributed_c10d, name)())
        record["entries"] = record.get("entries", [])[-ENTRIES:]
        write_record(stack.parent, f"{stack.stem}.collectives.json", json.dumps(record))
