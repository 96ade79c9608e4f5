"""A slow GPU among the ranks, found by a fixed piece of work that each does alone.

Training is synchronous: every layer gathers weights and reduces gradients, so all ranks' steps take as long as the slowest
one's, and events inside a step time the waiting as well. Only work without any exchange tells them apart: at evaluations, where
the GPU is still hot from the last step, each rank times the same bf16 GEMM, and one number per rank is exchanged. What it sees:
a GPU whose clock is held down by heat, power or a fault, or that somebody else uses. What it does not see: a slow link, a slow
host. It takes some 30 ms on an H100 and comes once per evaluation, that is less than 0.01 % of a run of the 8B model.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

import torch

from common.sharding.processes import Processes
from common.training.metrics import Events, Progress

SLOW = 1.05  # times the median; GPUs of one kind in one node differ by some 2 % (reference systems warn there)
LOOKS = 5
SIZE = 4096  # of the square matrices: 0.2 ms on an H100, all compute units busy; input and output are 64 MiB
REPEATS = 64  # untimed ones before, for the clock to settle, and timed ones


class GemmProbe:
    """Milliseconds of one GEMM, bf16 [SIZE, SIZE] x [SIZE, SIZE], on this rank's GPU. Memory is taken once, 64 MiB."""

    def __init__(self, device: torch.device, size: int = SIZE):
        generator = torch.Generator(device).manual_seed(0)  # its own: the run's generators must stay as they are
        # Random values: zeros take less power, and a GPU held down by its power limit would not show.
        self.input = torch.randn((size, size), generator=generator, device=device, dtype=torch.bfloat16)
        self.output = torch.empty_like(self.input)

    def __call__(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for index in range(2 * REPEATS):
            if index == REPEATS:
                start.record()
            torch.mm(self.input, self.input, out=self.output)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / REPEATS


class RankComparison:
    """Compares the ranks by `probe`, a time in ms that includes no waiting for others, and names who is slow.

    At its power limit a GPU's clock swings: on an H200 and an H100 under full load, single times of one GPU differ by 7 to 12 %, with
    a standard deviation of 2 %, and neighbours in time alike; matrices of zeros are no steadier. So the median over the last LOOKS comparisons decides: a rank
    that becomes slow is named at the third evaluation after that.
    """

    def __init__(self, processes: Processes, events: Events, progress: Progress, probe: Callable[[], float]):
        self.processes, self.events, self.progress, self.probe = processes, events, progress, probe
        self.history: deque[list[float]] = deque(maxlen=LOOKS)  # each rank's time over the median rank's, the last comparisons

    def compare(self, step: int, samples: int, time_s: float) -> list[int]:
        """Probe, exchange, and tell. All ranks call it at the same step; returns the slow ones, the same list everywhere.

        Nobody is named before there are LOOKS comparisons.
        """
        rank, world_size = self.processes.rank, self.processes.world_size
        times = torch.zeros(world_size, dtype=torch.float64, device=self.processes.device)
        times[rank] = self.probe()
        times_ms = self.processes.sum(times).tolist()
        self.history.append(over_median(times_ms))
        ratios = typical(self.history)
        slow = slow_ranks(ratios) if len(self.history) == LOOKS else []
        self.events.write("ranks", step=step, samples=samples, time_s=time_s, probe_ms=times_ms, slow=slow)
        if slow:
            self.progress.show(describe(ratios, slow))
        return slow


def compare_ranks(processes: Processes, events: Events, progress: Progress) -> RankComparison | None:
    """With a first comparison before the clock starts. None on a CPU, whose ranks share it, and where there is nobody to compare with."""
    if processes.device.type != "cuda" or processes.world_size == 1:
        return None
    ranks = RankComparison(processes, events, progress, GemmProbe(processes.device))
    ranks.compare(step=0, samples=0, time_s=0.0)  # one: what follows at once swings the same way and would add nothing
    return ranks


def over_median(times_ms: list[float]) -> list[float]:
    """Each rank's time over that of the median rank. Of two ranks the faster one is the median: else neither could stand out."""
    median = statistics.median_low(times_ms)
    return [ms / median for ms in times_ms]


def typical(history: Iterable[list[float]]) -> list[float]:
    """Each rank's median over the comparisons."""
    return [statistics.median(ratios) for ratios in zip(*history, strict=True)]


def slow_ranks(ratios: list[float]) -> list[int]:
    return [rank for rank, ratio in enumerate(ratios) if ratio > SLOW]


def describe(ratios: list[float], slow: list[int]) -> str:
    named = ", ".join(f"rank {rank} takes {ratios[rank] - 1:.0%} longer" for rank in slow)
    return (
        f"SLOW: {named} than the median rank for the same GEMM (median of {LOOKS} comparisons): all wait for it; "
        "its clock, power and temperature are in gpu_samples.jsonl and the report"
    )
