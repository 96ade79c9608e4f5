"""Test on real GPUs whether a rank that becomes 6 % slower is named within 50 steps, and no other.

    python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.slow_rank
        [--late 6] [--layers 16] [--steps 260] [--at 180]

Runs training steps on synthetic tokens, on two or more GPUs. After --at steps, the rank that is
slowest so far computes extra matrix products in the forward pass of every block. They take --late
percent of the time of a block.

Rank 0 prints each comparison of the ranks, the noise before the slowdown, which rank was named at
which step, and the cost of the timing per step.

--device cpu checks the program itself with the miniature. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from common import config as configs
from common.kernels.attention import attention_backends
from common.model.precision import DTYPES
from common.paths import ROOT
from common.sharding.processes import (
    high_priority_compute,
    require_world_size,
    start_processes,
)
from common.training.assembly import Batching
from common.training.guard import run_guarded
from common.training.loop import LOG_EVERY_STEPS, train_step
from common.training.metrics import Events, ProgressLog
from common.training.pretraining import assemble_random
from common.training.rank_comparison import (
    COMPARISONS,
    ForwardTimes,
    RankComparison,
    timed_modules,
)
from common.training.warmup import synthetic_batches
from llama31_8b.rules import CLOSED, MINIATURE, Config

SIZE = {"cuda": 1024, "cpu": 64}  # of the extra products: some 5 µs each on an H200
PRODUCTS = 200  # timed together
UNTIMED = 30  # steps without events, to compare the step time with


class HostEvent:
    """Replacement of torch.cuda.Event on a CPU."""

    def __init__(self, enable_timing: bool):
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


class ExtraWork:
    """Compute products before the forward of each block that trains, once `begin` was called.

    Create ForwardTimes first. Its timed interval then includes the products.
    """

    def __init__(self, blocks, device: torch.device):
        self.device = device
        self.a = torch.randn(
            SIZE[device.type], SIZE[device.type], device=device, dtype=torch.bfloat16
        )
        self.out = torch.empty_like(self.a)
        self.work: Callable[[], None] = lambda: None
        for block in blocks:
            block.register_forward_pre_hook(
                lambda *_: self.work() if torch.is_grad_enabled() else None
            )

    def begin(self, count: int) -> None:
        """Compute `count` products before each block from now on."""
        self.work = self.products(count)

    def products(self, count: int) -> Callable[[], None]:
        """Return a function that computes `count` products.

        On a GPU it replays a CUDA graph. Launched one by one, products as short as these would
        wait for their launches.
        """

        def compute() -> None:
            for _ in range(count):
                torch.mm(self.a, self.a, out=self.out)

        if self.device.type == "cpu":
            return compute
        compute()  # the first product allocates memory, which a graph cannot
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's thread may use CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            compute()
        return graph.replay

    def milliseconds(self) -> float:
        """Return the time of one product."""
        work = self.products(PRODUCTS)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / PRODUCTS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--config", type=Path, help="default: config for as many H200s")
    for name, default in (("layers", 16), ("steps", 260), ("at", 180)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--late", type=float, default=6.0, help="percent of a block's time")
    options = parser.parse_args()
    if options.at < COMPARISONS * LOG_EVERY_STEPS:
        parser.error(
            f"--at must be at least {COMPARISONS * LOG_EVERY_STEPS}, for {COMPARISONS} comparisons"
        )
    rank = int(os.environ["RANK"])
    run_guarded(None, rank, partial(start, options), lambda: None, lambda: 0)


def start(options: argparse.Namespace) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    cpu = options.device == "cpu"
    name = "CPU_1x1" if cpu else f"H200_1x{world_size}"
    overrides = {"gpus_per_node": str(world_size), "micro_batch_size": "2"} if cpu else {}
    config = configs.load(
        options.config or ROOT / f"configs/llama31_8b/{name}.toml", Config, overrides
    )
    rules = (
        MINIATURE
        if cpu
        else replace(CLOSED, shape=replace(CLOSED.shape, num_layers=options.layers))
    )
    if cpu:
        torch.cuda.Event = HostEvent  # type: ignore[assignment, misc]
    processes = start_processes(
        options.device, config.hang_timeout_s, high_priority_compute(config, rules)
    )
    require_world_size(processes, config.world_size)
    with attention_backends(processes.device.type, DTYPES[config.precision]):
        watch(options, config, assemble_random(config, rules, processes, 1), processes, rules)
    torch.distributed.destroy_process_group()


def watch(options: argparse.Namespace, config: Config, assembly, processes, rules) -> None:
    model = assembly.model
    batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
    source = synthetic_batches(
        model.shape.vocab_size, rules.sequence_length, processes, config.micro_batch_size
    )
    step = partial(train_step, assembly, source, batching, 1e-6, processes)
    say = partial(print, flush=True) if processes.rank == 0 else lambda *_: None
    for _ in range(5):
        step()
    untimed = time_of(step, UNTIMED, processes)
    blocks = timed_modules(model)
    probe, mine = ForwardTimes(blocks), [0.0]  # the last time of this rank

    def keep() -> float:
        mine[0] = probe.mean_ms()
        return mine[0]

    ranks = RankComparison(processes, Events(None), ProgressLog(processes.rank == 0), keep)
    extra = ExtraWork(model.blocks, processes.device)
    one_ms = extra.milliseconds()
    timed = time_of(step, UNTIMED, processes)
    ranks.probe()
    say(
        f"{len(blocks)} of {len(model.blocks)} blocks timed; a step {untimed:.2f} ms without, "
        f"{timed:.2f} ms with ({timed / untimed - 1:+.2%})"
    )
    slowest, named, looks = 0, [], []
    for number in range(1, options.steps + 1):
        step()
        if number % LOG_EVERY_STEPS:
            continue
        slow = ranks.compare(number, number, 0.0)
        looks.append(ranks.history[-1])
        say(
            f"step {number:>4}: "
            + "  ".join(f"{ratio:.4f}" for ratio in looks[-1])
            + (f"  slow: {slow}" if slow else "")
        )
        if slow:
            named.append((number, slow))
        if number == options.at:
            means = [statistics.fmean(ratios) for ratios in zip(*looks, strict=True)]
            slowest = means.index(max(means))
            if processes.rank == slowest:
                extra.begin(round(options.late / 100 * mine[0] / one_ms))
            say(
                f"from here on rank {slowest} has {options.late:g} % more to do in each block of "
                f"{mine[0]:.3f} ms, products of {one_ms:.4f} ms"
            )
    report(options, looks, named, slowest, say)


def time_of(step, count: int, processes) -> float:
    """Return the mean milliseconds of a step, over `count` steps."""
    processes.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    processes.barrier()
    return 1e3 * (time.perf_counter() - began) / count


def report(
    options: argparse.Namespace, looks: list[list[float]], named: list, slowest: int, say
) -> None:
    healthy = looks[: options.at // LOG_EVERY_STEPS]
    for rank, ratios in enumerate(zip(*healthy, strict=True)):
        mean, sd = statistics.fmean(ratios), statistics.stdev(ratios)
        shifted = statistics.fmean((a - mean) * (b - mean) for a, b in pairwise(ratios)) / max(
            sd**2, 1e-12
        )
        fives = [
            statistics.median(ratios[at : at + COMPARISONS])
            for at in range(len(ratios) - COMPARISONS + 1)
        ]
        spread = max(fives) / min(fives) - 1
        say(
            f"healthy rank {rank}: {mean:.4f} of the median rank, sd of a comparison {sd:.2%}, "
            f"with its neighbor {shifted:+.2f}, medians of five within {spread:.2%}"
        )
    before = statistics.fmean(ratios[slowest] for ratios in healthy)
    after = statistics.fmean(ratios[slowest] for ratios in looks[len(healthy) :])
    say(f"rank {slowest}: {before:.4f} of the median rank before, {after:.4f} after the slowdown")
    false = [number for number, _ in named if number <= options.at]
    seen = [number for number, slow in named if number > options.at and slowest in slow]
    say(f"named while all were healthy: {len(false)} of {len(healthy)} comparisons")
    say(
        f"rank {slowest} named {seen[0] - options.at} steps after it became {options.late:g} % "
        "slower"
        if seen
        else f"rank {slowest} was never named"
    )


if __name__ == "__main__":
    main()
