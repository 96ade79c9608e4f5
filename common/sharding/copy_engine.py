"""Reduce-scatter and gather by the GPUs' copy engines, as an alternative to NCCL
(reduce_scatter.py).

An NCCL kernel occupies multiprocessors for as long as it sends. On Hopper, cuBLAS's kernels use one
block per multiprocessor and wait for the blocks that found none free: 45 ms of a step of 2,148 ms
(8B in FP8 on two H200, docs/log.md).

Copy engines need no multiprocessor. Each rank copies its peers' rows into a buffer of theirs. A
kernel there adds the received rows to the rank's own rows in fp32, while NCCL rounds to bf16 at
every hop of its ring. Weights are in memory that the peers can read: each rank copies the rows of
the others from there to its own memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from common.sharding.reduce_scatter import Accumulate, Shard, pad_rows
from common.sharding.symmetric_memory import SymmetricBuffers, ring_order


class CopyEngineReduceScatter:
    """Copies gradients into buffers of the node's other ranks.

    The gradients received for a module are summed when the next module starts, or at `finish`. A
    barrier comes first. After it, all ranks have sent this module and consumed the previous one, so
    the second buffer is free. The barrier costs no waiting, because every rank sent its rows a
    whole module's backward ago.
    """

    def __init__(
        self,
        make: Callable[[int, int], SymmetricBuffers],
        modules: Sequence[Sequence[Shard]],
        dtype: torch.dtype,
        accumulate: Accumulate,
    ):
        """Move the weights of `modules` to memory that all ranks can read. Their values become
        undefined.

        `make`: creates buffers from the number of buffers and the bytes of each.
        """
        shards = list(itertools.chain(*modules))
        self.dtype = dtype
        self.accumulate = accumulate
        self.weights = make(1, sum(_aligned(shard.padded.nbytes) for shard in shards))
        self.buffers = make(
            2, max(self.num_bytes(module, self.weights.ranks, dtype) for module in modules)
        )
        # each weight's rows on every rank, in the memory of that rank
        self.rows: dict[nn.Parameter, list[Tensor]] = {}
        offset = 0
        for shard in shards:
            place = slice(offset, offset + shard.padded.nbytes)
            wholes = [
                self.weights.buffers[peer][0, place].view(shard.padded.dtype).view_as(shard.padded)
                for peer in range(self.weights.ranks)
            ]
            self.rows[shard.parameter] = [
                whole.chunk(self.weights.ranks)[peer] for peer, whole in enumerate(wholes)
            ]
            shard.padded = wholes[self.weights.rank]
            shard.local = self.rows[shard.parameter][self.weights.rank]
            shard.parameter.data = shard.padded[: len(shard.parameter)]
            offset += _aligned(shard.padded.nbytes)
        self.phase = 0  # index of the buffer in use
        # shards, gradients as sent, gradients as passed to `start`
        self.sent: tuple[Sequence[Shard], list[Tensor], list[Tensor]] | None = None

    @staticmethod
    def num_bytes(shards: Sequence[Shard], ranks: int, dtype: torch.dtype) -> int:
        """Return the size of a buffer for these shards of one module."""
        return sum(_received_bytes(shard, ranks, dtype) for shard in shards)

    def gather(self, shards: Sequence[Shard]) -> None:
        self.weights.barrier()  # all ranks have written their rows
        for peer in ring_order(self.weights.rank, self.weights.ranks):
            for shard in shards:
                shard.padded.chunk(self.weights.ranks)[peer].copy_(self.rows[shard.parameter][peer])

    def start(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        finished = self.finish()
        ranks = self.buffers.ranks
        rank = self.buffers.rank
        padded = [
            pad_rows(g, len(s.master) * ranks).to(self.dtype)
            for s, g in zip(shards, gradients, strict=True)
        ]
        for peer in ring_order(rank, ranks):
            for gradient, received in zip(padded, self._received_by(peer, shards), strict=True):
                # A rank's buffer has no slot for its own rows.
                received[rank - (rank > peer)].copy_(gradient.chunk(ranks)[peer])
        self.sent = shards, padded, gradients
        return finished

    def finish(self) -> list[Tensor]:
        if self.sent is None:
            return []
        shards, padded, gradients = self.sent
        self.sent = None
        self.buffers.barrier()
        rank = self.buffers.rank
        for shard, gradient, received in zip(
            shards, padded, self._received_by(rank, shards), strict=True
        ):
            shard.gradient = self.accumulate(
                shard.gradient, gradient.chunk(self.buffers.ranks)[rank], received
            )
        self.phase = 1 - self.phase
        return gradients

    def _received_by(self, rank: int, shards: Sequence[Shard]) -> Iterator[Tensor]:
        """Yield the buffers from which `rank` receives: for each shard [ranks - 1, rows, ...]."""
        buffer = self.buffers.buffers[rank][self.phase]
        offset = 0
        for shard in shards:
            shape = (self.buffers.ranks - 1, *shard.master.shape)
            yield (
                buffer[offset : offset + math.prod(shape) * self.dtype.itemsize]
                .view(self.dtype)
                .view(shape)
            )
            offset += _received_bytes(shard, self.buffers.ranks, self.dtype)


def _received_bytes(shard: Shard, ranks: int, dtype: torch.dtype) -> int:
    return _aligned((ranks - 1) * shard.master.numel() * dtype.itemsize)


def _aligned(num_bytes: int) -> int:
    """Round up to a multiple of 512, as torch's allocator does."""
    return -(-num_bytes // 512) * 512
