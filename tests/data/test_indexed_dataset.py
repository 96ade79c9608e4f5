"""Our `.bin/.idx` against Megatron's reader and writer, and against damage."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import HEADER, stored_documents, stored_sequences
from common.data.indexed_dataset_writer import IndexedDatasetWriter, token_dtype
from common.errors import DataError

pytestmark = pytest.mark.quick

DOCUMENTS = [[1, 2, 3], [7], [499, 0, 12, 13, 14]]


def write(prefix, documents=DOCUMENTS, vocab_size=500):
    writer = IndexedDatasetWriter(prefix, vocab_size)
    for document in documents:
        writer.add(document)
    return writer.finish()


@pytest.mark.parametrize(
    ("vocab_size", "name", "code"),
    [(500, "uint16", 8), (65499, "uint16", 8), (65500, "int32", 4), (128256, "int32", 4)],
)
def test_round_trip_and_dtype(tmp_path, vocab_size, name, code):
    documents = [*DOCUMENTS, [vocab_size - 1]]
    index = write(tmp_path / "a.b_text_document", documents, vocab_size)
    assert index.dtype.name == token_dtype(vocab_size).name == name
    assert (tmp_path / "a.b_text_document.idx").read_bytes()[17] == code
    assert (index.num_documents, index.num_sequences, index.num_tokens) == (4, 4, 10)
    assert index.sequence_lengths.tolist() == [
        3,
        1,
        5,
        1,
    ] and index.document_boundaries.tolist() == [0, 1, 2, 3, 4]
    with index.open_tokens() as tokens:
        assert tokens.read(0, 10).tolist() == [id for document in documents for id in document]
        assert tokens.read_sequence(2, 1, 3).tolist() == [0, 12, 13]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.b_text_document.bin",
        "a.b_text_document.idx",
    ]


def test_index_of_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.indexed_dataset.CHUNK", 7)
    lengths = np.random.RandomState(0).randint(1, 9, 50)
    index = write(tmp_path / "c", [np.arange(n) for n in lengths])
    np.testing.assert_array_equal(index.sequence_lengths, lengths)
    np.testing.assert_array_equal(
        index.sequence_offsets, np.concatenate(([0], np.cumsum(lengths)[:-1])) * 2
    )


@pytest.mark.parametrize("vocab_size", [500, 128256])
def test_megatron_reads_our_files(megatron, tmp_path, vocab_size):
    write(tmp_path / "ours", vocab_size=vocab_size)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [
        0,
        1,
        2,
        3,
    ] and theirs.sequence_lengths.tolist() == [3, 1, 5]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons_files(megatron, tmp_path, dtype):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    write(tmp_path / "ours", vocab_size=500 if dtype is np.uint16 else 128256)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (
            tmp_path / f"ours{suffix}"
        ).read_bytes()
    with Index.read(tmp_path / "theirs").open_tokens() as tokens:
        assert tokens.read(0, 9).tolist() == [1, 2, 3, 7, 499, 0, 12, 13, 14]


def test_metadata_does_not_need_the_tokens(tmp_path):
    write(tmp_path / "p")
    (tmp_path / "p.bin").unlink()
    index = Index.read(tmp_path / "p")
    assert index.num_tokens == 9
    with pytest.raises(DataError, match=r"p\.bin"):
        index.open_tokens()


def damaged(tmp_path, change):
    write(tmp_path / "p")
    raw = bytearray((tmp_path / "p.idx").read_bytes())
    (tmp_path / "p.idx").write_bytes(change(raw) or raw)
    return tmp_path / "p"


DAMAGE = {
    "magic": (lambda raw: raw.__setitem__(slice(0, 4), b"MMAP"), "Megatron index"),
    "version": (lambda raw: raw.__setitem__(9, 2), "expected version 1, got version 2"),
    "dtype": (lambda raw: raw.__setitem__(17, 9), "got code 9"),
    "float": (lambda raw: raw.__setitem__(17, 7), "got code 7"),
    "truncated": (
        lambda raw: raw[:-1],
        "expected 102 bytes for 3 sequences and 4 boundaries, got 101",
    ),
    "header": (lambda raw: raw[:20], "a header of 34 bytes, got 20"),
    "multimodal": (lambda raw: raw + b"\0\0\0", "expected 102 bytes .*got 105 bytes"),
    "count": (
        lambda raw: raw.__setitem__(slice(18, 26), struct.pack("<Q", 2**40)),
        "expected 13194139533378 bytes",
    ),
    "length": (
        lambda raw: raw.__setitem__(slice(38, 42), struct.pack("<i", -1)),
        "-1 for sequence 1",
    ),
    "first offset": (
        lambda raw: raw.__setitem__(slice(46, 54), struct.pack("<q", 2)),
        "sequence 0 at byte 0 .*got byte 2",
    ),
    "offset": (
        lambda raw: raw.__setitem__(slice(62, 70), struct.pack("<q", 6)),
        "sequence 2 at byte 8 .*got byte 6",
    ),
    "first boundary": (
        lambda raw: raw.__setitem__(slice(70, 78), struct.pack("<q", 1)),
        "boundaries from 0 to 3, got 1 to 3",
    ),
    "last boundary": (
        lambda raw: raw.__setitem__(slice(94, 102), struct.pack("<q", 4)),
        "boundaries from 0 to 3, got 0 to 4",
    ),
    "boundary order": (
        lambda raw: raw.__setitem__(slice(78, 86), struct.pack("<q", 3)),
        "3 then 2 at document 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_index_is_named(tmp_path, kind):
    change, message = DAMAGE[kind]
    with pytest.raises(DataError, match=message) as caught:
        Index.read(damaged(tmp_path, change))
    assert str(tmp_path / "p.idx") in caught.value.what and caught.value.exit_code == 15


@pytest.mark.parametrize("kind", ["magic", "version", "dtype", "truncated", "header"])
def test_a_damaged_header_is_named_by_the_counts(tmp_path, kind):
    change, message = DAMAGE[kind]
    prefix = damaged(tmp_path, change)
    with pytest.raises(DataError, match=message):
        stored_sequences(prefix, 1)
    with pytest.raises(DataError, match=message):
        stored_documents(prefix, 8, 1)


@pytest.mark.parametrize("vocab_size", [500, 128256])  # uint16 and int32
def test_the_counts_do_not_open_the_tokens(tmp_path, monkeypatch, vocab_size):
    write(tmp_path / "p", vocab_size=vocab_size)  # 3, 1 and 5 tokens
    opened = []
    original = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags: opened.append(Path(path)) or original(path, flags)
    )
    assert [stored_sequences(tmp_path / "p", length) for length in (1, 4, 8, 9)] == [8, 2, 1, 0]
    assert [stored_documents(tmp_path / "p", 8, limit) for limit in (1, 2, 3)] == [1, 2, 2]
    assert set(opened) == {tmp_path / "p.idx"}
    (tmp_path / "p.bin").unlink()
    with pytest.raises(DataError, match=r"p\.bin"):
        stored_sequences(tmp_path / "p", 1)


@pytest.mark.parametrize("size", [0, 17, 19, 36])
def test_wrong_size_of_tokens(tmp_path, size):
    index = write(tmp_path / "p")
    (tmp_path / "p.bin").write_bytes(b"\1" * size)
    with pytest.raises(DataError, match=f"expected 18 bytes .*got {size} bytes"):
        index.open_tokens()


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_a_read_in_parts_returns_every_token(tmp_path, monkeypatch, limit):
    """A network file system may return fewer bytes than were asked for, even half a token."""
    with write(tmp_path / "p").open_tokens() as tokens:
        original = os.pread
        monkeypatch.setattr(
            os, "pread", lambda file, size, offset: original(file, min(size, limit), offset)
        )
        assert tokens.read(1, 8).tolist() == [2, 3, 7, 499, 0, 12, 13, 14]


def test_tokens_cut_while_open(tmp_path):
    tokens = write(tmp_path / "p").open_tokens()
    (tmp_path / "p.bin").write_bytes(b"\1\0" * 4)
    with pytest.raises(DataError, match="got 4"):
        tokens.read(0, 9)


def test_an_index_that_is_cut_after_it_was_read_does_no_harm(tmp_path):
    """Mapped into memory it would end the process with SIGBUS."""
    index = write(tmp_path / "p", [[1, 2]] * 3000)
    os.truncate(tmp_path / "p.idx", 0)
    assert index.sequence_lengths.sum() == 6000 and index.sequence_offsets[-1] == 2 * 2 * 2999
    with pytest.raises(DataError, match="header"):
        Index.read(tmp_path / "p")


def test_missing_index(tmp_path):
    with pytest.raises(DataError, match=r"gone\.idx"):
        Index.read(tmp_path / "gone")


def test_writer_refuses_ids_that_do_not_fit(tmp_path):
    writer = IndexedDatasetWriter(tmp_path / "p", 2048)
    for bad in ([5, 128000], [-1], [2048]):
        with pytest.raises(DataError, match="2047"):
            writer.add(bad)
    with pytest.raises(DataError, match="non-empty"):
        writer.add([])
    with pytest.raises(DataError, match="document"):
        writer.finish()
    assert not (tmp_path / "p.idx").exists() and not (tmp_path / "p.bin").exists()


def test_header_is_34_bytes():
    assert HEADER.size == 34
