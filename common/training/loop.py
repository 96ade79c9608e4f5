"""The loop, once, for both benchmarks: train() and evaluate(). It takes finished things and calls nobody back.

The loss of a step is the mean over the global batch of each sequence's mean over its valid tokens. Where all tokens count, as
in pre-training, that is the mean over all tokens; where a mask leaves some out, it is what the LoRA reference does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import NonFinite, TargetMissed
from common.kernels.cross_entropy import IGNORE_INDEX
from common.model.llama import Llama
from common.sharding.processes import Heartbeat, Processes
from common.training.build import mark_micro_batch
from common.training.metrics import Meter
from common.training.mllog import RunLog
from common.training.optimizer import ClippedAdamW
from common.training.rank_comparison import RankComparison


@dataclass(frozen=True)
class Batching:
    """How a global batch is cut: sequences per step, micro-batches per rank and step, and how weights travel in between."""

    global_batch_size: int
    gradient_accumulation_steps: int
    reshard_after_forward: bool


def train_step(
    model: Llama,
    optimizer: ClippedAdamW,
    batches: Iterator[Tensor],
    batching: Batching,
    learning_rate: float,
    world_size: int,
    beat: Callable[[str], None],
) -> tuple[Tensor, Tensor]:
    """One optimizer step. `batches` yields int [micro batch, 2, sequence] on the device: tokens and labels.

    Returns (this rank's part of the loss, gradient norm), both fp32 [] on the device; the host waits for neither.
    """
    loss_part = torch.zeros((), device=optimizer.shards[0].device)
    for micro_step in range(batching.gradient_accumulation_steps):
        beat("data")
        batch = next(batches)
        beat("compute")
        mark_micro_batch(model, micro_step == batching.gradient_accumulation_steps - 1, batching.reshard_after_forward)
        loss_sum, count = model(*batch.unbind(1))
        loss = (loss_sum / count).sum() / batching.global_batch_size
        # Gradients are averaged over the ranks; each rank's loss is its part of the whole, so the average must become a sum.
        (loss * world_size).backward()
        loss_part += loss.detach()
    beat("optimizer")
    model.backward_done()
    grad_norm = optimizer.step(learning_rate)
    optimizer.zero_grad()
    model.step_done()
    return loss_part, grad_norm


@torch.no_grad()
def evaluate(model: Llama, batches: Iterable[Tensor], processes: Processes, beat: Callable[[str], None]) -> float:
    """Mean over all sequences, of all ranks, of each one's mean loss over its valid tokens; a sequence without any has no weight.

    `batches`: int [sequences, 2, length], tokens and labels, resident on the device; label -100 does not count. Sums are fp64.
    """
    model.eval()  # no dropout
    totals = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for batch in batches:
        beat("evaluation")
        loss_sum, count = model(*batch.unbind(1))
        weighs = count > 0
        totals[0] += torch.where(weighs, loss_sum / count.clamp(min=1), 0.0).double().sum()
        totals[1] += weighs.sum()
    model.train()
    total, sequences = processes.sum(totals).tolist()
    return total / sequences


def next_token_pairs(windows: np.ndarray) -> np.ndarray:
    """int [sequences, length + 1] -> [sequences, 2, length]: tokens, and as labels the token that follows each."""
    return np.stack((windows[:, :-1], windows[:, 1:]), axis=1)


def pad_for_ranks(sequences: np.ndarray, processes: Processes, micro_batch_size: int) -> list[Tensor]:
    """Cut int [sequences, 2, length] into this rank's micro-batches, on the device.

    Where they do not divide, sequences of ignored labels fill up: every rank runs as many forwards, and padding has no weight.
    """
    missing = -len(sequences) % (processes.world_size * micro_batch_size)
    padding = np.zeros((missing, *sequences.shape[1:]), sequences.dtype)
    padding[:, 1] = IGNORE_INDEX
    mine = np.split(np.concatenate((sequences, padding)), processes.world_size)[processes.rank]
    return list(torch.from_numpy(mine).to(processes.device).split(micro_batch_size))


@dataclass(frozen=True)
class Outcome:
    samples: int  # train sequences consumed
    loss: float  # of the last evaluation


def train(
    *,
    model: Llama,
    optimizer: ClippedAdamW,
    lr_at: Callable[[int], float],
    batches: Iterator[Tensor],
    eval_batches: list[Tensor],
    batching: Batching,
    eval_interval: int,
    first_evaluation: int,
    target_loss: float,
    max_samples: int,
    log_every_steps: int,
    processes: Processes,
    log: RunLog,
    meter: Meter,
    heartbeat: Heartbeat,
    ranks: RankComparison | None = None,
) -> Outcome:
    """Train until an evaluation is <= `target_loss`. The log's clock has started, its first block has not.

    Evaluations come after every `eval_interval` sequences, from `first_evaluation` (a multiple of it) on.

    Raises TargetMissed after `max_samples` sequences, NonFinite where loss, gradient norm or evaluation is not finite.
    """
    step, samples = 0, 0
    beat = lambda phase: heartbeat.beat(step, phase)  # noqa: E731 - reads the current step
    phases = {"train": 0.0, "eval": 0.0}
    # A collection in the middle of a step stalls all ranks: what lives now is frozen, the rest is collected at evaluations.
    gc.collect()
    gc.freeze()
    gc.disable()
    meter.start()
    log.block_start(samples)
    block_samples, block_began = samples, time.monotonic()
    while samples < max_samples:
        lr = lr_at(step)
        loss_part, grad_norm = train_step(model, optimizer, batches, batching, lr, processes.world_size, beat)
        step, samples = step + 1, samples + batching.global_batch_size
        meter.record(step, lr, loss_part, grad_norm)
        evaluates = samples % eval_interval == 0 and samples >= first_evaluation
        if step % log_every_steps == 0 or evaluates:
            meter.flush(next_eval_samples=max(first_evaluation, -(-samples // eval_interval) * eval_interval))
        if not evaluates:
            continue
        block_s = time.monotonic() - block_began
        log.block_stop(samples, (samples - block_samples) / block_s)
        if ranks:  # in the pause between blocks, while the GPUs are hot
            ranks.compare(step, samples, meter.seconds())
        eval_began = time.monotonic()
        log.eval_start(samples)
        loss = evaluate(model, eval_batches, processes, beat)
        gc.collect()
        eval_s = time.monotonic() - eval_began
        phases["train"], phases["eval"] = phases["train"] + block_s, phases["eval"] + eval_s
        meter.events.write("eval", step=step, samples=samples, loss=loss, seconds=eval_s, time_s=meter.seconds())
        if model.scaling is not None:
            meter.events.write("fp8", step=step, clipped_elements=model.scaling.take_clipped(), time_s=meter.seconds())
        if loss != loss or abs(loss) == float("inf"):
            raise NonFinite(
                f"evaluation at {samples} samples: loss {loss}", "the weights or activations are not finite", "look at events.jsonl"
            )
        log.eval_accuracy(samples, loss)
        log.eval_stop(samples)
        meter.progress.show(f"evaluation at {samples:,} samples: loss {loss:.4f}, target {target_loss} ({eval_s:.1f} s)", final=True)
        if loss <= target_loss:
            for name, seconds in phases.items():
                meter.events.write("phase", name=name, seconds=seconds, time_s=meter.seconds())
            return Outcome(samples, loss)
        meter.clock.restart()
        log.block_start(samples)
        block_samples, block_began = samples, time.monotonic()
    raise TargetMissed(
        f"target {target_loss} not reached within {samples:,} samples",
        "the last evaluation was above the target when max_samples was used up",
        "compare the loss curve in report.html with an earlier run; raise max_samples if it is still falling",
    )
