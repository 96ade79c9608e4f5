"""A side stream for copies and collectives that run while kernels compute.

The frozen base and the offloading of activations use it. ZeroOptimizer has a stream of its own
(zero.py).

Callers enqueue functions and events, whatever the device. On a CPU, functions run at once. Tests
replace the stream by one that runs the functions in every order that the events allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.kernels.architecture import high_priority


class SideStream:
    """The side stream of a CPU: work runs when it is enqueued, and events are None."""

    def run(self, work: Callable[[], object], after: Any) -> Any:
        """Enqueue `work` after the event `after`, if any. Return the event at the end of `work`."""
        work()

    def record_event(self) -> Any:
        """Return an event after all work enqueued on the compute stream so far."""

    def wait_event(self, event: Any) -> None:
        """Make work that is enqueued on the compute stream from now on wait for `event`."""


class CudaSideStream(SideStream):
    """The side stream of a GPU.

    The compute stream is the one that is current when `record_event` and `wait_event` are called.
    """

    def __init__(self, device: torch.device):
        # High priority, so that the few thread blocks of a gather do not queue behind the thousands
        # of a matrix product.
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=high_priority(device))

    def run(self, work: Callable[[], object], after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            work()
            return self.stream.record_event()

    def record_event(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait_event(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


def make_side_stream(device: torch.device) -> SideStream:
    """Return a new side stream of a GPU, or its stand-in on a CPU."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()
