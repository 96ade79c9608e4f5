"""Timer of steps, and of any other work on a device, without host synchronization."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StepClock:
    """Timer of steps without host synchronization: CUDA events, or a monotonic clock on a CPU."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list = []

    def mark(self) -> None:
        """Record a time mark. Call it at the start of training and after each step.

        After a pause, such as an evaluation or a save, call `restart` instead.
        """
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def restart(self) -> None:
        """Forget all marks and record a new one: the start of the next step."""
        self.marks.clear()
        self.mark()

    def drain_ms(self) -> list[float]:
        """Return the milliseconds of each step since the last call. Waits for the device."""
        marks = self.marks
        self.marks = self.marks[-1:]  # the start of the next step
        if not self.on_gpu:
            return [1e3 * (end - begin) for begin, end in pairwise(marks)]
        marks[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(marks)]
