"""Test the order of shuffled samples, and that a step has the same ones for any ranks."""

from itertools import islice

import numpy as np
import pytest

from common.data.shuffled_epochs import shuffled_epochs, shuffled_micro_batches

pytestmark = pytest.mark.quick

COUNT = 10


def test_every_sample_comes_once_per_epoch():
    order = list(islice(shuffled_epochs(COUNT, seed=3), 5 * COUNT))
    epochs = [order[i : i + COUNT] for i in range(0, len(order), COUNT)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    random = np.random.RandomState(3)
    assert epochs[:2] == [random.permutation(COUNT).tolist(), random.permutation(COUNT).tolist()]


def test_seeds_differ_and_repeat():
    orders = [list(islice(shuffled_epochs(100, seed), 300)) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("first_step", [0, 4])
@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_global_batch_is_the_same_for_any_ranks(world, micro, first_step):
    """Six steps of 4 of 10 samples include batches that span two epochs."""
    passes = 4 // (world * micro)
    per_rank = [
        list(
            islice(shuffled_micro_batches(COUNT, 7, 4, micro, rank, world, first_step), 6 * passes)
        )
        for rank in range(world)
    ]
    assert all(len(part) == micro for parts in per_rank for part in parts)
    steps = [
        [n for parts in per_rank for part in parts[s * passes : (s + 1) * passes] for n in part]
        for s in range(6)
    ]
    order = list(islice(shuffled_epochs(COUNT, 7), 4 * first_step, 4 * (first_step + 6)))
    assert steps == [order[i : i + 4] for i in range(0, 24, 4)]
