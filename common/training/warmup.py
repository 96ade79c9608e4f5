"""Synthetic steps before the clock (kernels, compilation, communicators, allocator), then an exact restore, proven.

Allowed before run_start because no data is touched and the state afterwards equals the freshly initialized one. Weights are
never copied: the warm-up steps run at learning rate 0, where AdamW leaves every weight bit as it is (w -= 0*wd*w + 0*update);
moments, step counts, FP8 scales and random generators are set back. `state_digest` before and after must agree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from common.errors import NonFinite, PreflightError
from common.sharding.processes import Processes
from common.training.loop import Assembly, Batching, evaluate, train_step

TRAIN_STEPS, EVAL_STEPS = 2, 1

_CHUNK = 1 << 24  # elements hashed at a time: 128 MiB of int64 on the device
# The constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), written as the signed integers that torch has.
_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprint(tensor: Tensor, first: int = 0) -> int:
    """64-bit hash of a tensor's bits, computed where it lives: sum over i of splitmix64(word_i + i * golden), modulo 2^64, i from `first`.

    Position-dependent, so that swapped values are seen; mixed before the sum, so that changes do not cancel as in a linear sum;
    and exact: integer arithmetic wraps and does not round.
    """
    words = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -words.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(first + start, first + start + part.numel(), device=tensor.device)
        mixed = (part + place * _GOLDEN) * _MIX_1
        mixed = (mixed ^ (mixed >> 30)) * _MIX_2
        total += (mixed ^ (mixed >> 31)).sum()
    return int(total)


def state_digest(tensors: list[Tensor], device: torch.device) -> str:
    """Hex digest of everything a warm-up could change on this rank: weights, optimizer state, FP8 scales (`tensors`), random generators."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(fingerprint(tensor).to_bytes(8, "little", signed=True))
    digest.update(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return digest.hexdigest()


def warm_up(
    assembly: Assembly, batching: Batching, micro_batch_sizes: tuple[int, int], processes: Processes, beat: Callable[[str], None]
) -> str:
    """Run TRAIN_STEPS steps at learning rate 0 and EVAL_STEPS evaluation micro-batches on synthetic tokens, and restore. Returns the digest.

    `micro_batch_sizes`: of training and of evaluation. Raises PreflightError where the state afterwards differs from the state before:
    then the run must not start.
    """
    device, model = processes.device, assembly.model
    batches, eval_batches = (
        synthetic_batches(model.shape.vocab_size, model.max_sequence_length, processes, size) for size in micro_batch_sizes
    )
    state = [tensor.detach() for tensor in assembly.state_tensors()]
    before = state_digest(state, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        values = [value for _ in range(TRAIN_STEPS) for value in train_step(assembly, batches, batching, 0.0, processes, beat)]
        losses = [evaluate(model, [next(eval_batches)], processes, beat) for _ in range(EVAL_STEPS)]
    if not all(map(math.isfinite, [*map(float, values), *losses])):
        why = "training on real data would meet the same: a kernel, a tuned GEMM or a GPU computes wrong values, or loaded weights are not finite"
        raise NonFinite("the synthetic warm-up gave a loss or a gradient norm that is not finite", why, 'run preflight; try fp8 = ""')
    assembly.reset()
    if (after := state_digest(state, device)) != before:
        raise PreflightError(
            "the synthetic warm-up changed the training state",
            f"the digest of weights, optimizer, scales and generators was {before[:16]} and is {after[:16]}",
            "this is a defect: please report it, with the config and the versions",
        )
    return after


def synthetic_batches(vocab_size: int, sequence_length: int, processes: Processes, micro_batch_size: int) -> Iterator[Tensor]:
    """Endless random tokens and labels, int32 [micro batch, 2, sequence] on the device: four batches, made once, in turn."""
    generator = np.random.default_rng(processes.rank)  # its own generator: torch's global one must stay as it is
    shape = (micro_batch_size, 2, sequence_length)
    batches = [torch.from_numpy(generator.integers(0, vocab_size, shape, np.int32)).to(processes.device) for _ in range(4)]
    while True:
        yield from batches
