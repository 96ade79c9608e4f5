"""The sequences of an evaluation, spread over the validation file, and epochs of a run."""

import numpy as np
import pytest
from jobs import write_int64

from common import config as configs
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import DataError
from common.paths import ROOT
from open_llama.data import Documents, epochs_text, sequences_in, spread, spread_windows
from open_llama.rules import Config

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


@pytest.mark.parametrize("wrong", [2**32 + 7, 9 - 2**32])
def test_ids_that_a_cast_to_32_bits_would_change_are_refused(tmp_path, wrong):
    write_int64(tmp_path / "p", [[5] * 9, [5, 6, wrong]])
    documents = Documents(tmp_path / "p", 8, VOCAB_SIZE)
    assert documents[0].dtype == np.int32 and documents[0].tolist() == [[5] * 8] * 2
    with pytest.raises(DataError, match=f"document 1.* got {wrong}$"):
        documents[1]
    with pytest.raises(DataError, match=f"got {wrong}$"):
        spread_windows(tmp_path / "p", 11, 1, VOCAB_SIZE)


@pytest.mark.parametrize(("count", "available"), [(1, 1), (3, 10), (7, 8), (10, 10)])
def test_the_numbers_differ_and_exist(count, available):
    numbers = spread(count, available)
    assert len(set(numbers)) == count
    assert min(numbers) >= 0
    assert max(numbers) < available


def config_of(**changes: str) -> Config:
    """Return a config of 320 sequences of 16 tokens."""
    few = {
        "sequence_length": "16",
        "global_batch_size": "8",
        "max_samples": "320",
        "opt_learning_rate_warmup_steps": "2",
    }
    return configs.load(ROOT / "open_llama/examples/stdlib_10m.toml", Config, few | changes)


def test_a_run_says_how_often_it_reads_the_text(prefix):
    index = Index.read(prefix)
    text = epochs_text(config_of(), index)
    # 1,600 tokens are 99 whole sequences, whose last labels need one more token.
    assert sequences_in(config_of(), index) == 99
    for words in ("1,600 tokens", "11 documents", "99 sequences", "3.23 epochs", "repeats"):
        assert words in text
    assert "cut off" not in text
    once = epochs_text(config_of(max_samples="40", target_loss="3.0"), index)
    assert "up to 0.404 epochs" in once and "repeats" not in once


def test_a_run_says_what_it_cuts_off_documents(prefix):
    documents = {"one_document_per_sequence": "true"}
    text = epochs_text(config_of(**documents, sequence_length="99"), Index.read(prefix))
    assert "11 sequences" in text and "29.1 epochs" in text
    assert "700 tokens (43.8%)" in text and "100 of 1 documents" in text
    assert "cut off" not in epochs_text(
        config_of(**documents, sequence_length="799"), Index.read(prefix)
    )
