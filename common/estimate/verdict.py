"""Say whether a config fits into a GPU's memory, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from common.config import RunConfig
from common.estimate.memory import (
    Memory,
    fewest_layers,
    fits,
    gib,
    memory_peak,
    usable_bytes,
    with_micro_batch,
)
from common.estimate.workload import Workload, benchmark_workload
from common.gpu_kinds import KINDS, GpuKind


def verdict(memory: Memory, kind: GpuKind, ways: Iterable[str]) -> str:
    """Say whether `memory` fits on `kind`, and if it does not, which change makes it fit.

    `ways`: each change that does so, the cheapest first. It is read only if memory is short.
    """
    usable = usable_bytes(kind)
    needed = memory.needed
    sizes = (
        f"{gib(needed):.1f} GiB with context and fragmentation, of {gib(usable):.1f} usable on "
        f"{kind.name}"
    )
    if fits(memory, kind):
        return f"fits: {sizes}; {gib(usable - needed):.1f} left"
    options = " or ".join(ways)
    advice = f"try {options}" if options else "no single change makes it fit"
    return f"does NOT fit: {sizes}; short by {gib(needed - usable):.1f}; {advice}"


def expected_memory(benchmark: str, config: RunConfig) -> str:
    """Return a sentence for a run that ran out of memory, "" for a CPU or an unknown GPU."""
    if not (kind := KINDS.get(config.gpu)):
        return ""
    work = benchmark_workload(benchmark, config)
    memory = memory_peak(config, work)
    return (
        f"plan expects a peak of {gib(memory.allocated):.1f} GiB allocated, in {memory.moment}: it "
        f"{verdict(memory, kind, saving_keys(config, work, kind))}"
    )


def saving_keys(config: RunConfig, work: Workload, kind: GpuKind) -> Iterator[str]:
    """Yield the keys, with values, any of which would make a config fit, in order of cost."""
    smallest = with_micro_batch(config, 1)
    if config.micro_batch_size > 1 and fits(memory_peak(smallest, work), kind):
        yield "micro_batch_size 1"
    for size in (2, 4, 8):
        if size <= config.context_parallel or config.gpus_per_node % size:
            continue
        chunks = work.sequence_length % (2 * size) == 0
        if chunks and fits(memory_peak(replace(config, context_parallel=size), work), kind):
            yield f"context_parallel {size}"
            break
    for key in ("offload_layers", "recompute_layers"):
        if (layers := fewest_layers(config, work, kind, key)) is not None:
            yield f"{key} {layers}"
