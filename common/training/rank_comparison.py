"""Detect a slow GPU among the ranks by the time that each one needs for its own work.

Training is synchronous: every rank's step takes as long as the slowest rank's. The forward of a
block, however, does not wait for other ranks once its weights have arrived. CUDA events time some
blocks in the second half of the model, where the reductions of the previous step have ended too.
The events are read when the host waits for the device anyway, and one number per rank is exchanged.

A block of ranks that share a sequence waits for the keys and values of the others, and would make
all of them as slow as the slowest. There, the output head is timed.

The comparison detects a GPU whose clock is lowered by heat, power or a fault, or that another
program uses. It does not detect a slow link or a slow host.

A product of one size, timed by each rank at every evaluation, would find a rank 5 % behind after
1,150 steps, because single times vary by 7 to 12 % at the power limit. A rank is not compared with
its own past: if it holds up the others, it is behind their median, whatever it was before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn

from common.model.llama import Llama
from common.sharding.processes import Processes
from common.training.metrics import Events, ProgressLog

# A rank is slow above this ratio to the median rank. In simulations, 2 % needs comparisons with a
# standard deviation of at most 0.6 %. Two H200 in runs of the 8B and of LoRA have 0.25 %.
SLOW_RATIO = 1.02
# A rank that was slow remains slow down to this ratio. Otherwise a rank near SLOW_RATIO, such as a
# hotter GPU, would be named again and again: in 41 of 400 simulated comparisons.
HEALTHY_RATIO = 1.01
# Number of comparisons whose median decides, one every ten steps. With their mean, a single
# comparison that is 10 % off would name a rank.
COMPARISONS = 5
BLOCK_STRIDE = 4  # every fourth block of the second half is timed: 4 of 32


class ForwardTimes:
    """A timer of the training forwards of some modules."""

    def __init__(self, modules: Iterable[nn.Module]):
        self.marks: list[torch.cuda.Event] = []
        # The optimizer has already registered its hook, which waits for the weights. Hooks run in
        # the order of their registration, so the timer starts after that wait.
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._mark())
            module.register_forward_hook(lambda *_: self._mark())

    def _mark(self) -> None:
        if torch.is_grad_enabled():  # not in an evaluation
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def mean_ms(self) -> float:
        """Return the mean time since the last call of the modules' training forwards, in ms."""
        marks = self.marks
        self.marks = []
        marks[-1].synchronize()
        times = [
            begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2], strict=True)
        ]
        return statistics.fmean(times)


class RankComparison:
    """A comparison of the ranks that names the slow ones.

    At its power limit, the clock of a GPU varies: single times of 13 ms on an H200 under full load
    have a standard deviation of 2 %. Therefore each comparison uses the mean of many times, and the
    median of the last COMPARISONS comparisons decides. GPUs without a fault can differ by more than
    SLOW_RATIO too, for example by temperature. The slow one is named, because all ranks wait for
    it.
    """

    def __init__(
        self,
        processes: Processes,
        events: Events,
        progress: ProgressLog,
        probe: Callable[[], float],
    ):
        """Create the comparison. `probe`: returns the ms of work that does not wait for others."""
        self.processes = processes
        self.events = events
        self.progress = progress
        self.probe = probe
        # For each comparison, the ratio of each rank to the median rank.
        self.history: list[list[float]] = []
        self.slow: list[int] = []

    def compare(self, step: int, samples: int, time_s: float) -> list[int]:
        """Compare, report and return the slow ranks. All ranks call it at the same step."""
        times = torch.zeros(
            self.processes.world_size, dtype=torch.float64, device=self.processes.device
        )
        times[self.processes.rank] = self.probe()
        times_ms = self.processes.sum(times).tolist()
        self.history.append(over_median(times_ms))
        ratios = median_ratios(self.history)
        before = self.slow
        self.slow = slow_ranks(self.history, before)
        self.events.write(
            "ranks", step=step, samples=samples, time_s=time_s, block_ms=times_ms, slow=self.slow
        )
        if self.slow and self.slow != before:
            self.progress.show(describe(ratios, self.slow))
        return self.slow


def make_rank_comparison(
    processes: Processes, events: Events, progress: ProgressLog, model: Llama
) -> RankComparison | None:
    """Return the comparison of a run. None on a CPU, which all ranks share, and for one rank."""
    if processes.device.type != "cuda" or processes.world_size == 1:
        return None
    return RankComparison(processes, events, progress, ForwardTimes(timed_modules(model)).mean_ms)


def timed_modules(model: Llama) -> list[nn.Module]:
    """Return the modules whose forward waits for no other rank, of which the times are compared."""
    if model.context.size > 1:
        return [model.head]
    return list(model.blocks)[len(model.blocks) // 2 :: BLOCK_STRIDE]


def over_median(times_ms: list[float]) -> list[float]:
    """Return the ratio of each rank's time to the median rank's time.

    For an even number of ranks, the median is the lower of the two middle times. With the mean of
    two ranks, the slow one would raise the time that it is compared with.
    """
    median = statistics.median_low(times_ms)
    return [ms / median for ms in times_ms]


def median_ratios(history: list[list[float]]) -> list[float]:
    """Return the median ratio of each rank over the last COMPARISONS comparisons."""
    return [statistics.median(ratios) for ratios in zip(*history[-COMPARISONS:], strict=True)]


def slow_ranks(history: list[list[float]], before: Collection[int] = ()) -> list[int]:
    """Return the slow ranks. The list is empty until there are COMPARISONS comparisons.

    `before`: the ranks that were slow at the previous comparison.
    """
    if len(history) < COMPARISONS:
        return []
    slow = []
    for rank, ratio in enumerate(median_ratios(history)):
        limit = HEALTHY_RATIO if rank in before else SLOW_RATIO
        if ratio > limit:
            slow.append(rank)
    return slow


def describe(ratios: list[float], slow: list[int]) -> str:
    """Return the progress line that names the slow ranks."""
    named = ", ".join(f"rank {rank} takes {ratios[rank] - 1:.1%} longer" for rank in slow)
    return (
        f"SLOW: {named} than the median rank for the same work; all ranks wait for the slowest; "
        "see gpu_samples.jsonl and the report"
    )
