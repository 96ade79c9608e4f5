"""What a block keeps for its backward, waiting in the host's memory: instead of running its forward a second time.

A layer of Llama 2 70B keeps 470 MB of SwiGLU's input in 8 bits, for a sequence of 8192. A copy engine carries them over PCIe 5 in 9 ms, while an
H200 computes a layer's forward in 14 and its backward in 19: the copies cost nothing there, where a recomputed layer costs its forward.

What goes first comes back last: a stack. Device memory is taken and given back in the compute stream's order alone, which waits for a copy
before it lets go of what the copy reads; the allocator, asked in the order in which kernels are launched, never has to know of copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.sharding.side_stream import beside


class HostStack:
    """Tensors of one shape and dtype. The last one pushed, and the next one to pop, have memory on the device too."""

    def __init__(self, depth: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        """Room for `depth` tensors, pinned where the device is a GPU. Raises ConfigError where the host has not so much."""
        self.device, self.stream = device, beside(device)
        self.leaving: tuple[Tensor, Any] | None = None  # what was pushed last, and the end of its copy
        self.coming: tuple[Tensor, Any] | None = None  # the top, back on the device when its copy has ended
        self.height = 0  # without `coming`
        pinned = device.type == "cuda"
        try:
            self.memory = [torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned) for _ in range(depth)]
        except RuntimeError as error:
            size = depth * torch.Size(shape).numel() * dtype.itemsize / 2**30
            what = f"offload_layers: {size:.1f} GiB of host memory per GPU cannot be had"
            raise ConfigError(what, str(error).splitlines()[0], "give the host more memory, or set offload_layers lower") from error

    def begin(self) -> None:
        """A pass over the model begins: what an earlier one left, without a backward, is forgotten."""
        self._let_go()
        if self.coming is not None:
            self.stream.wait(self.coming[1])
        self.coming, self.height = None, 0

    def push(self, x: Tensor) -> None:
        """Send `x`, contiguous, to the host. The caller forgets it."""
        self._let_go()
        memory = self.memory[self.height]
        self.height += 1
        self.leaving = x, self.stream.run(lambda: memory.copy_(x, non_blocking=True), after=self.stream.mark())

    def fetch(self) -> None:
        """Have the top come back, if it is not on its way already."""
        self._let_go()
        if self.coming is not None or self.height == 0:
            return
        self.height -= 1
        memory = self.memory[self.height]
        x = torch.empty_like(memory, device=self.device)
        self.coming = x, self.stream.run(lambda: x.copy_(memory, non_blocking=True), after=self.stream.mark())

    def pop(self) -> Tensor:
        """The top, for the compute stream; what lies below sets out meanwhile."""
        self.fetch()
        if self.coming is None:
            raise RuntimeError("a block's backward asks for what its forward did not send to the host")
        (x, there), self.coming = self.coming, None
        self.fetch()
        self.stream.wait(there)
        return x

    def _let_go(self) -> None:
        if self.leaving is not None:
            self.stream.wait(self.leaving[1])
            self.leaving = None


def spread(count: int, first: int, last: int) -> set[int]:
    """`count` of the layers from `first` to before `last`, or all of them, evenly: so that copies have the time of several layers."""
    layers = range(first, max(first, last))
    count = min(count, len(layers))
    return {layers[number * len(layers) // count] for number in range(count)}
