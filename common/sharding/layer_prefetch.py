"""Prefetch of the frozen base's layers into buffers on the device (frozen_base.py).

A side stream fills the buffers in the order in which a pass requests the layers. Events keep it
from overwriting a buffer that kernels still read, and kernels from reading one that is not filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from common.sharding.side_stream import SideStream

# Orientations of a layer's matrices.
ROWWISE = 0  # W [N, K]
COLUMNWISE = 1  # W^T [K, N]


class LayerKey(NamedTuple):
    """A layer in one orientation, which is what blocks request and buffers contain."""

    orientation: int
    layer: int


Fetch = Callable[[LayerKey, Tensor], None]  # fills uint8 [layer bytes] on the current stream


@dataclass
class Buffer:
    """Device memory for one layer."""

    memory: Tensor  # uint8 [layer bytes]
    key: LayerKey | None = None  # the layer that it holds, or will hold after `filled`
    in_use: bool = False  # whether a block reads it
    filled: Any = None  # event at the end of the fetch
    released: Any = None  # event at the end of the last kernel that reads it


class PrefetchBuffers:
    """Buffers of prefetched layers. A buffer is overwritten only after its release."""

    def __init__(self, memories: list[Tensor], fetch: Fetch, stream: SideStream):
        self.buffers = [Buffer(memory) for memory in memories]
        self.fetch = fetch
        self.stream = stream

    def acquire(self, key: LayerKey, upcoming: list[LayerKey]) -> Tensor:
        """Return the bytes of `key`, readable on the compute stream until `release`.

        Also starts to fetch the `upcoming` layers into free buffers. Raises RuntimeError if no
        buffer is free.
        """
        buffer = self.find(key)
        if buffer is None:
            # Overwrite a prefetched layer only if there is no other buffer.
            free = self._free(upcoming) or self._free([])
            if free is None:
                raise RuntimeError(
                    f"no buffer for layer {key.layer}: "
                    f"all {len(self.buffers)} are in use, none was released"
                )
            buffer = self._start(key, free)
        self.stream.wait_event(buffer.filled)
        buffer.in_use = True
        self.prefetch(upcoming)
        return buffer.memory

    def prefetch(self, upcoming: list[LayerKey]) -> None:
        """Start to fetch these layers in order, as long as a buffer is free.

        Skips layers that are already in a buffer.
        """
        for key in upcoming:
            if self.find(key) is not None:
                continue
            free = self._free(upcoming)
            if free is None:
                return
            self._start(key, free)

    def release(self, layer: int) -> None:
        """Release this layer's buffer. Call it once all kernels that read it are enqueued."""
        for buffer in self.buffers:
            if buffer.in_use and buffer.key is not None and buffer.key.layer == layer:
                buffer.in_use = False
                buffer.released = self.stream.record_event()

    def find(self, key: LayerKey) -> Buffer | None:
        """Return the buffer that holds this layer or is being filled with it, or None."""
        for buffer in self.buffers:
            if buffer.key == key:
                return buffer
        return None

    def _free(self, upcoming: list[LayerKey]) -> Buffer | None:
        """Return a buffer that no block uses and that holds no `upcoming` layer, or None."""
        for buffer in self.buffers:
            if not buffer.in_use and buffer.key not in upcoming:
                return buffer
        return None

    def _start(self, key: LayerKey, buffer: Buffer) -> Buffer:
        """Start to fetch a layer into `buffer`, once the kernels that read it have finished."""
        buffer.key = key
        memory = buffer.memory
        buffer.filled = self.stream.run(lambda: self.fetch(key, memory), after=buffer.released)
        return buffer


def pass_order(num_layers: int, training: bool, backward_orientation: int) -> list[LayerKey]:
    """Return the layers that one pass (an evaluation or a micro-batch) requests, in order."""
    order = [LayerKey(ROWWISE, layer) for layer in range(num_layers)]
    if training:
        order += [LayerKey(backward_orientation, layer) for layer in reversed(range(num_layers))]
    return order
