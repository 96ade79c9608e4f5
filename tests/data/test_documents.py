"""Documents of plain text in blocks, and of Parquet and Arrow files, whole and damaged."""

import errno
import gzip
import json
import tracemalloc
from operator import itemgetter

import pyarrow
import pytest
from in_this_process import InThisProcess
from pyarrow import ipc, parquet

from common.data import text_documents, text_inputs, text_parts
from common.data.preparation import input_states
from common.data.text_inputs import Source, documents
from common.errors import DataError

LINES = [f"Zeile {number} über Größe, 日本語 und \U0001f600.\r\n" for number in range(400)]


def read(path, key="text", blank_lines=False):
    """Return the documents of each source of a file."""
    sources = text_inputs.sources_of(path, blank_lines)
    return [list(documents(source, key, blank_lines)) for source in sources]


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize("text", ["".join(LINES), "日本語" * 4000, "\n" * 900, "a" * 500 + "\n"])
@pytest.mark.parametrize("part", [97, 1000])
def test_plain_text_is_divided_at_lines_or_characters(text, part, tmp_path, monkeypatch):
    monkeypatch.setattr(text_inputs, "PART_BYTES", part)
    monkeypatch.setattr(text_inputs, "BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode("utf-8-sig"))
    sources = read(path)
    assert "".join(map("".join, sources)) == text
    assert len(sources) == -(-path.stat().st_size // part)
    if text == "".join(LINES):
        assert all(each[-1].endswith("\n") for each in sources if each[-1])
        assert [len(read(path, blank_lines=True))] == [1], "a document may be in two parts"


def test_plain_text_is_read_by_blocks(tmp_path):
    path = tmp_path / "a.txt"
    size = 20 * text_documents.LONGEST_TEXT
    path.write_bytes(b"".join(b"%d bottles\n" % number for number in range(size // 12)))
    tracemalloc.start()
    texts = sum(len(text) for text in documents(Source(str(path), 0, path.stat().st_size), "text"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == path.stat().st_size and peak < size / 2


@pytest.mark.parametrize("place", [0, 63, 64, 65, 5000])
def test_plain_text_that_is_no_utf8_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(text_inputs, "BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * place + b"\xff" + b"b" * 100)
    with pytest.raises(DataError, match=r"a.txt: not UTF-8"):
        read(path)
    path.write_bytes(b"a" * place + "é".encode()[:1])  # cut off in a character
    with pytest.raises(DataError, match=r"a.txt: not UTF-8"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.JSON.ZST", "a.txt.zst"])
def test_zstandard_is_read_by_frames(name, tmp_path):
    content = "".join(LINES)
    if "txt" not in name:
        content = "".join(json.dumps({"text": line}) + "\n" for line in LINES)
    half = len(content) // 2
    path = tmp_path / name
    path.write_bytes(zstd(content[:half].encode()) + zstd(content[half:].encode()))
    (found,) = read(path)
    assert "".join(found) == "".join(LINES)
    for damaged in (path.read_bytes()[:-9], path.read_bytes() + b"junk of 12 b", b"no zstd at all"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            read(path)


def arrays(texts: list[bytes]) -> dict:
    """Return string arrays of these bytes, which pyarrow does not check."""
    binary = pyarrow.array(texts)
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), binary.buffers())
    large = pyarrow.array(texts, pyarrow.large_binary()).buffers()
    return {
        "string": text,
        "large": pyarrow.Array.from_buffers(pyarrow.large_string(), len(texts), large),
        "dictionary": text.dictionary_encode(),
    }


def write(path, array, **options):
    table = pyarrow.table({"text": array, "other": range(len(array))})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **options)
        return
    new = ipc.new_stream if "stream" in path.name else ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as out:
        out.write_table(table, max_chunksize=5)


FILES = ["a.parquet", "stream.arrow", "file.arrow"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["string", "large", "dictionary"])
@pytest.mark.parametrize("key", ["text", itemgetter("text")], ids=["column", "record"])
def test_bytes_that_are_no_utf8_name_their_row(key, kind, name, tmp_path):
    array = arrays([b"good %d" % number for number in range(12)] + [b"ok \xff bad", b"good"])[kind]
    path = tmp_path / name
    write(path, array, row_group_size=5)
    with pytest.raises(DataError) as caught:
        read(path, key)
    place = "row 1 or later" if kind == "dictionary" else "row 13:"  # all use the dictionary
    assert str(path) in caught.value.what and place in caught.value.what


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("value, words", [(None, "NoneType"), (7, "int"), (["a"], "list")])
def test_a_row_without_text_is_named(value, words, name, tmp_path):
    path = tmp_path / name
    write(path, pyarrow.array([*["good"] * 7, value] if value is None else [value] * 8))
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"row {8 if value is None else 1}: text is {words}" in caught.value.what


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("offsets", [(0, 10**9, 5), (0, -4, 5), (5, 0, 5)])
def test_offsets_that_lie_are_refused(name, offsets, tmp_path):
    buffer = pyarrow.array(offsets, pyarrow.int32()).buffers()[1]
    text = pyarrow.array([b"aaaaa", b"b"]).buffers()[2]
    write(tmp_path / name, pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, buffer, text]))
    with pytest.raises(DataError, match=name):
        read(tmp_path / name)


def test_columns_beside_the_text_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    blob = b"".join(number.to_bytes(4) for number in range(50_000))
    table = {"text": ["a", "b"], "blob": [blob, blob[::-1]], "a.b": ["c", "d"]}
    parquet.write_table(pyarrow.table(table), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    place = content.index(blob[:400]) - 4  # the length before it
    path.write_bytes(content[:place] + b"\xff" * 4 + content[place + 4 :])
    with pytest.raises(pyarrow.ArrowInvalid):
        parquet.read_table(path)
    assert read(path) == [["a", "b"]] and read(path, "a.b") == [["c", "d"]]
    with pytest.raises(DataError, match="no column missing"):
        read(path, "missing")
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(twice, path)
    for key, words in (("text", "several columns"), (itemgetter("text"), "duplicate")):
        with pytest.raises(DataError, match=words):
            read(path, key)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz", "a.txt.zst", *FILES])
def test_the_progress_reaches_all_bytes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    seen = []
    progress = text_parts.Progress.at
    monkeypatch.setattr(
        text_parts.Progress, "at", lambda self, done: seen.append(done) or progress(self, done)
    )
    path = tmp_path / name
    if name in FILES:
        write(path, pyarrow.array(LINES))
    else:
        texts = LINES if "txt" in name else [json.dumps({"text": each}) + "\n" for each in LINES]
        content = "".join(texts).encode()
        compress = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
        path.write_bytes(compress(content))
    work = text_parts.Work(tmp_path, lambda path: lambda texts: [[1]] * len(texts), 2, "text")
    identity = {"inputs": input_states([path])}
    prefix = {"train": tmp_path / "train"}
    pair = text_parts.write_token_files([path], work, prefix, tmp_path / "parts", identity, 1)
    assert pair["train"].documents >= 1
    size = path.stat().st_size
    bytes_read = max(done for done in seen if done > 10)  # not of the parts that are joined
    assert bytes_read == size


def test_a_read_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some text")

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(text_inputs._CountedFile, "readinto", fail)
    with pytest.raises(OSError) as caught:
        read(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
