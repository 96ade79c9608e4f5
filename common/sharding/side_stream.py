"""A stream beside the one that computes, for what moves data meanwhile; on a CPU, which has none, everything in order.

What uses it hands over work and events and never asks where they run: so tests play the same work in other orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Stream(Protocol):
    """Events are None where everything happens in order."""

    def run(self, work: Callable[[], object], after: Any) -> Any:
        """Enqueue `work` behind event `after`; returns the event of its end."""

    def mark(self) -> Any:
        """An event at what the compute stream has been given so far."""

    def wait(self, event: Any) -> None:
        """What the compute stream is given from now on comes after `event`."""


class InOrder:
    """A CPU: work is done when it is given."""

    def run(self, work: Callable[[], object], after: None) -> None:
        work()

    def mark(self) -> None:
        return None

    def wait(self, event: None) -> None:
        return None


class SideStream:
    """A stream beside the one that is current when `mark` and `wait` are called."""

    def __init__(self, device: torch.device):
        # High priority: a gather's few blocks must not queue behind a product's thousands.
        self.device, self.stream = device, torch.cuda.Stream(device, priority=-1)

    def run(self, work: Callable[[], object], after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            work()
            return self.stream.record_event()

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


def beside(device: torch.device) -> Stream:
    return SideStream(device) if device.type == "cuda" else InOrder()
