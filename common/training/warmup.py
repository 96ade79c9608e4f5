"""Synthetic steps before the clock (kernels, compilation, communicators, allocator), then an exact restore, proven.

Allowed before run_start because no data is touched and the state afterwards equals the freshly initialized one. Weights are
never copied: the warm-up steps run at learning rate 0, where AdamW leaves every weight bit as it is (w -= 0*wd*w + 0*update);
moments, step counts, FP8 scales and random generators are set back. `state_digest` before and after must agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import PreflightError
from common.training.optimizer import ClippedAdamW

_CHUNK = 1 << 24  # elements hashed at a time: 128 MiB of int64 on the device
# The constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), written as the signed integers that torch has.
_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprint(tensor: Tensor) -> int:
    """64-bit hash of a tensor's bits, computed where it lives: sum over i of splitmix64(word_i + i * golden), modulo 2^64.

    Position-dependent, so that swapped values are seen; mixed before the sum, so that changes do not cancel as in a linear sum;
    and exact: integer arithmetic wraps and does not round.
    """
    words = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -words.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        mixed = (part + place * _GOLDEN) * _MIX_1
        mixed = (mixed ^ (mixed >> 30)) * _MIX_2
        total += (mixed ^ (mixed >> 31)).sum()
    return int(total)


def state_digest(weights: list[Tensor], optimizer: ClippedAdamW, data_position: int, device: torch.device) -> str:
    """Hex digest of everything a warm-up could change on this rank: weights, optimizer, random generators, data position."""
    digest = hashlib.sha256()
    for tensor in (*weights, *optimizer.state_tensors()):
        digest.update(fingerprint(tensor).to_bytes(8, "little", signed=True))
    digest.update(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    digest.update(str(data_position).encode())
    return digest.hexdigest()


def warm_up(
    train_step: Callable[[float], object],
    evaluate: Callable[[], object],
    restore: Callable[[], None],
    digest: Callable[[], str],
    *,
    train_steps: int,
    eval_steps: int,
    device: torch.device,
) -> str:
    """Run `train_step(learning_rate=0)` and `evaluate()` on synthetic tokens, restore, and return the digest.

    `restore` sets back what they changed; the random generators are set back here.

    Raises PreflightError where the state afterwards differs from the state before: then the run must not start.
    """
    before = digest()
    cpu_rng = torch.get_rng_state()
    gpu_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    for _ in range(train_steps):
        train_step(0.0)
    for _ in range(eval_steps):
        evaluate()
    restore()
    torch.set_rng_state(cpu_rng)
    if gpu_rng is not None:
        torch.cuda.set_rng_state(gpu_rng, device)
    if (after := digest()) != before:
        raise PreflightError(
            "the synthetic warm-up changed the training state",
            f"the digest of weights, optimizer, generators and data position was {before[:16]} and is {after[:16]}",
            "this is a defect: set warmup_train_steps = 0 and warmup_eval_steps = 0 to run without, and report it",
        )
    return after
