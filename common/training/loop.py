"""Training loop of every benchmark: train() and evaluate(). It works on finished objects and knows
no benchmark.

The loss of a step is the mean over the global batch of each sequence's mean over its valid tokens.
If all tokens count, as in pre-training, that is the mean over all tokens. If a mask excludes some,
it is the loss of the LoRA reference.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.errors import NonFinite, TargetMissed
from common.kernels.cross_entropy import IGNORE_INDEX
from common.model.llama import Llama
from common.sharding.processes import Processes
from common.training.assembly import Assembly, Batching
from common.training.metrics import Meter
from common.training.reports import Reports

if TYPE_CHECKING:  # for an annotation only: most runs have no checkpoints
    from common.training.checkpoint import Checkpoints

LOG_EVERY_STEPS = 10  # the host waits for the device only then, and at evaluations


def train_step(
    assembly: Assembly,
    batches: Iterator[Tensor],
    batching: Batching,
    learning_rate: float,
    processes: Processes,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> tuple[Tensor, Tensor]:
    """Do one optimizer step.

    `batches`: yields int [micro batch, 2, sequence] on the device: tokens and labels.
    `on_phase`: called with the name of each phase as it begins.

    Returns (this rank's part of the loss, gradient norm), both fp32 [] on the device. The host
    waits for neither.
    """
    loss_part = torch.zeros((), device=processes.device)
    for _ in range(batching.gradient_accumulation_steps):
        on_phase("data")
        batch = next(batches)
        on_phase("compute")
        loss_sum, count = assembly.model(*batch.unbind(1))
        loss = (loss_sum / count).sum() / batching.global_batch_size
        # Gradients are averaged over the ranks. Each rank's loss is its part of the total, so the
        # average must become a sum.
        (loss * processes.world_size).backward()
        loss_part += loss.detach()
    on_phase("optimizer")
    return loss_part, assembly.step(learning_rate)


@torch.no_grad()
def evaluate(
    model: Llama,
    batches: Iterable[Tensor],
    processes: Processes,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> float:
    """Return the mean over all sequences of all ranks of each sequence's mean loss over its valid
    tokens.

    A sequence without valid tokens has no weight. `batches`: int [sequences, 2, length], tokens and
    labels, resident on the device. Label -100 does not count. Sums are fp64.
    """
    model.eval()  # no dropout
    totals = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for batch in batches:
        on_phase("evaluation")
        loss_sum, count = model(*batch.unbind(1))
        weighs = count > 0
        totals[0] += torch.where(weighs, loss_sum / count.clamp(min=1), 0.0).double().sum()
        totals[1] += weighs.sum()
    model.train()
    total, sequences = processes.sum(totals).tolist()
    return total / sequences


def next_token_pairs(windows: np.ndarray) -> np.ndarray:
    """Convert int [sequences, length + 1] to tokens and labels, [sequences, 2, length]."""
    return np.stack((windows[:, :-1], windows[:, 1:]), axis=1)


def pad_for_ranks(
    sequences: np.ndarray, processes: Processes, micro_batch_size: int
) -> list[Tensor]:
    """Cut int [sequences, 2, length] into this rank's micro-batches, on the device.

    If the sequences do not divide evenly, sequences of ignored labels are added. Every rank then
    runs the same number of forwards, and padding has no weight.
    """
    missing = -len(sequences) % (processes.world_size * micro_batch_size)
    padding = np.zeros((missing, *sequences.shape[1:]), sequences.dtype)
    padding[:, 1] = IGNORE_INDEX
    mine = np.split(np.concatenate((sequences, padding)), processes.world_size)[processes.rank]
    return list(torch.from_numpy(mine).to(processes.device).split(micro_batch_size))


@dataclass(frozen=True)
class TrainingOutcome:
    samples: int  # train sequences consumed
    loss: float  # loss of the last evaluation


@dataclass(frozen=True)
class Goal:
    """Schedule of evaluations and the end of training, in training sequences.

    `first_evaluation` is a multiple of `eval_interval`.
    """

    eval_interval: int
    first_evaluation: int
    target_loss: float  # stop at a loss <= this; 0: no target
    max_samples: int  # stop after this many, without success if there is a target

    def evaluates_at(self, samples: int) -> bool:
        return samples % self.eval_interval == 0 and samples >= self.first_evaluation

    def reached(self, samples: int, loss: float) -> bool:
        """Return whether the run succeeded with the evaluation `loss` after `samples`."""
        if not self.target_loss:
            return samples >= self.max_samples
        return loss <= self.target_loss


def train(
    assembly: Assembly,
    lr_at: Callable[[int], float],
    batches: Iterator[Tensor],
    eval_batches: list[Tensor],
    batching: Batching,
    goal: Goal,
    processes: Processes,
    reports: Reports,
    checkpoints: Checkpoints | None = None,
) -> TrainingOutcome:
    """Train until an evaluation is <= the target.

    `lr_at`: learning rate of a step, counted from 0.
    `reports`: has a meter. Its log is at run_start, before the first block.
    `checkpoints`: already loaded. Training begins after their step.

    Raises TargetMissed after `goal.max_samples` sequences, NonFinite if a loss, gradient norm or
    evaluation is not finite.
    """
    step = checkpoints.step if checkpoints else 0
    samples = step * batching.global_batch_size
    log = reports.log
    meter = reports.meter
    assert meter is not None
    # The lambda reads the current step.
    on_phase = lambda phase: reports.heartbeat.write(step, phase)  # noqa: E731
    phases = {"train": 0.0, "eval": 0.0}
    # A garbage collection in the middle of a step stalls all ranks. Existing objects are frozen,
    # the rest is collected at evaluations.
    gc.collect()
    gc.freeze()
    gc.disable()
    meter.start()
    log.block_start(samples)
    block_samples = samples
    block_began = time.monotonic()
    while samples < goal.max_samples:
        lr = lr_at(step)
        loss_part, grad_norm = train_step(assembly, batches, batching, lr, processes, on_phase)
        step += 1
        samples += batching.global_batch_size
        meter.record(step, lr, loss_part, grad_norm)
        evaluates = goal.evaluates_at(samples)
        if step % LOG_EVERY_STEPS == 0 or evaluates:
            meter.flush()
            if reports.ranks:
                reports.ranks.compare(step, samples, meter.seconds())
            if checkpoints and not evaluates:
                checkpoints.offer(step, evaluated=False)
        if not evaluates:
            continue
        block_s = time.monotonic() - block_began
        log.block_stop(samples, (samples - block_samples) / block_s)
        loss, eval_s = _evaluate_and_log(
            assembly, eval_batches, processes, reports, meter, step, samples
        )
        phases["train"] += block_s
        phases["eval"] += eval_s
        if goal.reached(samples, loss):
            for name, seconds in phases.items():
                meter.events.write("phase", name=name, seconds=seconds, time_s=meter.seconds())
            return TrainingOutcome(samples, loss)
        if checkpoints:
            checkpoints.offer(step, evaluated=True)
        meter.clock.restart()
        log.block_start(samples)
        block_samples = samples
        block_began = time.monotonic()
    if checkpoints:
        checkpoints.finish()
    raise TargetMissed(
        f"target {goal.target_loss} not reached within {samples:,} samples",
        f"the loss was still above the target after max_samples ({goal.max_samples:,}) sequences",
        "compare the loss curve in report.html with an earlier run; "
        "raise max_samples if it is still falling",
    )


def _evaluate_and_log(
    assembly: Assembly,
    batches: list[Tensor],
    processes: Processes,
    reports: Reports,
    meter: Meter,
    step: int,
    samples: int,
) -> tuple[float, float]:
    """Evaluate and log. Return (loss, seconds). Raises NonFinite if the loss is not finite."""
    log = reports.log
    began = time.monotonic()
    log.eval_start(samples)
    loss = evaluate(
        assembly.model, batches, processes, lambda phase: reports.heartbeat.write(step, phase)
    )
    gc.collect()
    seconds = time.monotonic() - began
    meter.events.write(
        "eval", step=step, samples=samples, loss=loss, seconds=seconds, time_s=meter.seconds()
    )
    if fields := assembly.linear.evaluated(loss):
        meter.events.write("linear", step=step, **fields, time_s=meter.seconds())
    if not math.isfinite(loss):
        raise NonFinite(
            f"evaluation at {samples} samples: loss {loss}",
            "the weights or activations are not finite",
            "look at events.jsonl",
        )
    log.eval_accuracy(samples, loss)
    log.eval_stop(samples)
    return loss, seconds
