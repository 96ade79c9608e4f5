"""Run synthetic steps before the clock (kernels, compilation, communicators, allocator), then
restore the state exactly.

The warm-up is allowed before run_start because it reads no data and the state afterwards equals the
freshly initialized one. Weights are never copied. The warm-up steps run at learning rate 0, where
AdamW leaves every bit of a weight unchanged (w -= 0*wd*w + 0*update). Moments, step counts, FP8
scales and random generators are reset. `state_digest` before and after must agree.
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
# Micro-batches of a synthetic step: the first one, and one that adds to its gradients. Further ones
# launch no other kernels. On one H200 with 16 of 0.6 s they would take 17 s.
MICRO_BATCHES = 2


def warm_up(
    assembly: Assembly,
    batching: Batching,
    micro_batch_sizes: tuple[int, int],
    processes: Processes,
    on_phase: Callable[[str], None],
) -> str:
    """Run synthetic training steps at learning rate 0 and evaluation micro-batches, then restore
    the state.

    `micro_batch_sizes`: of training and of evaluation.

    Returns the digest. Raises PreflightError if the state afterwards differs from the state before,
    and NonFinite if a loss or norm is not finite: the run must not start then.
    """
    device = processes.device
    model = assembly.model
    count = min(MICRO_BATCHES, batching.gradient_accumulation_steps)
    batching = replace(batching, gradient_accumulation_steps=count)
    batches, eval_batches = (
        synthetic_batches(model.shape.vocab_size, model.max_sequence_length, processes, size)
        for size in micro_batch_sizes
    )
    state = [tensor.detach() for tensor in assembly.state_tensors()]
    before = state_digest(state, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        values: list[Tensor] = []
        for _ in range(TRAIN_STEPS):
            values.extend(train_step(assembly, batches, batching, 0.0, processes, on_phase))
        losses = [
            evaluate(model, [next(eval_batches)], processes, on_phase) for _ in range(EVAL_STEPS)
        ]
    if not all(map(math.isfinite, [*map(float, values), *losses])):
        raise NonFinite(
            "the synthetic warm-up gave a loss or a gradient norm that is not finite",
            "a kernel, a tuned GEMM or a GPU computes wrong values, or loaded weights are not "
            "finite: training on real data would fail in the same way",
            'run preflight; try linear = "bf16"',
        )
    assembly.reset()
    if (after := state_digest(state, device)) != before:
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
    """Yield random tokens and labels without end, int32 [micro batch, 2, sequence] on the device.

    Four batches are made once and repeated.
    """
    # a separate generator: torch's global one must not change
    generator = np.random.default_rng(processes.rank)
    shape = (micro_batch_size, 2, sequence_length)
    batches = [
        torch.from_numpy(generator.integers(0, vocab_size, shape, np.int32)).to(processes.device)
        for _ in range(4)
    ]
    while True:
        yield from batches
