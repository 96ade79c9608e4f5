"""Reduce-scatter of gradients and gather of weights, by NCCL or RCCL (gloo on a CPU).

`ReduceScatter` is the interface that zero.py uses. copy_engine.py has another implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

Accumulate = Callable[..., Tensor]  # an engine of kernels/accumulate.py


@dataclass
class Shard:
    """One weight and this rank's shard of it."""

    parameter: nn.Parameter  # [rows, ...], whole, in the compute precision
    padded: Tensor  # memory of the parameter, with rows padded to a multiple of the ranks
    local: Tensor  # this rank's rows of `padded`
    master: Tensor  # fp32, shaped like `local`
    # fp32, shaped like `local`: the mean over the ranks, summed over the step's micro-batches
    gradient: Tensor | None = None
    filled: bool = False  # whether the master has its initial value


class ReduceScatter(Protocol):
    """Reduce-scatter and gather of the shards of a module.

    All ranks call these methods for the modules in the same order, on one stream. `start` and
    `finish` return gradients that must stay alive until the stream has finished the work enqueued
    so far.
    """

    def gather(self, shards: Sequence[Shard]) -> None:
        """Send each rank's new rows, which are in its own `padded`, to the other ranks.

        A rank may change its rows again only after another collective of all ranks.
        """

    def start(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        """Start to reduce `gradients`.

        `gradients`: one whole, contiguous gradient per shard, of at most rows x ranks rows.
        """

    def finish(self) -> list[Tensor]:
        """Finish: add everything that was started to `shard.gradient`."""


class NcclReduceScatter:
    """Reduce-scatter by NCCL or RCCL, or gloo on a CPU. `start` does the whole work."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        dtype: torch.dtype,
        accumulate: Accumulate,
    ):
        """Set the groups and functions.

        `group`: the ranks over which weights are sharded.
        `replicas`: on several nodes, the ranks that hold the same shard; else None.
        `dtype`: dtype of the sent values.
        `accumulate`: adds a mean to an fp32 gradient.
        """
        self.group = group
        self.replicas = replicas
        self.dtype = dtype
        self.accumulate = accumulate

    def gather(self, shards: Sequence[Shard]) -> None:
        with coalesced(self.group):
            for shard in shards:
                dist.all_gather_into_tensor(shard.padded, shard.local, group=self.group)

    def start(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        for shard, mean in zip(shards, self._means(shards, gradients), strict=True):
            shard.gradient = self.accumulate(shard.gradient, mean)
        return gradients

    def finish(self) -> list[Tensor]:
        return []

    def _means(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        """Return the means of the gradients over all ranks, each only this rank's rows."""
        ranks = self.group.size()
        if ranks == 1 and self.replicas is None:
            return gradients
        op = dist.ReduceOp.AVG if gradients[0].is_cuda else dist.ReduceOp.SUM  # gloo has no AVG
        means = [torch.empty_like(shard.master, dtype=self.dtype) for shard in shards]
        with coalesced(self.group):
            for gradient, mean in zip(gradients, means, strict=True):
                padded = pad_rows(gradient, len(mean) * ranks)
                dist.reduce_scatter_tensor(mean, padded.to(self.dtype), op, group=self.group)
        if self.replicas is not None:
            with coalesced(self.replicas):
                for mean in means:
                    dist.all_reduce(mean, op, group=self.replicas)
        if op == dist.ReduceOp.SUM:
            replicas = self.replicas.size() if self.replicas is not None else 1
            torch._foreach_div_(means, ranks * replicas)
        return means


def pad_rows(gradient: Tensor, rows: int) -> Tensor:
    """Return `gradient` padded with rows of zeros to `rows` rows."""
    added = rows - len(gradient)
    if added == 0:
        return gradient
    return torch.cat([gradient, gradient.new_zeros(added, *gradient.shape[1:])])


def coalesced(group: dist.ProcessGroup) -> AbstractContextManager:
    """Combine all collectives of one kind inside the block into one launch.

    Each launch waits for free multiprocessors and then for the other rank. Six launches per module
    occupied multiprocessors for 452 ms of a step, one launch for 225 ms (8B on two H200).
    """
    return dist._coalescing_manager(group)
