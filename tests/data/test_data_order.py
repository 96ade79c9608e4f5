"""Compare the order of training samples with GPTDataset of megatron-core.

megatron-core is a pinned test dependency. Without it these tests fail instead of being skipped.
Set MEGATRON_WITNESS=0 to leave them out.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from jobs import INT32, write_index, write_int64

from common.data import gpt_dataset
from common.data.gpt_dataset import (
    TrainData,
    build_order,
    check_ids,
    sequences_in,
    train_batches,
    validation_tokens,
)
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import whole_sequences
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import DataError
from llama31_8b.rules import CLOSED

VOCAB = 500


def write_corpus(prefix, lengths, seed=0, vocab_size=VOCAB):
    random = np.random.RandomState(seed)
    writer = IndexedDatasetWriter(prefix, vocab_size)
    for length in lengths:
        writer.add(random.randint(0, vocab_size, length))
    writer.finish()
    return prefix


def witness(megatron, prefix, sequence_length, num_samples, seed, cache, split="train"):
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB, unique_identifiers={"tokenizer": "none"}, pad=-1, eod=-2
    )
    config = megatron.Config(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=[([str(prefix)], None), ([str(prefix)], None), None],
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low = megatron.IndexedDataset(str(prefix))
    documents = np.arange(len(low), dtype=np.int32)
    return megatron.GPTDataset(
        low, str(prefix), documents, num_samples, megatron.Split[split], config
    )


CORPORA = {
    "mixed": lambda r: r.randint(1, 90, 60),
    "short": lambda r: r.randint(1, 4, 400),  # many documents in each sample
    "long": lambda r: r.randint(300, 700, 5),  # many samples in each document
    "exact": lambda r: np.full(32, 16),  # documents end where samples do
    "one": lambda r: np.array([333]),
}


def requests(one_pass):
    """Numbers of samples within a pass, across its end, and around 80 % of the last pass."""
    wanted = [
        1,
        one_pass // 2,
        one_pass,
        one_pass + 1,
        int(1.5 * one_pass),
        int(1.79 * one_pass),
        int(1.81 * one_pass),
    ]
    return sorted(
        {
            n
            for n in [
                *wanted,
                2 * one_pass,
                2 * one_pass + 1,
                3 * one_pass,
                int(3.3 * one_pass),
                5 * one_pass + 2,
            ]
            if n > 0
        }
    )


@pytest.mark.quick
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("seed", [0, 1, 1234, 2**32 - 1])
def test_order_and_tokens_equal_megatron(megatron, tmp_path, corpus, seed):
    lengths = CORPORA[corpus](np.random.RandomState(seed % 1000))
    prefix = write_corpus(tmp_path / "corpus.v1_text_document", lengths, seed % 1000)
    separate_seen = set()
    for sequence_length in (16, 33):
        for num_samples in requests(whole_sequences(int(lengths.sum()), sequence_length)):
            theirs = witness(
                megatron, prefix, sequence_length, num_samples, seed, tmp_path / "cache"
            )
            ours = TrainData(prefix, sequence_length, num_samples, seed, VOCAB)
            assert len(ours) == len(theirs) >= num_samples
            np.testing.assert_array_equal(ours.document_order, theirs.document_index)
            np.testing.assert_array_equal(ours.sample_starts, theirs.sample_index)
            np.testing.assert_array_equal(ours.sample_order, theirs.shuffle_index)
            assert (
                ours.document_order.dtype == theirs.document_index.dtype
                and ours.sample_order.dtype == theirs.shuffle_index.dtype
            )
            for i in {0, 1, len(ours) // 2, len(ours) - 2, len(ours) - 1} & set(range(len(ours))):
                text = theirs[i]
                np.testing.assert_array_equal(
                    ours[i], np.append(text["tokens"].numpy(), text["labels"].numpy()[-1])
                )
            separate_seen.add(_has_separate_final_epoch(lengths, sequence_length, num_samples))
    assert separate_seen == {False, True}, "the requests must reach both branches"


def _has_separate_final_epoch(lengths, sequence_length, num_samples):
    """Steps 1 and 2 once more, with Megatron's own loop, to know which branch a request takes."""
    tokens, epochs = int(lengths.sum()), 1
    while epochs * tokens < num_samples * sequence_length + 1:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // sequence_length
    return epochs > 1 and num_samples - before < int(0.8 * ((tokens - 1) // sequence_length))


def test_order_of_empty_documents_equals_megatrons_tokens(megatron, tmp_path):
    """A file may hold empty documents, although our writer refuses them."""
    lengths = np.random.RandomState(3).randint(0, 3, 300)
    prefix = write_corpus(tmp_path / "full", lengths[lengths > 0])
    write_empty_documents_into(prefix, lengths)
    theirs, ours = (
        witness(megatron, prefix, 16, 40, 7, tmp_path / "cache"),
        TrainData(prefix, 16, 40, 7, VOCAB),
    )
    for i in range(len(ours)):
        np.testing.assert_array_equal(ours[i][:-1], theirs[i]["tokens"].numpy())


def write_empty_documents_into(prefix, lengths):
    from common.data.indexed_dataset_header import HEADER, MAGIC, index_path

    ends = np.cumsum(lengths, dtype=np.int64) * 2
    parts = [
        lengths.astype("<i4"),
        np.concatenate(([0], ends[:-1])).astype("<i8"),
        np.arange(len(lengths) + 1, dtype="<i8"),
    ]
    index_path(prefix).write_bytes(
        HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1)
        + b"".join(p.tobytes() for p in parts)
    )


@pytest.mark.parametrize("seed", [1, 1234])
def test_the_references_code_shuffles_its_evaluation_set(megatron, tmp_path, seed):
    """Megatron orders the validation split like the training split.

    Other seeds therefore evaluate on other sequences, as README.md says.
    """
    prefix = write_corpus(tmp_path / "v", CORPORA["mixed"](np.random.RandomState(0)))
    one_pass = sequences_in(prefix, 16)
    theirs = witness(megatron, prefix, 16, 10 * one_pass, seed, tmp_path / "cache", "valid")
    ours = TrainData(prefix, 16, 10 * one_pass, seed, VOCAB)
    for i in range(one_pass):
        np.testing.assert_array_equal(ours[i][:-1], theirs[i]["tokens"].numpy())
    by_seed = next(train_batches(ours, one_pass // 5, one_pass // 5, 0, 1))
    np.testing.assert_array_equal(
        by_seed[:, :-1], np.stack([theirs[i]["tokens"].numpy() for i in range(one_pass // 5)])
    )
    in_file_order = validation_tokens(prefix, 16, one_pass // 5, VOCAB)[:, :-1]
    assert (
        not (np.stack([theirs[i]["tokens"].numpy() for i in range(one_pass // 5)]) == in_file_order)
        .all(axis=1)
        .any()
    )


def test_a_rule_takes_the_references_order_for_the_evaluations(tmp_path, processes):
    """278 passes over the 91,205 documents, 1,563 evaluations of 1,024 at batch 16."""
    assert CLOSED.eval_order_samples(16) == 1563 * 1024
    data = tiny.write_data(tmp_path / "data")
    losses = [
        tiny.run(
            tmp_path / f"run_{by_seed}", data, replace(tiny.TINY, eval_by_seed=by_seed)
        ).evaluations[0][1]
        for by_seed in (False, True)
    ]
    assert losses[0] != losses[1], "evaluated on the same sequences"


@pytest.mark.quick
def test_one_epoch_reads_each_token_once(tmp_path):
    prefix = write_corpus(tmp_path / "c", np.full(64, 21))
    data = TrainData(prefix, 16, sequences_in(prefix, 16), 5, VOCAB)
    starts = data.sample_starts[:, 0] * 21 + data.sample_starts[:, 1]
    np.testing.assert_array_equal(starts, 16 * np.arange(len(starts)))
    assert sorted(data.sample_order) == list(range(len(data))) and sorted(
        data.document_order
    ) == list(range(64))


@pytest.mark.quick
def test_global_batches_do_not_depend_on_ranks_or_micro_batches(tmp_path):
    prefix = write_corpus(tmp_path / "c", np.random.RandomState(0).randint(1, 60, 200))
    data = TrainData(prefix, 16, 64, 9, VOCAB)
    one = list(train_batches(data, 8, 8, 0, 1))
    assert len(one) == len(data) // 8 and one[0].shape == (8, 17) and one[0].dtype == np.int32
    for micro, world in [(4, 1), (1, 1), (4, 2), (2, 2), (1, 4), (1, 8)]:
        ranks = [list(train_batches(data, 8, micro, rank, world)) for rank in range(world)]
        accumulation = 8 // (micro * world)
        for step, batch in enumerate(one):
            here = [
                b for rank in ranks for b in rank[step * accumulation : (step + 1) * accumulation]
            ]
            np.testing.assert_array_equal(np.concatenate(here), batch)


@pytest.mark.quick
def test_validation_is_the_start_of_the_file(tmp_path):
    lengths = np.random.RandomState(0).randint(1, 60, 50)
    prefix = write_corpus(tmp_path / "v", lengths)
    with Index.read(prefix).open_tokens() as tokens:
        flat = tokens.read(0, int(lengths.sum()))
    rows = validation_tokens(prefix, 16, 10, VOCAB)
    assert rows.shape == (10, 17) and rows.dtype == np.int32
    for j in range(10):
        np.testing.assert_array_equal(rows[j], flat[j * 16 : j * 16 + 17])
    with pytest.raises(DataError, match="10000"):
        validation_tokens(prefix, 16, 10000, VOCAB)


def test_sequence_count_needs_no_token_file(tmp_path):
    prefix = write_corpus(tmp_path / "v", [33, 32])
    (tmp_path / "v.bin").unlink()
    assert sequences_in(prefix, 16) == 4  # 64 // 16: the 65th token is the last label
    with pytest.raises(DataError, match=r"v\.bin"):
        TrainData(prefix, 16, 4, 0, VOCAB)


def test_id_beyond_the_vocabulary_is_named(tmp_path):
    prefix = write_corpus(tmp_path / "c", [40, 40])
    data = TrainData(prefix, 16, 4, 0, 100)
    with pytest.raises(DataError, match=r"c\.bin: sample \d.*0 to 99, got \d"):
        for i in range(len(data)):
            data[i]
    with pytest.raises(DataError, match="first 4 sequences"):
        validation_tokens(prefix, 16, 4, 100)


@pytest.mark.parametrize("wrong", [2**32 + 7, 9 - 2**32, VOCAB, -1])
def test_ids_that_a_cast_to_32_bits_would_change_are_refused(tmp_path, wrong):
    documents = np.random.RandomState(0).randint(0, VOCAB, (8, 40))
    write_int64(tmp_path / "c", documents)
    data = TrainData(tmp_path / "c", 16, 4, 0, VOCAB)
    samples = np.stack([data[i] for i in range(len(data))])
    assert samples.dtype == np.int32
    assert (
        samples[np.argsort(data.sample_order), :-1].ravel().tolist()
        == [token for document in data.document_order for token in documents[document]][
            : 16 * len(data)
        ]
    )
    rows = validation_tokens(tmp_path / "c", 16, 4, VOCAB)
    assert rows.dtype == np.int32 and rows[0].tolist() == documents[0, :17].tolist()

    documents[:, 20] = wrong
    write_int64(tmp_path / "c", documents)
    data = TrainData(tmp_path / "c", 16, 4, 0, VOCAB)
    with pytest.raises(DataError, match=f"sample .* got {wrong}$"):
        for i in range(len(data)):
            data[i]
    with pytest.raises(DataError, match=f"got {wrong}$"):
        validation_tokens(tmp_path / "c", 16, 4, VOCAB)


def test_the_size_of_the_token_file_is_checked_before_the_order_is_built(tmp_path, monkeypatch):
    """The order of the 10^10 tokens of this index takes 10 GiB."""
    write_index(tmp_path / "c", [2_000_000_000] * 5, INT32)
    (tmp_path / "c.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(gpt_dataset, "build_order", lambda *_: pytest.fail("the order was built"))
    with pytest.raises(DataError, match="1000 bytes"):
        TrainData(tmp_path / "c", 16, 4, 0, VOCAB)


@pytest.mark.quick
def test_too_little_data_is_refused(tmp_path):
    prefix = write_corpus(tmp_path / "c", [16])
    with pytest.raises(DataError, match="cannot be drawn"):
        TrainData(prefix, 16, 1, 0, VOCAB)


def test_order_of_two_million_documents_is_vectorized(tmp_path):
    """A Python loop over 2 million documents would take seconds.

    The vectorized code takes about 3 s for 45 million.
    """
    lengths = np.random.RandomState(0).randint(50, 800, 2_000_000).astype("<i4")
    index = Index(
        tmp_path / "none",
        np.dtype("<i4"),
        lengths,
        np.cumsum(lengths, dtype=np.int64) * 4 - 4 * lengths,
        np.arange(2),
    )
    began = time.process_time()
    _, starts, order = build_order(index, 8192, 1000, 0)
    assert time.process_time() - began < 2.0
    assert len(order) == len(starts) - 1 == (int(lengths.sum(dtype=np.int64)) - 1) // 8192


def test_an_id_outside_the_vocabulary_names_what_every_benchmark_has(tmp_path):
    with pytest.raises(DataError, match="from 0 to 9, got 10") as caught:
        check_ids(np.array([3, 10]), 10, tmp_path / "train.bin", "sample 0")
    assert "tokenizer of the model" in caught.value.do and "verify" not in caught.value.do
