"""Step time, tokens/s, TFLOP/s and MFU, and the file events.jsonl.

    MFU = positions/s per GPU * training FLOPs per token / dense peak of one GPU

common/model/shapes.py counts the FLOPs per token, without recomputation. common/estimate/mfu.py
has the peak, in which each product counts at the peak of its format. Positions with padding cost as
much as text, so TFLOP/s and MFU count them. Tokens/s do not. Losses and norms stay on the device
until `Meter.flush` writes them. The host waits for the device only then.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from common.benchmarks import Rules
from common.config import RunConfig
from common.errors import NonFinite, StorageError
from common.estimate.mfu import peak_tflops
from common.gpu_kinds import KINDS
from common.kernels.step_clock import StepClock
from common.sharding.processes import Processes
from common.text_tables import number
from common.training.mllog import LineFile


class Events:
    """Rank 0's writer of events.jsonl: one JSON object per line, never a partial line."""

    def __init__(self, path: Path | None):
        """Create `path`. Raises StorageError. None: this rank does not write."""
        self.file = LineFile(path) if path is not None else None
        self.complete = True  # False after a failed write

    def write(self, event: str, **values) -> None:
        """Append an event. NaN and infinity, which JSON does not have, become null.

        If that fails, the event is lost and the run continues. A note says so once.
        """
        if self.file is None:
            return
        record = {"event": event, **values}
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None
        try:
            self.file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        except StorageError as error:
            if self.complete:
                note = f"note: {self.file.path} lacks events, the run continues: {error.why}"
                with contextlib.suppress(OSError):  # the reader of stderr may have exited
                    print(note, file=sys.stderr, flush=True)
            self.complete = False


class ProgressLog:
    """Progress lines of rank 0 on stderr. Steps and evaluations go to events.jsonl."""

    def __init__(self, enabled: bool, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.enabled = enabled

    def show(self, text: str) -> None:
        """Print a line. Does nothing on other ranks."""
        if self.enabled:
            # The terminal may be closed, or the reader of a pipe may have exited.
            with contextlib.suppress(OSError):
                print(text, file=self.stream, flush=True)


@dataclass(frozen=True)
class StepRate:
    """Throughput of one GPU: the mean over some steps."""

    step_time_ms: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None  # None if the peak is unknown, as on a CPU, and for a miniature

    @staticmethod
    def of(
        step_time_ms: float,
        tokens_per_step: int,
        gpus: int,
        flops_per_token: float,
        peak_tflops: float | None,
        padding: float = 0.0,
    ) -> StepRate:
        """Compute the rate of steps that took `step_time_ms` on average.

        `tokens_per_step`: with padding. `padding`: its share of them.
        """
        positions_per_s = tokens_per_step / gpus / (step_time_ms / 1e3)
        tflops = positions_per_s * flops_per_token / 1e12
        mfu = tflops / peak_tflops if peak_tflops else None
        return StepRate(step_time_ms, positions_per_s * (1 - padding), tflops, mfu)

    def text(self, device: str = "GPU") -> str:
        """Return the rate as text. `device`: the word for one rank's device, "GPU" or "process"."""
        mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        return (
            f"{self.tokens_per_s_per_gpu:,.0f} tok/s/{device}, "
            f"{number(self.tflops_per_gpu, ',.3g')} TFLOP/s/{device}{mfu}"
        )


class Meter:
    """A collector of each step's values on the device. `flush` writes them to events.jsonl."""

    def __init__(
        self,
        processes: Processes,
        events: Events,
        *,
        tokens_per_step: int,
        samples_per_step: int,
        flops_per_token: float,
        peak_tflops: float | None,
        padding: float = 0.0,
    ):
        """`tokens_per_step`: with padding. `padding`: its share of them."""
        self.processes = processes
        self.events = events
        self.tokens_per_step = tokens_per_step
        self.samples_per_step = samples_per_step
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self.padding = padding
        self.clock = StepClock(processes.device)
        # step, learning rate, this rank's part of the loss, gradient norm
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []
        self.step_times_ms: list[float] = []
        self.rate: StepRate | None = None
        self.samples = 0  # training sequences consumed: steps done x global batch
        self.started = time.monotonic()

    def start(self) -> None:
        """Start the clock, immediately before the first step."""
        self.started = time.monotonic()
        self.clock.restart()

    def seconds(self) -> float:
        """Return the seconds since `start`."""
        return time.monotonic() - self.started

    def record(self, step: int, learning_rate: float, loss: Tensor, grad_norm: Tensor) -> None:
        """Keep the values of one finished step.

        `loss`: this rank's part of the mean over the global batch, fp32 [] on the device.
        """
        self.samples = step * self.samples_per_step
        self.pending.append((step, learning_rate, loss, grad_norm))
        self.clock.mark()

    def flush(self) -> None:
        """Write all collected values. Raises NonFinite at the first non-finite loss or norm.

        All ranks call it at the same step. The host waits for the device.
        """
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
            self.padding,
        )
        self.step_times_ms += times_ms
        now = self.seconds()
        for index, (step, learning_rate, _, _) in enumerate(self.pending):
            values = {
                "step": step,
                "samples": step * self.samples_per_step,
                "loss": losses[index],
                "grad_norm": norms[index],
                "learning_rate": learning_rate,
                "step_time_ms": times_ms[index],
                "time_s": now - sum(times_ms[index + 1 :]) / 1e3,  # when the step ended
            }
            if index == len(self.pending) - 1:
                values["tokens_per_s_per_gpu"] = self.rate.tokens_per_s_per_gpu
                if self.padding:
                    values["padding"] = self.padding
                values["tflops_per_gpu"] = self.rate.tflops_per_gpu
                values["mfu"] = self.rate.mfu
                values |= memory_gib(self.processes.device)
            self.events.write("step", **values)
            if not (math.isfinite(losses[index]) and math.isfinite(norms[index])):
                raise _non_finite(step, losses[index], norms[index])
        self.pending.clear()


def _non_finite(step: int, loss: float, norm: float) -> NonFinite:
    why = "the gradient norm is finite: this step updated the weights"
    if not math.isfinite(norm):
        # The update rule skips such a step on the device.
        why = "this step did not update the weights"
    return NonFinite(
        f"step {step}: loss {loss}, gradient norm {norm}",
        why,
        f"look at events.jsonl before step {step}; "
        "a lower learning rate or a longer warm-up usually helps",
    )


def make_meter(
    config: RunConfig,
    rules: Rules,
    processes: Processes,
    events: Events,
    padding: float = 0.0,
) -> Meter:
    """Return the meter of a run with this config.

    It has no MFU if the GPU's peak is unknown, or for a miniature, whose kernels are too small for
    a GPU. `padding`: share of padding in the training sequences.
    """
    flops = rules.training_flops
    peak = None
    if processes.device.type == "cuda" and config.gpu in KINDS and not config.miniature:
        kind = KINDS[config.gpu]
        linears = kind.peak_tflops(config.linear_format.in_fp8)
        peak = peak_tflops(flops, linears, kind.peak_bf16_tflops)
    return Meter(
        processes,
        events,
        tokens_per_step=config.global_batch_size * rules.sequence_length,
        samples_per_step=config.global_batch_size,
        flops_per_token=flops.total,
        peak_tflops=peak,
        padding=padding,
    )


def memory_gib(device: torch.device) -> dict[str, float | None]:
    """Return this GPU's peak reserved and peak allocated memory in GiB. None on a CPU."""
    if device.type != "cuda":
        return {"memory_gib": None, "allocated_gib": None}
    return {
        "memory_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
    }


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors in bytes, 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
