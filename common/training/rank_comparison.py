"""Detect a slow GPU among the ranks by the time each one needs for its own work.

Training is synchronous: the steps of all ranks take as long as those of the slowest one. A block's
forward, however, waits for no other rank once its weights have arrived. CUDA events time some
blocks of the model's second half, where the reductions of the previous step are over too. They are
read when the host waits for the device anyway, and one number per rank is exchanged.

The comparison detects a GPU whose clock is held down by heat, power or a fault, or that another
program uses. It does not detect a slow link or a slow host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import torch
from torch import nn

from common.model.llama import Llama
from common.sharding.processes import Processes
from common.training.metrics import Events, ProgressLog

# Ratio to the median rank. The comparisons of two H200s have a standard deviation of 0.25 %
# (docs/log.md).
SLOW = 1.02
LOOKS = 5  # comparisons, one at every tenth step
EVERY = 4  # each fourth block is timed: four of 32 in each forward


class BlockTimes:
    """Timer of `blocks`. Returns the mean ms of a block's training forward since the last call."""

    def __init__(self, blocks: Iterable[nn.Module]):
        self.marks: list[torch.cuda.Event] = []
        # The optimizer's hook, which waits for the weights, was registered earlier and so runs
        # before the timer.
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: self._mark())
            block.register_forward_hook(lambda *_: self._mark())

    def _mark(self) -> None:
        if torch.is_grad_enabled():  # otherwise an evaluation
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def __call__(self) -> float:
        marks = self.marks
        self.marks = []
        marks[-1].synchronize()
        return statistics.fmean(
            begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2], strict=True)
        )


class RankComparison:
    """Compares the ranks by `probe`, the ms of work that includes no waiting for others, and names
    the slow ones.

    At its power limit a GPU's clock varies: single times of 13 ms on an H200 under full load have a
    standard deviation of 2 %. So the median of the last LOOKS comparisons counts, and each
    comparison is itself a mean of many times. GPUs without a fault can differ by more than SLOW,
    for example by temperature. The slower one is named then too, because all ranks wait for it.
    """

    def __init__(
        self,
        processes: Processes,
        events: Events,
        progress: ProgressLog,
        probe: Callable[[], float],
    ):
        self.processes = processes
        self.events = events
        self.progress = progress
        self.probe = probe
        # for each comparison: each rank's time over the median rank's
        self.history: list[list[float]] = []
        self.slow: list[int] = []

    def compare(self, step: int, samples: int, time_s: float) -> list[int]:
        """Probe, exchange and report. All ranks call it at the same step.

        Returns the slow ranks, the same list on every rank.
        """
        times = torch.zeros(
            self.processes.world_size, dtype=torch.float64, device=self.processes.device
        )
        times[self.processes.rank] = self.probe()
        times_ms = self.processes.sum(times).tolist()
        self.history.append(over_median(times_ms))
        ratios = median_ratios(self.history)
        before = self.slow
        self.slow = slow_ranks(self.history)
        self.events.write(
            "ranks", step=step, samples=samples, time_s=time_s, block_ms=times_ms, slow=self.slow
        )
        if self.slow and self.slow != before:
            self.progress.show(describe(ratios, self.slow))
        return self.slow


def compare_ranks(
    processes: Processes, events: Events, progress: ProgressLog, model: Llama
) -> RankComparison | None:
    """Return a run's comparison. None on a CPU, which all ranks share, and for a single rank."""
    if processes.device.type != "cuda" or processes.world_size == 1:
        return None
    return RankComparison(
        processes, events, progress, BlockTimes(model.blocks[len(model.blocks) // 2 :: EVERY])
    )


def over_median(times_ms: list[float]) -> list[float]:
    """Return each rank's time over that of the median rank.

    Of two ranks the faster one is the median. Otherwise neither could exceed the limit.
    """
    median = statistics.median_low(times_ms)
    return [ms / median for ms in times_ms]


def median_ratios(history: list[list[float]]) -> list[float]:
    """Return the median ratio of each rank over the last LOOKS comparisons."""
    return [statistics.median(ratios) for ratios in zip(*history[-LOOKS:], strict=True)]


def slow_ranks(history: list[list[float]]) -> list[int]:
    """Return the slow ranks. The list is empty until there are LOOKS comparisons."""
    if len(history) < LOOKS:
        return []
    return [rank for rank, ratio in enumerate(median_ratios(history)) if ratio > SLOW]


def describe(ratios: list[float], slow: list[int]) -> str:
    named = ", ".join(f"rank {rank} takes {ratios[rank] - 1:.1%} longer" for rank in slow)
    return (
        f"SLOW: {named} than the median rank for the same work: all wait for it; "
        "see gpu_samples.jsonl and the report"
    )
