"""Memory of the node's GPUs that all of them can read: what a frozen base in shards is pulled through by the GPUs' copy engines.

An NCCL kernel takes multiprocessors from the products it runs beside; a copy engine takes none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
            'gather = "copy_engine" cannot be used here',
            f"the GPUs of this node cannot read each other's memory: {str(error).splitlines()[0]}",
            'set gather = "nccl"',
        ) from error
