"""Prefetch of the next micro-batch: a thread reads and pins it, a side stream copies it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


class Prefetcher:
    """An iterator over `batches` (int32 arrays) that yields them as tensors on `device`.

    A thread reads ahead. An exception in it is raised by `__next__`. Worker processes would not
    help, because a batch has only some 100 KB. The thread is a daemon, so that it cannot keep the
    process alive.

    `depth`: micro-batches that wait in pinned memory at most.
    """

    def __init__(self, batches: Iterator[np.ndarray], device: torch.device, depth: int = 4):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ready: queue.Queue = queue.Queue(depth)
        self.ahead: Tensor | BaseException | None = None
        self.thread = threading.Thread(
            target=self._read, args=(batches,), name="prefetch", daemon=True
        )
        self.thread.start()

    def _read(self, batches: Iterator[np.ndarray]) -> None:
        if self.stream is not None:
            # A thread has its own current device. Without this, pinning memory would open a context
            # on GPU 0 for every rank.
            torch.cuda.set_device(self.device)
        try:
            for batch in batches:
                tensor = torch.from_numpy(batch)
                self.ready.put(tensor.pin_memory() if self.stream is not None else tensor)
            self.ready.put(StopIteration())
        except BaseException as error:  # `__next__` raises it in the training thread
            self.ready.put(error)

    def _fetch(self) -> Tensor | BaseException:
        """Return the next batch, whose copy to the device has only been started, or the end."""
        item = self.ready.get()
        if self.stream is None or isinstance(item, BaseException):
            return item
        with torch.cuda.stream(self.stream):
            return item.to(self.device, non_blocking=True)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        batch = self.ahead if self.ahead is not None else self._fetch()
        if isinstance(batch, BaseException):
            self.ahead = batch
            raise batch
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            # The batch was allocated on the side stream. Its memory must not be reused there before
            # the compute stream has read it.
            batch.record_stream(torch.cuda.current_stream())
            # Start the next copy now, so that it runs during this batch's forward and backward.
            self.ahead = self._fetch()
        return batch
