"""Initial weights, with the same bits for any number of ranks and on any device.

Each tensor is drawn whole on the CPU, by its own generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from common.sharding.processes import thread_count


def init_weights(
    model: nn.Module,
    num_layers: int,
    seed: int,
    std: float,
    set_weight: Callable[[nn.Parameter, Tensor], None],
) -> None:
    """Draw all weights and pass each to `set_weight(parameter, full)`, with `full` in fp32.

    The standard deviation is std / sqrt(2 * num_layers) for the output projections of blocks, and
    `std` for all other matrices. Norms are 1.

    Source: NeMo's `init_method_std` 0.02 and Megatron's scaled initialization of the residual
    outputs (GPT-2, section 2.3).

    Uses several threads, because 8.0e9 numbers take some 60 core-seconds. The largest tensors are
    drawn first: if one came last, a single thread would work on it for seconds. With 8 threads this
    takes 8.5 s instead of 11.4. Before, 16 threads had gained 1.4 s or more, mostly at that end.
    """
    residual_std = std / math.sqrt(2 * num_layers)

    def fill(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        if parameter.ndim == 1:
            full = torch.ones(parameter.shape)
        else:
            generator = torch.Generator().manual_seed(parameter_seed(seed, name))
            is_residual_output = name.endswith((".o.weight", ".down.weight"))
            full = torch.empty(parameter.shape)
            full.normal_(0.0, residual_std if is_residual_output else std, generator=generator)
            # Turn -0.0 into 0.0. A warm-up step at learning rate 0 would change the sign bit, and
            # warmup.py verifies that no bit of a weight changes.
            full += 0.0
        set_weight(parameter, full)

    largest_first = sorted(model.named_parameters(), key=lambda named: -named[1].numel())
    with torch.no_grad(), ThreadPoolExecutor(thread_count()) as pool:
        list(pool.map(fill, largest_first))


@torch.no_grad()
def copy_weight(parameter: nn.Parameter, full: Tensor) -> None:
    """Copy `full` to the parameter: a `set_weight` for `init_weights` without sharding."""
    parameter.copy_(full)


def parameter_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for the generator of the tensor `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
