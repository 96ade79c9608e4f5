"""Hashes of tensors' bits, computed on their device, to prove that a state has not changed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_CHUNK = 1 << 24  # int32 words hashed at a time: 128 MiB as int64 on the device
# Constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), as the signed integers that torch
# supports.
_GOLDEN, _MIX_1, _MIX_2 = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def fingerprint(tensor: Tensor, first: int = 0) -> int:
    """Return a 64-bit hash of a tensor's bits, computed on its device.

    The hash is the sum over i of splitmix64(word_i + i * golden), modulo 2^64, with i counted from
    `first`. It depends on positions, so swapped values change it. Words are mixed before the sum,
    so changes do not cancel as in a linear sum. It is exact: integer arithmetic wraps and does not
    round.
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
    """Return a hex digest of everything that a warm-up could change on this rank.

    `tensors`: weights, optimizer state and FP8 scales. The random generators are added to them.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(fingerprint(tensor).to_bytes(8, "little", signed=True))
    digest.update(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return digest.hexdigest()
