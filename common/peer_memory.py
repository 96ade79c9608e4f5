"""Weights and gradients of sharded training, moved by the GPUs' copy engines out of each other's memory.

An NCCL kernel takes multiprocessors from the products it runs beside; the cuBLAS kernels of Hopper, one block per multiprocessor, then wait for
the blocks that found none. A copy engine takes none. So each rank pulls its peers' shares with plain copies: for a gather that is all,
for a reduction one kernel then adds up what was pulled, in fp32 (NCCL rounds to bf16 at every hop of its ring).

Two buffers take turns, and each collective begins with a barrier of the node's ranks on its stream. Past it everyone has filled the buffer of
this turn, and everyone is through with reading that of the last: only behind it is that one written to again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from common.errors import ConfigError
from common.kernels import mean


def symmetric_empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """uint8 memory that the node's other ranks can map. Raises ConfigError where there is none such.

    It is not the caching allocator's: torch.cuda.memory_allocated does not count it.
    """
    import torch.distributed._symmetric_memory as symmetric

    # Never NVLink multicast, which torch would set up for every mapping: copies do not need it, and it fails where the host has none.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    with refused_without_peers():
        return symmetric.empty(*shape, dtype=torch.uint8, device=device)


@contextmanager
def refused_without_peers() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConfigError(
            'gather = "copy_engine" cannot be used here',
            f"the GPUs of this node cannot read each other's memory: {str(error).splitlines()[0]}",
            'set gather = "nccl"',
        ) from error


def others(rank: int, ranks: int) -> list[int]:
    """The other ranks, from the neighbour on: each begins with another one, so that not all read from the same."""
    return [(rank + step) % ranks for step in range(1, ranks)]


class Peers(Protocol):
    """Two equal buffers of bytes on each rank of a node, which every other one can read."""

    rank: int
    ranks: int

    def reserve(self, num_bytes: int) -> None:
        """Make them at least so large. All ranks ask alike."""

    def of(self, turn: int, peer: int) -> Tensor:
        """uint8: buffer `turn` (0 or 1) of rank `peer`."""

    def barrier(self, turn: int) -> None:
        """On the current stream: go on when all ranks have come so far."""


class SymmetricPeers:
    """By torch's symmetric memory."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.device, self.size = group, torch.device("cuda", torch.cuda.current_device()), 0
        self.rank, self.ranks = group.rank(), group.size()

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self.size:
            return
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.synchronize(self.device)  # whoever still reads the old ones
        self.size = num_bytes
        self.buffers = [symmetric_empty((num_bytes,), self.device) for _ in range(2)]
        with refused_without_peers():
            self.handles: list[Any] = [symmetric.rendezvous(buffer, self.group) for buffer in self.buffers]
        peers = range(self.ranks)
        self.views = [[handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in peers] for handle in self.handles]

    def of(self, turn: int, peer: int) -> Tensor:
        return self.views[turn][peer]

    def barrier(self, turn: int) -> None:
        self.handles[turn].barrier()


class Turns:
    """What the gather and the reduction share: whose turn it is, and when a buffer may be written to."""

    def __init__(self, peers: Peers):
        self.peers, self.turn = peers, 0
        self.passed: torch.cuda.Event | None = None  # the last barrier: behind it no peer reads the other buffer
        self.issued: torch.cuda.Event | None = None  # what the compute stream had been given when the last turn began

    def next_buffer(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of the next turn, for the current stream to write to."""
        num_bytes = math.prod(size) * dtype.itemsize
        self.peers.reserve(num_bytes)
        self.turn = 1 - self.turn
        if device.type == "cuda":
            # What a gather left in this buffer is copied out by the compute stream, before it is given the layer after: not waiting for
            # more than that lets a gather run beside the layer before its own.
            for event in (self.passed, self.issued):
                if event is not None:
                    torch.cuda.current_stream(device).wait_event(event)
            self.issued = torch.cuda.default_stream(device).record_event()
        return self.view(self.peers.rank, num_bytes, dtype)

    def view(self, peer: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return self.peers.of(self.turn, peer)[:num_bytes].view(dtype)

    def meet(self, device: torch.device) -> None:
        self.peers.barrier(self.turn)
        if device.type == "cuda":
            self.passed = torch.cuda.current_stream(device).record_event()

    def others(self) -> list[int]:
        return others(self.peers.rank, self.peers.ranks)


class PulledAllGather:
    """For FSDPModule.set_custom_all_gather: its `allocate` and call."""

    def __init__(self, peers: Peers):
        self.turns = Turns(peers)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.turns.next_buffer(size, dtype, device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        """`input_tensor`, this rank's share, lies in its place in `output_tensor` already."""
        self.turns.meet(output_tensor.device)
        shares = output_tensor.view(self.turns.peers.ranks, -1)
        for peer in self.turns.others():
            theirs = self.turns.view(peer, output_tensor.nbytes, output_tensor.dtype).view_as(shares)
            shares[peer].copy_(theirs[peer], non_blocking=True)


class PulledReduceScatter:
    """For FSDPModule.set_custom_reduce_scatter. FSDP asks first for the input's memory, then for the output's, then calls."""

    def __init__(self, peers: Peers, kernels: str):
        self.turns, self.mean, self.has_input = Turns(peers), mean.ENGINES[kernels], False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.has_input = not self.has_input
        return self.turns.next_buffer(size, dtype, device) if self.has_input else torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp, async_op: bool = False
    ) -> None:
        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), f"no such reduction by pulling: {op}"
        self.turns.meet(output_tensor.device)
        peers, ranks = self.turns.peers, self.turns.peers.ranks
        pulled = output_tensor.new_empty(ranks - 1, output_tensor.numel(), dtype=input_tensor.dtype)
        for row, peer in zip(pulled, self.turns.others(), strict=True):
            row.copy_(self.turns.view(peer, input_tensor.nbytes, input_tensor.dtype).view(ranks, -1)[peers.rank], non_blocking=True)
        self.mean(input_tensor.view(ranks, -1)[peers.rank], pulled, output_tensor)
        if op == dist.ReduceOp.SUM:  # gloo knows no average: FSDP divides by itself there
            output_tensor.mul_(ranks)


def pull_from_peers(modules: list[FSDPModule], gather: Peers, reduce: Peers, kernels: str) -> None:
    """Let FSDP's collectives of `modules` go through peer memory: of its own for each of the two, since they overlap."""
    all_gather, reduce_scatter = PulledAllGather(gather), PulledReduceScatter(reduce, kernels)
    for module in modules:
        if not hasattr(module, "set_custom_all_gather"):
            why = f"torch {torch.__version__} has no custom collectives in FSDP"
            raise ConfigError('gather = "copy_engine" cannot be used', why, 'take torch 2.10 or newer, or set gather = "nccl"')
        module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
