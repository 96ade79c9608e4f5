"""How a module's gradients, whole on every rank, are added to the masters: each rank gets the mean over the ranks of its own rows.

By collectives, or by mail. A kernel of NCCL takes multiprocessors for as long as it sends, and the cuBLAS kernels of Hopper, one block per
multiprocessor, wait for the blocks that found none: 45 ms of a step of 2,148 (8B in FP8 on two H200, docs/log.md). Mail is carried by
copy engines, which take none, into memory of the receiver; a kernel there adds up what has come with the rank's own, in fp32
(NCCL rounds to bf16 at every hop of its ring).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sharding.symmetric_memory import Mailboxes, others

Accumulate = Callable[..., Tensor]  # an engine of kernels/accumulate.py
Gradients = list[Tensor]


class Reduction(Protocol):
    """Both are called on the stream that they work on, with the modules in the same order on all ranks. Both return gradients
    that the stream no longer reads when it is through with what it has been given.
    """

    def start(self, masters: Sequence[nn.Parameter], gradients: Gradients) -> Gradients:
        """Master: fp32 [rows, ...], this rank's; gradient: [up to rows x ranks, ...], of the whole weight, contiguous."""

    def finish(self) -> Gradients:
        """What was started is added to the masters' gradients."""


class ByCollectives:
    """NCCL or RCCL; gloo on a CPU. All at once, when it starts."""

    def __init__(self, group: dist.ProcessGroup, nodes: dist.ProcessGroup | None, dtype: torch.dtype, accumulate: Accumulate):
        """`group`: the ranks that share the rows. `nodes`: where there are several nodes, this rank's like on them. `dtype`: of what is sent."""
        self.group, self.nodes, self.dtype, self.accumulate = group, nodes, dtype, accumulate

    def start(self, masters: Sequence[nn.Parameter], gradients: Gradients) -> Gradients:
        for master, mean in zip(masters, self._means(masters, gradients), strict=True):
            master.grad = self.accumulate(master.grad, mean)
        return gradients

    def finish(self) -> Gradients:
        return []

    def _means(self, masters: Sequence[nn.Parameter], gradients: Gradients) -> list[Tensor]:
        ranks = self.group.size()
        if ranks == 1 and self.nodes is None:
            return gradients
        op = dist.ReduceOp.AVG if gradients[0].is_cuda else dist.ReduceOp.SUM  # gloo knows sums only
        means = [torch.empty_like(master, dtype=self.dtype) for master in masters]
        with as_one(self.group):
            for gradient, mean in zip(gradients, means, strict=True):
                dist.reduce_scatter_tensor(mean, with_all_rows(gradient, len(mean) * ranks).to(self.dtype), op, group=self.group)
        if self.nodes is not None:
            with as_one(self.nodes):
                for mean in means:
                    dist.all_reduce(mean, op, group=self.nodes)
        if op == dist.ReduceOp.SUM:
            torch._foreach_div_(means, ranks * (self.nodes.size() if self.nodes is not None else 1))
        return means


class ByMail:
    """Copies into the mailboxes of the node's other ranks. What came in is opened when the next module starts, or at `finish`.

    A barrier comes before opening: behind it everyone has sent. Nobody waits there for long, since everyone sent a whole module ago; and
    whoever passes it knows that all have opened what came before, so that of two slots the other one may be written to.
    """

    def __init__(self, boxes: Mailboxes, dtype: torch.dtype, accumulate: Accumulate):
        self.boxes, self.dtype, self.accumulate = boxes, dtype, accumulate
        self.turn = 0
        self.sent: tuple[Sequence[nn.Parameter], Gradients, Gradients] | None = None  # masters, gradients as sent, as they came

    @staticmethod
    def num_bytes(masters: Sequence[nn.Parameter], ranks: int, dtype: torch.dtype) -> int:
        """Of a slot that holds these masters' mail."""
        return sum(_mail_bytes(master, ranks, dtype) for master in masters)

    def start(self, masters: Sequence[nn.Parameter], gradients: Gradients) -> Gradients:
        opened = self.finish()
        ranks, me = self.boxes.ranks, self.boxes.rank
        ready = [with_all_rows(g, len(m) * ranks).to(self.dtype) for m, g in zip(masters, gradients, strict=True)]
        for peer in others(me, ranks):
            for gradient, mail in zip(ready, self._mail(peer, masters), strict=True):
                # The box has no place for its owner's own.
                mail[me - (me > peer)].copy_(gradient.chunk(ranks)[peer])
        self.sent = masters, ready, gradients
        return opened

    def finish(self) -> Gradients:
        if self.sent is None:
            return []
        (masters, ready, gradients), self.sent = self.sent, None
        self.boxes.barrier()
        me = self.boxes.rank
        for master, gradient, mail in zip(masters, ready, self._mail(me, masters), strict=True):
            master.grad = self.accumulate(master.grad, gradient.chunk(self.boxes.ranks)[me], mail)
        self.turn = 1 - self.turn
        return gradients

    def _mail(self, owner: int, masters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
        """What the others send to `owner`, for each master [ranks - 1, rows, ...]."""
        slot, offset = self.boxes.slots_of[owner][self.turn], 0
        for master in masters:
            shape = (self.boxes.ranks - 1, *master.shape)
            yield slot[offset : offset + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
            offset += _mail_bytes(master, self.boxes.ranks, self.dtype)


def _mail_bytes(master: nn.Parameter, ranks: int, dtype: torch.dtype) -> int:
    """Rounded up, for loads of 16 bytes."""
    return -(-(ranks - 1) * master.numel() * dtype.itemsize // 16) * 16


def with_all_rows(gradient: Tensor, rows: int) -> Tensor:
    """With zeros after it where the weight's rows do not come out even."""
    if (added := rows - len(gradient)) == 0:
        return gradient
    return torch.cat([gradient, gradient.new_zeros(added, *gradient.shape[1:])])


def as_one(group: dist.ProcessGroup) -> AbstractContextManager:
    """Collectives of one kind inside become one launch. Six launches per module, each waiting for room beside the products and then for the
    other rank, held multiprocessors for 452 ms of a step instead of 225 (8B on two H200s).
    """
    return dist._coalescing_manager(group)
