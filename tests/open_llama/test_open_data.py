"""The sequences of an evaluation, spread over the validation file."""

import numpy as np
import pytest

from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import DataError
from open_llama.data import spread, spread_windows

VOCAB_SIZE = 100


@pytest.fixture
def prefix(tmp_path):
    """A token file whose first document, of token 1, is half of it. Ten others have token 2."""
    writer = IndexedDatasetWriter(tmp_path / "validation", VOCAB_SIZE)
    writer.add(np.full(800, 1, np.uint16))
    for _ in range(10):
        writer.add(np.full(80, 2, np.uint16))
    writer.finish()
    return tmp_path / "validation"


def test_a_long_document_has_no_larger_share_of_an_evaluation_than_of_the_file(prefix):
    windows = spread_windows(prefix, 16, 20, VOCAB_SIZE)
    assert windows.shape == (20, 17)
    assert windows.dtype == np.int32
    assert (windows == 1).mean() == pytest.approx(0.5, abs=0.05)


def test_all_sequences_of_a_file_are_its_stream(prefix):
    windows = spread_windows(prefix, 16, 99, VOCAB_SIZE)
    stream = np.repeat([1, 2], 800)
    assert np.array_equal(windows[:, :-1].ravel(), stream[: 99 * 16])
    assert np.array_equal(windows[:, -1], stream[16 : 99 * 16 + 1 : 16])


def test_an_id_outside_the_vocabulary_is_refused(prefix):
    with pytest.raises(DataError, match="0 to 1"):
        spread_windows(prefix, 16, 20, 2)


@pytest.mark.parametrize(("count", "available"), [(1, 1), (3, 10), (7, 8), (10, 10)])
def test_the_numbers_differ_and_exist(count, available):
    numbers = spread(count, available)
    assert len(set(numbers)) == count
    assert min(numbers) >= 0
    assert max(numbers) < available
