"""The training loop of every benchmark: `train`, `train_step` and `evaluate`.

A sequence's loss is the mean over its valid tokens. The loss of a step is the mean of the
sequences' losses over the global batch. If all tokens are valid, this is the mean over all tokens.
The labels of LoRA's evaluation mask some tokens, and its reference defines the loss in the same
way.

For conversations, a step's loss is the mean over all valid tokens of its global batch, and the loss
of an evaluation is the mean over all of its valid tokens.
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
from common.training.mllog import RunLog
from common.training.reports import Reports

if TYPE_CHECKING:  # not imported at run time, because most runs have no checkpoints
    from common.training.checkpoint import Checkpoints

LOG_EVERY_STEPS = 10  # the host waits for the device only at these steps and at evaluations


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
    `on_phase`: called with the name of each phase when it begins.

    Returns (this rank's part of the loss, gradient norm), both fp32 [] on the device. The host does
    not wait for them.
    """
    loss_part = torch.zeros((), device=processes.device)
    counted = next(batching.counted) if batching.counted else None
    for _ in range(batching.gradient_accumulation_steps):
        on_phase("data")
        tokens, labels = next(batches).unbind(1)
        on_phase("compute")
        loss_sum, count = assembly.model(tokens, labels)
        if counted is None:
            loss = (loss_sum / count).sum() / batching.global_batch_size
        else:
            loss = loss_sum.sum() / counted
        # `loss` is this rank's part of the total, so gradients must be summed over the ranks. The
        # optimizer averages them, which the factor compensates.
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
    per_token: bool = False,
) -> float:
    """Return the mean loss over all sequences, or with `per_token` over all tokens, of all ranks.

    `batches`: int [sequences, 2, length] on the device: tokens and labels.

    The loss of a sequence is its mean over the valid tokens. Label -100 marks tokens that are not
    valid. A sequence without valid tokens does not count. Sums over sequences are fp64. Ranks that
    share a sequence add their tokens' parts of its loss, and each counts it.
    """
    model.eval()  # no dropout
    totals = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for batch in batches:
        on_phase("evaluation")
        tokens, labels = batch.unbind(1)
        loss_sum, count = model(tokens, labels)
        counts = count > 0
        if per_token:
            totals[0] += loss_sum.double().sum()
            totals[1] += count.double().sum()
        else:
            totals[0] += torch.where(counts, loss_sum / count.clamp(min=1), 0.0).double().sum()
            totals[1] += counts.sum()
    model.train()
    loss, number = processes.sum(totals).tolist()
    return loss / (number / processes.context.size)


def next_token_pairs(windows: np.ndarray) -> np.ndarray:
    """Convert int [sequences, length + 1] to tokens and labels, [sequences, 2, length]."""
    return np.stack((windows[:, :-1], windows[:, 1:]), axis=1)


def rank_micro_batches(
    sequences: np.ndarray, processes: Processes, micro_batch_size: int
) -> list[Tensor]:
    """Return this rank's share of int [sequences, 2, length] as micro-batches on the device.

    Ranks that share sequences have the same ones, whole.

    If the sequences cannot be divided evenly, sequences with ignored labels are added. Every rank
    then runs the same number of forwards, and the padding does not count.
    """
    missing = -len(sequences) % (processes.data_ranks * micro_batch_size)
    padding = np.zeros((missing, *sequences.shape[1:]), sequences.dtype)
    padding[:, 1] = IGNORE_INDEX
    shares = np.split(np.concatenate((sequences, padding)), processes.data_ranks)
    own = torch.from_numpy(shares[processes.data_rank]).to(processes.device)
    return list(own.split(micro_batch_size))


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of a run that reached its goal."""

    samples: int  # training sequences consumed
    loss: float  # of the last evaluation


@dataclass(frozen=True)
class Goal:
    """Conditions to evaluate and to stop. All fields but `target_loss` count training sequences."""

    eval_interval: int
    first_evaluation: int  # a multiple of eval_interval
    target_loss: float  # stop at a loss at or below it; 0: no target
    max_samples: int  # stop here; the run has then failed if there is a target

    def evaluates_at(self, samples: int) -> bool:
        """Return whether an evaluation follows after `samples` training sequences."""
        return samples % self.eval_interval == 0 and samples >= self.first_evaluation

    def reached(self, samples: int, loss: float) -> bool:
        """Return whether the run succeeded with the evaluation `loss` after `samples`."""
        if not self.target_loss:
            return samples >= self.max_samples
        return loss <= self.target_loss


class TrainingInterval:
    """The training between two evaluations. Logs its start and its end, as a block of MLPerf."""

    def __init__(self, log: RunLog, samples: int):
        """Start an interval after `samples` training sequences."""
        log.block_start(samples)
        self.log = log
        self.first_samples = samples
        self.began = time.monotonic()

    def stop(self, samples: int) -> float:
        """End the interval after `samples` training sequences, and return its seconds."""
        seconds = time.monotonic() - self.began
        self.log.block_stop(samples, throughput=(samples - self.first_samples) / seconds)
        return seconds


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
    """Train until an evaluation reaches the goal: the target loss or, without one, `max_samples`.

    `lr_at`: returns the learning rate of a step. Steps count from 0.
    `batches`: this rank's micro-batches, see `train_step`.
    `eval_batches`: this rank's micro-batches of every evaluation, see `evaluate`.
    `reports`: has a meter, and a log whose last line is run_start.
    `checkpoints`: already loaded; training begins after their step.

    Raises TargetMissed if no evaluation up to `goal.max_samples` sequences reached the goal, and
    NonFinite if a loss, a gradient norm or an evaluation is not finite.
    """
    step = checkpoints.step if checkpoints else 0
    samples = step * batching.global_batch_size
    meter = reports.meter
    assert meter is not None
    phase_seconds = {"train": 0.0, "eval": 0.0}

    def on_phase(phase: str) -> None:
        reports.heartbeat.write(step, phase)  # `step` as of the call, not of the definition

    _collect_garbage_only_at_evaluations()
    meter.start()
    interval = TrainingInterval(reports.log, samples)
    loss: float | None = None  # of the last evaluation
    while samples < goal.max_samples:
        lr = lr_at(step)
        loss_part, grad_norm = train_step(assembly, batches, batching, lr, processes, on_phase)
        step += 1
        samples += batching.global_batch_size
        meter.record(step, lr, loss_part, grad_norm)
        evaluates = goal.evaluates_at(samples)
        if step % LOG_EVERY_STEPS == 0 or evaluates:
            meter.flush()
            if reports.rank_comparison:
                reports.rank_comparison.compare(step, samples, meter.seconds())
            if checkpoints and not evaluates:
                checkpoints.offer(step, evaluated=False)
                meter.clock.restart()  # a save pauses training
        if not evaluates:
            _stop_if_requested(checkpoints, meter, step)
            continue
        train_s = interval.stop(samples)
        loss, eval_s = _evaluate_and_log(
            assembly, eval_batches, batching, processes, reports, meter, step, samples
        )
        phase_seconds["train"] += train_s
        phase_seconds["eval"] += eval_s
        if goal.reached(samples, loss):
            for name, total in phase_seconds.items():
                meter.events.write("phase", name=name, seconds=total, time_s=meter.seconds())
            return TrainingOutcome(samples, loss)
        if checkpoints:
            checkpoints.offer(step, evaluated=True)
        _stop_if_requested(checkpoints, meter, step)
        meter.clock.restart()
        interval = TrainingInterval(reports.log, samples)
    meter.flush()  # steps since the last logged one, if max_samples is not at an evaluation
    raise _target_missed(goal, samples, loss)


def _stop_if_requested(checkpoints: Checkpoints | None, meter: Meter, step: int) -> None:
    """Save a checkpoint and raise Interrupted if the launcher asks for it."""
    if checkpoints and checkpoints.stop_requested():
        meter.flush()  # a continued run begins with the next step
        checkpoints.save_and_stop(step)


def _target_missed(goal: Goal, samples: int, loss: float | None) -> TargetMissed:
    """Return the error after `samples` training sequences. `loss`: of the last evaluation."""
    why = "no evaluation took place before max_samples"
    if loss is not None:
        why = f"the last evaluation had loss {loss:.4f}, above the target of {goal.target_loss}"
    return TargetMissed(
        f"target {goal.target_loss} not reached within {samples:,} sequences",
        why,
        "compare the loss curve in report.html with an earlier run; "
        "raise max_samples if it is still falling",
    )


def _collect_garbage_only_at_evaluations() -> None:
    """Disable Python's automatic garbage collection, which would stall all ranks within a step.

    `_evaluate_and_log` collects explicitly, without the objects that exist now.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def _evaluate_and_log(
    assembly: Assembly,
    batches: list[Tensor],
    batching: Batching,
    processes: Processes,
    reports: Reports,
    meter: Meter,
    step: int,
    samples: int,
) -> tuple[float, float]:
    """Evaluate and log. Return (loss, seconds).

    Raises NonFinite if the loss is not finite.
    """
    log = reports.log
    began = time.monotonic()
    log.eval_start(samples)
    loss = evaluate(
        assembly.model,
        batches,
        processes,
        lambda phase: reports.heartbeat.write(step, phase),
        per_token=batching.counted is not None,
    )
    gc.collect()
    seconds = time.monotonic() - began
    meter.events.write(
        "eval", step=step, samples=samples, loss=loss, seconds=seconds, time_s=meter.seconds()
    )
    fields = assembly.linear.evaluated(loss)
    if fields:
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
