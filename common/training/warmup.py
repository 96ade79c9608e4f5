"""Warm-up: run synthetic steps before run_start, then restore the training state exactly.

The first steps are slow, because kernels are compiled and communicators and memory are set up. The
rules allow a warm-up before run_start, because it reads no data and leaves the state as freshly
initialized. Weights are not copied and restored. The steps run at learning rate 0, where AdamW
computes w -= 0*wd*w + 0*update. This can change only the sign of -0.0, and no initial weight is
-0.0. Moments, step counts, FP8 scales and random generators are reset. `state_digest` must be the
same before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.errors import NonFinite, PreflightError
from common.sharding.processes import Processes
from common.training.assembly import Assembly, Batching
from common.training.digest import state_digest
from common.training.loop import evaluate, train_step

TRAIN_STEPS = 2
EVAL_STEPS = 1
# Micro-batches of a synthetic step: the first one, and one that adds to its gradients. More would
# launch the same kernels again: all 16 of a step would take 17 s more on one H200.
MICRO_BATCHES = 2


def warm_up(
    assembly: Assembly,
    batching: Batching,
    micro_batch_sizes: tuple[int, int],
    processes: Processes,
    on_phase: Callable[[str], None],
) -> str:
    """Run synthetic training steps at learning rate 0 and an evaluation, then restore the state.

    `micro_batch_sizes`: sequences per micro-batch of training and of evaluation.

    Returns the digest of the state. Raises PreflightError if the state has changed, and NonFinite
    if a loss or a gradient norm is not finite. In both cases the run must not start.
    """
    device = processes.device
    model = assembly.model
    vocab_size = model.shape.vocab_size
    length = model.max_sequence_length
    train_size, eval_size = micro_batch_sizes
    batches = synthetic_batches(vocab_size, length, processes, train_size)
    eval_batches = synthetic_batches(vocab_size, length, processes, eval_size)
    micro_batches = min(MICRO_BATCHES, batching.gradient_accumulation_steps)
    batching = replace(batching, gradient_accumulation_steps=micro_batches)
    state = [tensor.detach() for tensor in assembly.state_tensors()]
    before = state_digest(state, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        results: list[Tensor | float] = []  # losses and gradient norms
        for _ in range(TRAIN_STEPS):
            loss, norm = train_step(assembly, batches, batching, 0.0, processes, on_phase)
            results += [loss, norm]
        for _ in range(EVAL_STEPS):
            results.append(evaluate(model, [next(eval_batches)], processes, on_phase))
    if not all(math.isfinite(result) for result in results):
        raise NonFinite(
            "the synthetic warm-up gave a loss or a gradient norm that is not finite",
            "a kernel, a tuned GEMM or a GPU computes wrong values, or loaded weights are not "
            "finite: training on real data would fail in the same way",
            'run preflight; try linear = "bf16"',
        )
    assembly.reset()
    after = state_digest(state, device)
    if after != before:
        raise PreflightError(
            "the synthetic warm-up changed the training state",
            "the digest of weights, optimizer, scales and generators "
            f"was {before[:16]} and is {after[:16]}",
            "this is an internal error: please report it with the config and the versions",
        )
    return after


def synthetic_batches(
    vocab_size: int, sequence_length: int, processes: Processes, micro_batch_size: int
) -> Iterator[Tensor]:
    """Yield random tokens and labels forever, int32 [micro batch, 2, sequence] on the device.

    The same four batches are repeated.
    """
    # Not torch's global generator, which must not change.
    generator = np.random.default_rng(processes.data_rank)
    shape = (micro_batch_size, 2, sequence_length)
    batches = [
        torch.from_numpy(generator.integers(0, vocab_size, shape, np.int32)).to(processes.device)
        for _ in range(4)
    ]
    while True:
        yield from batches
