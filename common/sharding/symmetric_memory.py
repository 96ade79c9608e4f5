"""Memory of the node's GPUs that all of them can read and write: the copy engines' way from one to the other.

An NCCL kernel takes multiprocessors from the products it runs beside; a copy engine takes none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ConfigError


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
            'transport = "copy_engine" cannot be used here',
            f"the GPUs of this node cannot reach each other's memory: {str(error).splitlines()[0]}",
            'set transport = "nccl"',
        ) from error


def others(rank: int, ranks: int) -> list[int]:
    """The other ranks, from the neighbour on: each begins with another one, so that not all turn to the same."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def reach(mine: Tensor, group: dist.ProcessGroup) -> tuple[Any, dict[int, Tensor]]:
    """mine: of `symmetric_empty`, of one shape on all ranks of `group`. torch's handle of it, which has to be kept; and by rank, `others`
    first, what that rank has. Raises ConfigError where peers cannot be reached.
    """
    import torch.distributed._symmetric_memory as symmetric

    with refused_without_peers():
        handle = symmetric.rendezvous(mine, group)
    order = (*others(group.rank(), group.size()), group.rank())
    return handle, {peer: handle.get_buffer(peer, mine.shape, torch.uint8) for peer in order}


class Mailboxes:
    """Two slots of bytes on each rank of a node, which all its ranks can write to."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device):
        """`num_bytes` of a slot, the same on all ranks. Raises ConfigError where there is no such memory."""
        self.rank, self.ranks = group.rank(), group.size()
        self.handle, self.slots_of = reach(symmetric_empty((2, num_bytes), device), group)

    def barrier(self) -> None:
        """On the current stream: go on when all ranks have come so far."""
        self.handle.barrier()
