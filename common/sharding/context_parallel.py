"""Context parallelism: c ranks of a node share each sequence, with attention over all its tokens.

A sequence is cut into 2 c chunks. Rank r of c holds chunks r and 2 c - 1 - r, so that all ranks
have equally many unmasked scores. Every operation but attention works on single tokens, and so on
a rank's own ones. For attention, each rank gathers the keys and values of the whole sequence, and
computes its two chunks of queries, each against the keys up to its own end. The backward sums the
gradients of keys and values over the ranks, each of which receives those of its own chunks.

The first chunks of all ranks are the first half of the sequence, and the second ones the second
half. They are gathered apart: the second half arrives while the first chunk's attention runs, and
in the backward its gradients are summed while the first chunk's backward runs. What remains exposed
is the gather of the first half, and the sum of its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from common.kernels.attention import AttentionGraph, attention_graph


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share each sequence, and the position of this rank among them."""

    size: int = 1  # c
    rank: int = 0  # r
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of the two chunks of a sequence that this rank holds."""
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of `whole`, which has those of the sequence along `dim`."""
        if self.size == 1:
            return whole
        chunks = whole.chunk(2 * self.size, dim)
        return torch.cat([chunks[number] for number in self.chunks], dim)

    def token_numbers(self, batch: int, length: int, device: torch.device) -> Tensor | None:
        """Return the number in the whole micro-batch of each of this rank's tokens, int32 [tokens].

        Tokens count from 0 over `batch` sequences. `length`: this rank's tokens of each. The result
        is None without other ranks, where a token's number is that of its row.
        """
        return None if self.size == 1 else _token_numbers(self, batch, length, device)

    def max_(self, tensor: Tensor) -> None:
        """Replace `tensor`, which must be contiguous, by its maximum over these ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)


ALONE = ContextGroup()  # each rank has whole sequences


@cache
def _token_numbers(context: ContextGroup, batch: int, length: int, device: torch.device) -> Tensor:
    numbers = torch.arange(batch * length * context.size, dtype=torch.int32, device=device)
    return context.cut(numbers.view(batch, -1), 1).flatten()


def context_group(rank: int, world_size: int, size: int, timeout_s: float) -> ContextGroup:
    """Return the group of `size` consecutive ranks that has `rank`. All ranks call it.

    With a communicator of its own, it does not wait for other collectives.
    """
    if size == 1:
        return ALONE
    own = None
    for first in range(0, world_size, size):
        # Every rank must create every group.
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if rank in ranks:
            own = group
    return ContextGroup(size, rank % size, own)


class ContextAttention:
    """Attention of this rank's queries to the keys of the whole sequence, for one backward."""

    def __init__(self, q: Tensor, kv: Tensor, keep: bool, context: ContextGroup):
        """Compute the forward. With `keep`, there will be a backward.

        `q`: [batch, tokens, heads, head_dim].
        `kv`: [batch, tokens, 2 kv_heads, head_dim], key heads before value heads.
        """
        self.context = context
        halves = [half.contiguous() for half in kv.chunk(2, 1)]
        received = [half.new_empty(context.size, *half.shape) for half in halves]
        gathers = [
            dist.all_gather_into_tensor(into.flatten(0, 1), half, context.group, async_op=True)
            for into, half in zip(received, halves, strict=True)
        ]
        self.chunk = halves[0].shape[1]
        whole = kv.new_empty(len(kv), 2 * context.size * self.chunk, *kv.shape[2:])
        self.graphs: list[AttentionGraph] = []
        queries = q.chunk(2, 1)
        for half, number in enumerate(context.chunks):
            gathers[half].wait()
            for rank, part in enumerate(received[half]):
                self._chunk_of(whole, half, rank).copy_(part)
            # `data`, because autograd would take the copies into the second half of `whole` for a
            # change of the keys that the first graph has saved.
            k, v = whole.data[:, : (number + 1) * self.chunk].chunk(2, 2)
            self.graphs.append(attention_graph(queries[half], k, v, keep))

    @property
    def out(self) -> Tensor:
        """The output, [batch, tokens, heads, head_dim]. Each access copies it."""
        return torch.cat([graph.out.detach() for graph in self.graphs], 1)

    def backward(self, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's q, k and v. `d_out`: gradient of `out`, any shape."""
        context = self.context
        d_q: list[Tensor] = []
        sums: list[Tensor] = []
        reductions = []
        whole = None  # gradient of the keys and values of the whole sequence
        d_outs = d_out.view(len(self.graphs[0].out), 2 * self.chunk, -1).chunk(2, 1)
        for half in (1, 0):
            own, d_k, d_v = self.graphs.pop().backward(d_outs[half])
            d_q.insert(0, own)
            d_kv = torch.cat([d_k, d_v], 2)
            if whole is None:
                behind = 2 * context.size * self.chunk - d_kv.shape[1]  # keys that no query sees
                whole = F.pad(d_kv, (0, 0, 0, 0, 0, behind))
            else:
                whole[:, : d_kv.shape[1]] += d_kv
            parts = [self._chunk_of(whole, half, rank) for rank in range(context.size)]
            sent = torch.cat(parts)
            sums.insert(0, torch.empty_like(parts[0], memory_format=torch.contiguous_format))
            reductions.append(
                dist.reduce_scatter_tensor(sums[0], sent, group=context.group, async_op=True)
            )
        for reduction in reductions:
            reduction.wait()
        d_k, d_v = torch.cat(sums, 1).chunk(2, 2)
        return torch.cat(d_q, 1), d_k, d_v

    def _chunk_of(self, whole: Tensor, half: int, rank: int) -> Tensor:
        """Return the chunk that `rank` holds of a half of `whole` [batch, tokens, ...]."""
        number = ContextGroup(self.context.size, rank).chunks[half]
        return whole[:, number * self.chunk : (number + 1) * self.chunk]
