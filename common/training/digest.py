"""Hashes of tensors' bits, computed on their device, to prove that a state has not changed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_CHUNK = 1 << 24  # int32 words hashed at a time: 128 MiB as int64 on the device
# Constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). They are signed, as torch requires.
_GOLDEN, _MIX_1, _MIX_2 = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def fingerprint(tensor: Tensor, first: int = 0) -> int:
    """Return a signed 64-bit hash of a tensor's bits, computed on its device.

    The hash is the sum over i of mix(word_i + i * golden), modulo 2^64, over the signed 32-bit
    words of the tensor, with i counted from `first`. mix is a shortened form of splitmix64's output
    function, in signed arithmetic:

        x *= mix_1;  x = (x ^ (x >> 30)) * mix_2;  x ^ (x >> 31)

    The sum over the parts of a tensor is the hash of the whole. Words are mixed with their
    positions before the sum, so swapped values and opposite changes do not cancel.
    """
    words = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -words.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(first + start, first + start + part.numel(), device=tensor.device)
        mixed = (part + index * _GOLDEN) * _MIX_1
        mixed = (mixed ^ (mixed >> 30)) * _MIX_2
        total += (mixed ^ (mixed >> 31)).sum()
    return int(total)


def state_digest(tensors: list[Tensor], device: torch.device) -> str:
    """Return a hex digest of this rank's training state.

    `tensors`: weights, optimizer state and FP8 scales. The digest includes the random generators.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(fingerprint(tensor).to_bytes(8, "little", signed=True))
    digest.update(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return digest.hexdigest()
