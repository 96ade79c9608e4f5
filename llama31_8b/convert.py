"""`prepare convert`: convert text to Megatron's token files.

The tokenizer is a SentencePiece model or Llama 3.1's tokenizer.json.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from common.atomic_write import leftovers
from common.data import corpus
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import index_path, tokens_path
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.data.preparation import input_states, locked, require_unchanged, say
from common.data.text_documents import json_documents
from common.errors import ConfigError, DataError, StorageError
from common.packages import pip_install
from common.terminal import Progress
from llama31_8b.encoder_process import EncoderProcess
from llama31_8b.rules import CLOSED

BATCH_DOCUMENTS = 512  # documents encoded in one call, on all cores


def convert(inputs: list[Path], tokenizer_path: Path, prefix: Path, key: str) -> Index:
    """Tokenize `inputs` into `<prefix>.bin/.idx`, one sequence per document.

    No document gets a bos or an eos, because the reference's `utils/preprocess.sh` calls NeMo's
    preprocessor without `--append-eod`.

    `.jsonl` and `.json` files have one object per line, as in C4, with the document in `key`. In
    `.txt` files blank lines separate documents. All inputs are streamed and may be compressed
    (`.gz`). Documents without tokens are left out, as in Megatron's preprocessor. A conversion that
    was killed starts again, even if one of its files already has its final name.

    Raises ConfigError, DataError, StorageError.
    """
    encode, vocab_size = _load_tokenizer(tokenizer_path)
    for path in inputs:
        _reader_of(path)  # raises ConfigError for an unsupported format
        if not path.is_file():
            raise DataError(f"{path}: no such file", "it was given as --input", "check the name")
    states = input_states(inputs)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with (
        EncoderProcess(encode, tokenizer_path) as encoder,
        locked(prefix.with_name(f".{prefix.name}.lock")),
    ):
        _require_no_output(prefix)
        writer = IndexedDatasetWriter(prefix, vocab_size)
        read = 0
        documents = _documents(inputs, key)
        size = sum(path.stat().st_size for path in inputs)
        with Progress("converting", size, "B") as progress:
            while batch := list(islice(documents, BATCH_DOCUMENTS)):
                for ids in filter(None, encoder.encode([text for text, _ in batch])):
                    writer.add(ids)
                read += len(batch)
                progress.at(batch[-1][1])
        if not writer.lengths:
            why = "all texts are empty" if read else "the inputs are empty"
            raise DataError("no document with a token among the inputs", why, "add text")
        require_unchanged(states)
        index = writer.finish()
    counts = f"{index.num_documents:,} documents, {index.num_tokens:,} tokens as {index.dtype.name}"
    say(f"{prefix}: {counts}; {read - index.num_documents} empty documents left out")
    return index


def _require_no_output(prefix: Path) -> None:
    """Raise StorageError if `prefix` has token files, unless a killed conversion left them."""
    # A conversion renames the .bin first, then the .idx.
    was_killed = bool(leftovers(index_path(prefix)))
    if index_path(prefix).exists() or (tokens_path(prefix).exists() and not was_killed):
        raise StorageError(
            f"{prefix}.bin/.idx: exists already",
            "nothing is overwritten",
            "remove it, or choose another --output-prefix",
        )


def _load_tokenizer(path: Path) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return a function from documents to their token ids, and the vocabulary size.

    A `.json` file must have the vocabulary size of Llama 3.1.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file", "it was given as --tokenizer", "check the name")
    if path.suffix != ".json":
        model = corpus.load_sentencepiece(path)
        return model.encode, model.vocab_size()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        why = "the package tokenizers, which reads it, cannot be imported"
        raise ConfigError(f"{path}: {error}", why, pip_install("tokenizers")) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower class
        why = "it is missing, damaged, or another file of that name"
        raise DataError(
            f"{path}: expected a tokenizer.json: {error}",
            why,
            "fetch the model's tokenizer.json again",
        ) from error
    size = tokenizer.get_vocab_size()
    expected = CLOSED.shape.vocab_size
    if size != expected:
        raise DataError(
            f"{path}: expected a vocabulary of {expected:,} tokens, got {size:,}",
            "the file belongs to another model: its ids mean other words",
            "use Llama 3.1's tokenizer.json",
        )
    tokenizer.no_truncation()  # truncation and padding may be stored in the file
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode, size


def _reader_of(path: Path) -> Callable[[Iterable[bytes], Path, str], Iterator[str]]:
    """Return the function that yields the documents of a file, by the file's name.

    Its arguments are the open file, its path and the JSON key. Raises ConfigError for an
    unsupported format.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return json_documents
    if name.endswith(".txt"):
        return _text_documents
    raise ConfigError(
        f"{path}: unsupported input format",
        "the name must end in .jsonl, .json or .txt, optionally followed by .gz",
        "rename or convert the file",
    )


def _documents(inputs: list[Path], key: str) -> Iterator[tuple[str, int]]:
    """Yield every document, with the number of stored bytes read so far."""
    done = 0
    for path in inputs:
        with path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            try:
                for text in _reader_of(path)(file, path, key):
                    yield text, done + raw.tell()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{path}: broken gzip: {error}",
                    "the file is truncated or damaged",
                    "fetch it again",
                ) from error
        done += path.stat().st_size


def _text_documents(file: Iterable[bytes], path: Path, key: str) -> Iterator[str]:
    """Yield the documents of a plain text file, which blank lines separate. `key` is not used."""
    block: list[str] = []
    # The added blank line ends the last document.
    for number, line in enumerate(chain(file, [b"\n"]), start=1):
        if line.strip():
            try:
                block.append(line.decode())
            except UnicodeDecodeError as error:
                what = f"{path}: line {number}: not UTF-8"
                raise DataError(
                    what, "the text has another encoding", "convert it to UTF-8 first"
                ) from error
        elif block:
            yield "".join(block).rstrip("\r\n")
            block = []
