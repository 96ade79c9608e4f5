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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.sharding.reduce_scatter import Accumulate, Shard, pad_rows
from common.sharding.symmetric_memory import SymmetricBuffers, ring_order


class CopyEngineReduceScatter:
    """A `ReduceScatter` that copies gradients into buffers of the node's other ranks.

    The gradients received for a module are added when the next module starts, or by `finish`, after
    a barrier. At the barrier, all ranks have sent the gradients of this module and added the
    previous module's. So the other of the two buffers is free.

    A faster rank waits at the barrier for the slower ones. Its kernel then holds a multiprocessor,
    and the product beside it ends later. Signals without a kernel, for the copies alone, made that
    product 20 % faster, but a step of 1,053 ms only 2.3 ms shorter (16 layers of the 8B, two H200s
    at their power limit).
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
        self.rank = self.weights.rank
        self.ranks = self.weights.ranks
        largest = max(self.num_bytes(module, self.ranks, dtype) for module in modules)
        self.received = make_buffers(2, largest)
        # All views are made here, because the host would otherwise take longer for them than for
        # the launches of the copies.
        # weight -> for each rank, its rows in this rank's memory and in its own
        self.rows: dict[nn.Parameter, list[tuple[Tensor, Tensor]]] = {}
        # weight -> for each of the two buffers, for each rank, its part, [ranks - 1, rows, ...]
        self.slots: dict[nn.Parameter, list[list[Tensor]]] = {}
        self._place_weights(shards)
        for module in modules:
            self._place_gradients(module)
        self.receiving = 0  # index of the receive buffer in use
        # (shards, gradients as sent, gradients as passed to `start`) of the last module
        self.sent: tuple[Sequence[Shard], list[Tensor], list[Tensor]] | None = None

    def _place_weights(self, shards: Sequence[Shard]) -> None:
        """Place the weights one after another in the readable memory."""
        offset = 0
        for shard in shards:
            place = slice(offset, offset + shard.padded.nbytes)
            wholes = [
                self.weights.buffers[rank][0, place].view(shard.padded.dtype).view_as(shard.padded)
                for rank in range(self.ranks)
            ]
            own = wholes[self.rank]
            parts = [whole.chunk(self.ranks)[rank] for rank, whole in enumerate(wholes)]
            self.rows[shard.parameter] = list(zip(own.chunk(self.ranks), parts, strict=True))
            shard.padded = own
            shard.local = parts[self.rank]
            shard.parameter.data = own[: len(shard.parameter)]
            offset += _aligned(shard.padded.nbytes)

    def _place_gradients(self, module: Sequence[Shard]) -> None:
        """Place the received gradients of a module one after another in the receive buffers."""
        offset = 0
        for shard in module:
            shape = (self.ranks - 1, *shard.master.shape)
            place = slice(offset, offset + math.prod(shape) * self.dtype.itemsize)
            self.slots[shard.parameter] = [
                [
                    self.received.buffers[rank][number, place].view(self.dtype).view(shape)
                    for rank in range(self.ranks)
                ]
                for number in range(2)
            ]
            offset += _received_bytes(shard, self.ranks, self.dtype)

    @staticmethod
    def num_bytes(shards: Sequence[Shard], ranks: int, dtype: torch.dtype) -> int:
        """Return the size in bytes of a receive buffer for the shards of one module."""
        return sum(_received_bytes(shard, ranks, dtype) for shard in shards)

    def gather(self, shards: Sequence[Shard]) -> None:
        self.weights.barrier()  # all ranks have written their rows
        for peer in ring_order(self.rank, self.ranks):
            for shard in shards:
                here, there = self.rows[shard.parameter][peer]
                here.copy_(there)

    def start(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        finished = self.finish()
        padded = []
        for shard, gradient in zip(shards, gradients, strict=True):
            padded.append(pad_rows(gradient, len(shard.master) * self.ranks).to(self.dtype))
        for peer in ring_order(self.rank, self.ranks):
            # A buffer has no slot for the rows of its own rank.
            slot = self.rank - 1 if self.rank > peer else self.rank
            for shard, gradient in zip(shards, padded, strict=True):
                rows = _rows_of(peer, shard, gradient)
                self.slots[shard.parameter][self.receiving][peer][slot].copy_(rows)
        self.sent = shards, padded, gradients
        return finished

    def finish(self) -> list[Tensor]:
        if self.sent is None:
            return []
        shards, padded, gradients = self.sent
        self.sent = None
        self.received.barrier()
        for shard, gradient in zip(shards, padded, strict=True):
            own = _rows_of(self.rank, shard, gradient)
            received = self.slots[shard.parameter][self.receiving][self.rank]
            shard.gradient = self.accumulate(shard.gradient, own, received)
        self.receiving = 1 - self.receiving
        return gradients


def _rows_of(rank: int, shard: Shard, gradient: Tensor) -> Tensor:
    """Return the rows of a padded gradient that belong to `rank`."""
    rows = len(shard.master)
    return gradient[rank * rows : (rank + 1) * rows]


def _received_bytes(shard: Shard, ranks: int, dtype: torch.dtype) -> int:
    return _aligned((ranks - 1) * shard.master.numel() * dtype.itemsize)


def _aligned(num_bytes: int) -> int:
    """Round up to a multiple of 512, as torch's allocator does."""
    return -(-num_bytes // 512) * 512
