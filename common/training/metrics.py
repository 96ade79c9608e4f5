"""Step time, tokens/s, TFLOP/s and MFU, and the file events.jsonl.

MFU = tokens/s per GPU x training FLOPs per token / dense bf16 peak of one GPU, with FLOPs per token
= 6N + 6LSH. That counts all matrix weights forward and backward, and causal attention as half of
the square. Recomputation is not counted (common/model/shapes.py). Values stay on the device until a
step logs. The host waits for the device only then.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from common.config import RunConfig
from common.errors import NonFinite
from common.gpu_kinds import KINDS
from common.sharding.processes import Processes
from common.training.mllog import LineFile


class Events:
    """Rank 0's writer of events.jsonl: one JSON object per line, never a partial line."""

    def __init__(self, path: Path | None):
        self.file = LineFile(path) if path is not None else None

    def write(self, event: str, **values) -> None:
        if self.file is not None:
            # JSON has neither NaN nor infinity: null replaces them.
            values = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            self.file.write(
                (json.dumps({"event": event, **values}, allow_nan=False) + "\n").encode()
            )


class ProgressLog:
    """Progress lines of rank 0 on stderr. Steps and evaluations go to events.jsonl."""

    def __init__(self, enabled: bool, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.enabled = enabled

    def show(self, text: str) -> None:
        if self.enabled:
            # the terminal was closed, or the reader of a pipe ended
            with contextlib.suppress(OSError):
                print(text, file=self.stream, flush=True)


class StepClock:
    """Timer of steps without host synchronization: CUDA events, or a monotonic clock on a CPU."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list = []

    def mark(self) -> None:
        """Record a time mark. Call it at the start of training and after each step.

        After a pause, such as an evaluation, call `restart` instead.
        """
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        self.marks.append(
            torch.cuda.current_stream().record_event(event) if event else time.perf_counter()
        )

    def restart(self) -> None:
        self.marks.clear()
        self.mark()

    def drain_ms(self) -> list[float]:
        """Return the milliseconds of each step since the last call. Waits for the device."""
        marks = self.marks
        self.marks = self.marks[-1:]
        if self.on_gpu:
            marks[-1].synchronize()
        return [a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in pairwise(marks)]


@dataclass(frozen=True)
class StepRate:
    """Throughput of one GPU over the steps since the last log."""

    step_time_ms: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None  # None if no peak is known (CPU)

    @staticmethod
    def of(
        step_time_ms: float,
        tokens_per_step: int,
        gpus: int,
        flops_per_token: int,
        peak_tflops: float | None,
    ) -> StepRate:
        tokens = tokens_per_step / gpus / (step_time_ms / 1e3)
        tflops = tokens * flops_per_token / 1e12
        return StepRate(step_time_ms, tokens, tflops, tflops / peak_tflops if peak_tflops else None)

    def text(self, one: str = "GPU") -> str:
        """Format the rate. `one`: the unit that computes, a GPU or a process."""
        mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        return (
            f"{self.tokens_per_s_per_gpu:,.0f} tok/s/{one}, "
            f"{self.tflops_per_gpu:.3g} TFLOP/s/{one}{mfu}"
        )


class Meter:
    """Collects per-step values on the device and writes them as events when a step logs."""

    def __init__(
        self,
        processes: Processes,
        events: Events,
        *,
        tokens_per_step: int,
        samples_per_step: int,
        flops_per_token: int,
        peak_tflops: float | None,
    ):
        self.processes = processes
        self.events = events
        self.tokens_per_step = tokens_per_step
        self.samples_per_step = samples_per_step
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self.clock = StepClock(processes.device)
        # step, learning rate, this rank's part of the loss, gradient norm
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []
        self.step_times_ms: list[float] = []
        self.rate: StepRate | None = None
        self.samples = 0  # train sequences consumed: steps done x global batch
        self.started = time.monotonic()

    def start(self) -> None:
        self.started = time.monotonic()
        self.clock.restart()

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def record(self, step: int, learning_rate: float, loss: Tensor, grad_norm: Tensor) -> None:
        """Keep the values of one finished step.

        `loss`: this rank's part of the mean over the global batch, fp32 [] on the device.
        """
        self.samples = step * self.samples_per_step
        self.pending.append((step, learning_rate, loss, grad_norm))
        self.clock.mark()

    def flush(self) -> None:
        """Write all pending values. Raises NonFinite at the first non-finite loss or norm."""
        if not self.pending:
            return
        times_ms = self.clock.drain_ms()
        losses = self.processes.sum(torch.stack([loss for _, _, loss, _ in self.pending])).tolist()
        norms = torch.stack([norm for _, _, _, norm in self.pending]).tolist()
        mean_ms = sum(times_ms) / len(times_ms)
        self.rate = StepRate.of(
            mean_ms,
            self.tokens_per_step,
            self.processes.world_size,
            self.flops_per_token,
            self.peak_tflops,
        )
        self.step_times_ms += times_ms
        now = self.seconds()
        for index, (step, learning_rate, _, _) in enumerate(self.pending):
            values = {
                "step": step,
                "samples": step * self.samples_per_step,
                "loss": losses[index],
                "grad_norm": norms[index],
            }
            values |= {
                "learning_rate": learning_rate,
                "step_time_ms": times_ms[index],
                "time_s": now - sum(times_ms[index + 1 :]) / 1e3,
            }
            if index == len(self.pending) - 1:
                values |= {
                    "tokens_per_s_per_gpu": self.rate.tokens_per_s_per_gpu,
                    "tflops_per_gpu": self.rate.tflops_per_gpu,
                }
                values |= {"mfu": self.rate.mfu, **memory_gib(self.processes.device)}
            self.events.write("step", **values)
            if not (math.isfinite(losses[index]) and math.isfinite(norms[index])):
                why = "the gradient norm is finite: this step updated the weights"
                if not math.isfinite(norms[index]):
                    # AdamW's `skip` left the weights unchanged.
                    why = "this step did not update the weights"
                raise NonFinite(
                    f"step {step}: loss {losses[index]}, gradient norm {norms[index]}",
                    why,
                    f"look at events.jsonl before step {step}; "
                    "a lower learning rate or a longer warm-up is the usual cure",
                )
        self.pending.clear()


def make_meter(
    config: RunConfig,
    sequence_length: int,
    flops_per_token: int,
    processes: Processes,
    events: Events,
) -> Meter:
    """Return the meter of a run with this config, without MFU if the GPU's peak is unknown."""
    # No peak, so no MFU, if the run is not on the GPU of its config: for example the miniature on a
    # GPU.
    known = processes.device.type == "cuda" and config.gpu in KINDS
    return Meter(
        processes,
        events,
        tokens_per_step=config.global_batch_size * sequence_length,
        samples_per_step=config.global_batch_size,
        flops_per_token=flops_per_token,
        peak_tflops=KINDS[config.gpu].peak_bf16_tflops if known else None,
    )


def memory_gib(device: torch.device) -> dict[str, float | None]:
    """Return this GPU's peak reserved and peak allocated memory in GiB. None on a CPU."""
    if device.type != "cuda":
        return {"memory_gib": None, "allocated_gib": None}
    return {
        "memory_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
    }
