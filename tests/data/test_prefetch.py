"""Test Prefetcher: the order of batches, errors of the reader, and the end of its thread."""

import itertools
import time

import numpy as np
import pytest
import torch

from common.data.prefetch import Prefetcher
from common.errors import DataError

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def numbered(count: int | None = None):
    for number in itertools.count() if count is None else range(count):
        yield np.full((2, 3), number, np.int32)


def test_batches_keep_order_values_and_dtype():
    batches = list(Prefetcher(numbered(50), CPU, depth=3))
    assert [int(batch[0, 0]) for batch in batches] == list(range(50))
    assert all(
        batch.dtype == torch.int32 and batch.shape == (2, 3) and (batch == batch[0, 0]).all()
        for batch in batches
    )


def test_the_end_comes_after_the_last_batch_and_stays():
    prefetcher = Prefetcher(numbered(3), CPU, depth=8)
    deadline = time.monotonic() + 5
    while prefetcher.thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)  # the reader has finished; its batches must all come first
    assert [int(next(prefetcher)[0, 0]) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(prefetcher)


def test_an_error_of_the_reader_is_raised_in_the_consumer_after_what_came_before():
    def broken():
        yield from numbered(2)
        raise DataError("the file is damaged")

    prefetcher = Prefetcher(broken(), CPU)
    assert [int(next(prefetcher)[0, 0]) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(DataError, match="damaged"):
            next(prefetcher)


def test_it_reads_ahead_but_no_further_than_its_depth():
    produced = []

    def watched():
        for batch in numbered():
            produced.append(len(produced))
            yield batch

    Prefetcher(watched(), CPU, depth=4)
    deadline = time.monotonic() + 5
    while len(produced) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # time enough to read more
    assert len(produced) == 5  # four in the queue, one in hand


def test_the_thread_cannot_keep_a_process_alive():
    prefetcher = Prefetcher(numbered(), CPU)
    assert prefetcher.thread.daemon
