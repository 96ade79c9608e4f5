"""Order of samples that are shuffled anew in each epoch, and a rank's share of each step.

Epoch e is the e-th permutation of the samples drawn from one `numpy.random.RandomState(seed)`, a
legacy generator whose stream is frozen. Epochs follow each other without a gap, so a batch may hold
the end of one and the beginning of the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np


def shuffled_epochs(count: int, seed: int) -> Iterator[int]:
    """Yield sample numbers without end: one permutation of all `count` samples after another."""
    random = np.random.RandomState(seed)
    while True:
        yield from random.permutation(count).tolist()


def shuffled_micro_batches(
    count: int,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    step: int = 0,
) -> Iterator[list[int]]:
    """Yield the sample numbers of this rank's micro-batches from `step` on, without end.

    `count`: number of samples.

    A step has global_batch_size / (micro_batch_size * world_size) micro-batches on each rank. Step
    s trains on the global_batch_size samples from s * global_batch_size on, for any number of
    ranks. Each rank takes a contiguous share of them and cuts it into micro-batches.
    """
    share = global_batch_size // world_size  # samples per rank and step
    order = itertools.islice(shuffled_epochs(count, seed), step * global_batch_size, None)
    while True:
        samples_of_step = list(itertools.islice(order, global_batch_size))
        own = samples_of_step[rank * share : (rank + 1) * share]
        for start in range(0, share, micro_batch_size):
            yield own[start : start + micro_batch_size]
