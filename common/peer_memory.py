"""Memory of the node's GPUs that all of them can read and write: the copy engines' way from one to the other.

An NCCL kernel takes multiprocessors from the products it runs beside; a copy engine takes none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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


class Mailboxes:
    """Two slots of bytes on each rank of a node, which all its ranks can write to."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device):
        """`num_bytes` of a slot, the same on all ranks. Raises ConfigError where there is no such memory."""
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.ranks = group.rank(), group.size()
        slots = symmetric_empty((2, num_bytes), device)
        with refused_without_peers():
            self.handle = symmetric.rendezvous(slots, group)
        self.slots_of = [self.handle.get_buffer(rank, slots.shape, torch.uint8) for rank in range(self.ranks)]

    def barrier(self) -> None:
        """On the current stream: go on when all ranks have come so far."""
        self.handle.barrier()
