"""Reduce-scatter and gather by the copy engines of the GPUs, instead of NCCL (reduce_scatter.py).

An NCCL kernel occupies multiprocessors for as long as it sends. On Hopper, cuBLAS's kernels use one
thread block per multiprocessor, so some of their blocks must then wait. This took 45 ms of a step
of 2,148 ms (8B in FP8 on two H200). With fewer blocks, an NCCL kernel occupies its multiprocessors
for longer: NCCL_MAX_CTAS=8 took 2,112 ms instead of 2,106.

Copy engines need no multiprocessor. Each rank copies the gradient rows that belong to a peer into a
buffer of that peer. A kernel there adds the received rows to the peer's own rows in fp32, while
NCCL rounds to bf16 at every hop of its ring. Weights are in memory that all ranks of the node can
read, so each rank copies the rows of the others from there. Only these sums remain: 31 ms of a step
in which nothing else runs.
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
    """A `ReduceScatter` that copies gradients into buffers of the node's other ranks.

    The gradients received for a module are added when the next module starts, or by `finish`, after
    a barrier. At the barrier, all ranks have sent the gradients of this module and added the
    previous module's. So the other of the two buffers is free. No rank waits at the barrier,
    because every rank sent its rows a whole module's backward ago.
    """

    def __init__(
        self,
        make_buffers: Callable[[int, int], SymmetricBuffers],
        modules: Sequence[Sequence[Shard]],
        dtype: torch.dtype,
        accumulate: Accumulate,
    ):
        """Move the weights of `modules` to memory that all ranks can read.

        Their values become undefined.

        `make_buffers`: creates buffers from their number and the bytes of each.
        `dtype`: dtype of the sent gradients.
        `accumulate`: adds gradients to an fp32 gradient.
        """
        shards = list(itertools.chain(*modules))
        self.dtype = dtype
        self.accumulate = accumulate
        self.weights = make_buffers(1, sum(_aligned(shard.padded.nbytes) for shard in shards))
        ranks = self.weights.ranks
        largest = max(self.num_bytes(module, ranks, dtype) for module in modules)
        self.received = make_buffers(2, largest)
        # weight -> for each rank, its rows in its own memory
        self.rows: dict[nn.Parameter, list[Tensor]] = {}
        offset = 0
        for shard in shards:
            place = slice(offset, offset + shard.padded.nbytes)
            self.rows[shard.parameter] = []
            for peer in range(ranks):
                whole = self.weights.buffers[peer][0, place]
                whole = whole.view(shard.padded.dtype).view_as(shard.padded)
                self.rows[shard.parameter].append(whole.chunk(ranks)[peer])
                if peer == self.weights.rank:
                    own = whole
            shard.padded = own
            shard.local = self.rows[shard.parameter][self.weights.rank]
            shard.parameter.data = shard.padded[: len(shard.parameter)]
            offset += _aligned(shard.padded.nbytes)
        self.receiving = 0  # index of the receive buffer in use
        # (shards, gradients as sent, gradients as passed to `start`) of the last module
        self.sent: tuple[Sequence[Shard], list[Tensor], list[Tensor]] | None = None

    @staticmethod
    def num_bytes(shards: Sequence[Shard], ranks: int, dtype: torch.dtype) -> int:
        """Return the size in bytes of a receive buffer for the shards of one module."""
        return sum(_received_bytes(shard, ranks, dtype) for shard in shards)

    def gather(self, shards: Sequence[Shard]) -> None:
        self.weights.barrier()  # all ranks have written their rows
        ranks = self.weights.ranks
        for peer in ring_order(self.weights.rank, ranks):
            for shard in shards:
                shard.padded.chunk(ranks)[peer].copy_(self.rows[shard.parameter][peer])

    def start(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        finished = self.finish()
        ranks = self.received.ranks
        rank = self.received.rank
        padded = []
        for shard, gradient in zip(shards, gradients, strict=True):
            padded.append(pad_rows(gradient, len(shard.master) * ranks).to(self.dtype))
        for peer in ring_order(rank, ranks):
            # A buffer has no slot for the rows of its own rank.
            slot = rank - 1 if rank > peer else rank
            for gradient, received in zip(padded, self._received_by(peer, shards), strict=True):
                received[slot].copy_(gradient.chunk(ranks)[peer])
        self.sent = shards, padded, gradients
        return finished

    def finish(self) -> list[Tensor]:
        if self.sent is None:
            return []
        shards, padded, gradients = self.sent
        self.sent = None
        self.received.barrier()
        rank = self.received.rank
        all_received = self._received_by(rank, shards)
        for shard, gradient, received in zip(shards, padded, all_received, strict=True):
            own = gradient.chunk(self.received.ranks)[rank]
            shard.gradient = self.accumulate(shard.gradient, own, received)
        self.receiving = 1 - self.receiving
        return gradients

    def _received_by(self, rank: int, shards: Sequence[Shard]) -> Iterator[Tensor]:
        """Yield the receive buffer of `rank` for each shard, [ranks - 1, rows, ...], as a view."""
        buffer = self.received.buffers[rank][self.receiving]
        offset = 0
        for shard in shards:
            shape = (self.received.ranks - 1, *shard.master.shape)
            end = offset + math.prod(shape) * self.dtype.itemsize
            yield buffer[offset:end].view(self.dtype).view(shape)
            offset += _received_bytes(shard, self.received.ranks, self.dtype)


def _received_bytes(shard: Shard, ranks: int, dtype: torch.dtype) -> int:
    return _aligned((ranks - 1) * shard.master.numel() * dtype.itemsize)


def _aligned(num_bytes: int) -> int:
    """Round up to a multiple of 512, as torch's allocator does."""
    return -(-num_bytes // 512) * 512
