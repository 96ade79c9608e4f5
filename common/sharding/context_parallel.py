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

Attention sees no positions, because RoPE comes before it. So the keys that a query chunk sees whole
may stand in any order. Only its own chunk must be the last one, to which the causal mask is
aligned. The keys and values of each chunk are in a slot:

    slots 0 to c - 1        second chunks of ranks 0 to c - 1
    slots c to 2 c - 1      first chunks of ranks 0 to c - 1
    slot 2 c                this rank's second chunk

The first query chunk of rank r has the keys of slots c to c + r, and the second one those of slots
r + 1 to 2 c. Their gradients are in the same slots, and that of slot 2 c is copied to slot r before
the sum. Collectives read and write slots in place, so each slot is contiguous: tokens are the
outermost dimension, also in a micro-batch of several sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

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
        size = context.size
        rank = context.rank
        chunks = kv.transpose(0, 1).unflatten(0, (2, -1))
        self.slot_shape = chunks.shape[1:]  # [tokens, batch, 2 kv_heads, head_dim]
        slots = kv.new_empty(2 * size + 1, *self.slot_shape)
        slots[size + rank :: size - rank].copy_(chunks)  # slots c + r and 2 c
        first_halves = self._gather(slots[size : 2 * size], slots[size + rank])
        second_halves = self._gather(slots[:size], slots[2 * size])
        q_first, q_second = q.chunk(2, 1)
        # `data`, because autograd would take what gloo writes into other slots for a change of the
        # keys that a graph has saved.
        first_halves.wait()
        first = attention_graph(q_first, *_heads(slots.data[size : size + rank + 1]), keep)
        second_halves.wait()
        second = attention_graph(q_second, *_heads(slots.data[rank + 1 :]), keep)
        self.graphs: list[AttentionGraph] = [first, second]

    @property
    def out(self) -> Tensor:
        """The output, [batch, tokens, heads, head_dim]. Each access copies it."""
        return torch.cat([graph.out.detach() for graph in self.graphs], 1)

    def backward(self, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's q, k and v. `d_out`: gradient of `out`, any shape."""
        size = self.context.size
        rank = self.context.rank
        d_outs = d_out.view(len(self.graphs[0].out), 2 * self.slot_shape[0], -1).chunk(2, 1)
        d_q_second, *d_heads = self.graphs.pop().backward(d_outs[1])
        d_heads = [d.transpose(0, 1) for d in d_heads]
        d_slots = d_out.new_empty(2 * size + 1, *self.slot_shape)
        torch.cat(d_heads, 2, out=d_slots[rank + 1 :].flatten(0, 1))
        del d_heads  # to free it during the next backward
        d_slots[rank] = d_slots[2 * size]
        d_slots[:rank].zero_()  # keys that no query of this rank sees
        d_chunks = d_out.new_empty(2, *self.slot_shape)
        second_halves = self._reduce_scatter(d_chunks[1], d_slots[:size])

        d_q_first, *d_heads = self.graphs.pop().backward(d_outs[0])
        for total, part in zip(_heads(d_slots[size : size + rank + 1]), d_heads, strict=True):
            total += part
        first_halves = self._reduce_scatter(d_chunks[0], d_slots[size : 2 * size])
        second_halves.wait()
        first_halves.wait()
        return torch.cat([d_q_first, d_q_second], 1), *_heads(d_chunks)

    def _gather(self, slots: Tensor, own: Tensor) -> dist.Work:
        """Start to gather the slots `own` of all ranks into `slots`."""
        return dist.all_gather_into_tensor(
            slots.flatten(0, 1), own, self.context.group, async_op=True
        )

    def _reduce_scatter(self, own: Tensor, slots: Tensor) -> dist.Work:
        """Start to sum `slots` over the ranks. `own`: where this rank's slot of the sum goes."""
        return dist.reduce_scatter_tensor(
            own, slots.flatten(0, 1), group=self.context.group, async_op=True
        )


def _heads(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of `slots`, each [batch, tokens, kv_heads, head_dim]."""
    k, v = slots.flatten(0, 1).transpose(0, 1).chunk(2, 2)
    return k, v
