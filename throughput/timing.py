"""Times of calls: of a kernel with a cold cache, of consecutive steps, or of repeated launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from launch.preflight.measure import times_s

WARMUP_MS = 30.0
REPEAT_MS = 200.0
LAUNCHES_MS = 20  # time to measure for each kernel of `launch_us`


def kernel_ms(
    work: Callable[[], object],
    device: str,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
) -> list[float]:
    """Return the time of each call, about `repeat_ms` in total, after `warmup_ms` of untimed calls.

    On a GPU, Triton's do_bench times each call by events and overwrites the L2 cache before it.
    """
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(work, warmup=warmup_ms, rep=repeat_ms, return_mode="all")
    end = time.perf_counter() + 1e-3 * warmup_ms
    work()
    while time.perf_counter() < end:
        work()
    times: list[float] = []
    while not times or sum(times) < repeat_ms:
        times += [1e3 * seconds for seconds in times_s(work, 1, torch.device(device))]
    return times


def step_ms(step: Callable[[], object], device: str, warmup: int, steps: int) -> list[float]:
    """Return the time of each of `steps` consecutive calls, after `warmup` untimed calls."""
    torch_device = torch.device(device)
    times_s(step, warmup, torch_device)
    return [1e3 * seconds for seconds in times_s(step, steps, torch_device)]


def launch_us(launch: Callable[[], object]) -> float:
    """Return the median microseconds of `launch` on the GPU.

    A CUDA graph replays the launches. Events around single launches would also time the host: one
    kernel took 122 µs as the first of a list and 79 µs as the last.
    """
    from triton.testing import do_bench_cudagraph

    return 1e3 * do_bench_cudagraph(launch, rep=LAUNCHES_MS, return_mode="median")


def per_second(samples_ms: list[float], count: float) -> float:
    """Return the rate per second of something that the median sample does `count` times."""
    return 1e3 * count / statistics.median(samples_ms)


def spread(samples_ms: list[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile, and number of samples, under the keys of a row."""
    low = samples_ms[0]
    high = samples_ms[0]
    if len(samples_ms) > 1:
        deciles = statistics.quantiles(samples_ms, n=10, method="inclusive")
        low = deciles[0]
        high = deciles[-1]
    return {
        "ms": statistics.median(samples_ms),
        "ms_p10": low,
        "ms_p90": high,
        "samples": len(samples_ms),
    }
