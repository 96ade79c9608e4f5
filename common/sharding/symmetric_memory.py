"""GPU memory that all ranks of a node can read and write, for copies by copy engines.

An NCCL kernel that copies occupies multiprocessors that concurrent matrix products need. A copy
engine does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ConfigError, first_line


class SymmetricBuffers:
    """Byte buffers on each rank of a node. Every rank can read and write all of them.

    The memory does not come from torch's caching allocator, so torch.cuda.memory_allocated does not
    count it.
    """

    # rank -> uint8 [count, num_bytes], that rank's buffers mapped into this process
    buffers: dict[int, Tensor]

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: int, num_bytes: int):
        """Allocate `count` buffers of `num_bytes` each. All ranks pass the same numbers.

        Raises ConfigError if the GPUs cannot access each other's memory.
        """
        # A private module of torch, used only here.
        import torch.distributed._symmetric_memory as symmetric

        # Otherwise torch sets up NVLink multicast for every mapping, which fails on hosts that do
        # not support it. Copies do not need it.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.rank = group.rank()
        self.ranks = group.size()
        shape = (count, num_bytes)
        with _refuse_without_peer_access():
            own = symmetric.empty(*shape, dtype=torch.uint8, device=device)
            self.handle = symmetric.rendezvous(own, group)
            self.buffers = {
                rank: self.handle.get_buffer(rank, shape, torch.uint8) for rank in range(self.ranks)
            }

    def barrier(self) -> None:
        """Make the current stream wait until the streams of all ranks have reached this barrier."""
        self.handle.barrier()


def ring_order(rank: int, ranks: int) -> list[int]:
    """Return the other ranks, starting with the next one, so that no two start with the same."""
    return [(rank + step) % ranks for step in range(1, ranks)]


@contextmanager
def _refuse_without_peer_access() -> Iterator[None]:
    """Raise ConfigError if the block cannot allocate or map the memory.

    Errors of a full GPU and of a lost rank are raised as they are.
    """
    try:
        yield
    except (torch.OutOfMemoryError, dist.DistError):  # both are RuntimeErrors
        raise
    except RuntimeError as error:
        raise ConfigError(
            'reduce_scatter = "copy_engine" cannot be used here',
            f"the GPUs of this node cannot access each other's memory: {first_line(error)}",
            'set reduce_scatter = "nccl"',
        ) from error
