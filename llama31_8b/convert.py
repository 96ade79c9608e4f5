"""`prepare convert`: text to Megatron's .bin/.idx with a SentencePiece model. A killed conversion continues and gives the same bytes."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from common.data import corpus
from common.data.indexed_dataset import Index, index_path, tokens_path
from common.data.indexed_dataset_writer import Writer
from common.data.manifest import sha256_of, write_whole
from common.data.preparation import Bar, locked, say
from common.errors import ConfigError, DataError, StorageError

BATCH_DOCUMENTS = 512  # encoded in one call, on all cores
CHECKPOINT_SECONDS = 10.0


@dataclass
class Checkpoint:
    """Progress of a conversion: the partial output holds the first `read` documents of the inputs, and nothing of the others."""

    job: dict[str, Any]  # inputs with sizes, tokenizer, key: only the same job can continue
    read: int = 0
    documents: int = 0  # written: those without a token are left out, as Megatron's preprocessor does
    tokens: int = 0

    @classmethod
    def load(cls, path: Path, job: dict[str, Any]) -> Checkpoint:
        """The checkpoint at `path`, or a new one. Raises DataError if it belongs to another conversion."""
        if not path.exists():
            return cls(job)
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            what, do = f"{path}: not a checkpoint: {error}", "delete it and the .partial files, and start again"
            raise DataError(what, "the file is damaged", do) from error
        if found.job != job:
            why = "its inputs, their sizes, the tokenizer or the key differ from those given now"
            do = "give the same arguments, choose another --output-prefix, or delete it with the .partial files beside it"
            raise DataError(f"{path}: belongs to another conversion", why, do)
        return found

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self)).encode())


def convert(inputs: list[Path], tokenizer_path: Path, prefix: Path, key: str, checkpoint_seconds: float = CHECKPOINT_SECONDS) -> Index:
    """Tokenize `inputs` into `<prefix>.bin/.idx`, one sequence per document, without bos or eos, as the reference's preprocessing.

    `.jsonl` and `.json` files have one object per line, as C4 does, with the document in `key`; in `.txt` files blank lines separate
    documents. All are streamed, and may be compressed (`.gz`). A killed conversion continues from `<prefix>.checkpoint.json` when it is
    started again with the same arguments: it reads what is converted already once more, but does not tokenize it. Raises ConfigError,
    DataError, StorageError.
    """
    tokenizer = corpus.load_sentencepiece(tokenizer_path)
    job = {"inputs": [_input_facts(path) for path in inputs], "tokenizer_sha256": sha256_of(tokenizer_path), "key": key}
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with locked(prefix.with_name(f".{prefix.name}.lock")):
        checkpoint_path = Path(f"{prefix}.checkpoint.json")
        state = Checkpoint.load(checkpoint_path, job)
        if index_path(prefix).exists() or (tokens_path(prefix).exists() and not checkpoint_path.exists()):
            return _already_there(prefix, checkpoint_path)
        if state.read:
            say(f"continuing after {state.read:,} documents")
        writer = Writer(prefix, tokenizer.vocab_size(), state.documents, state.tokens)

        def save() -> None:
            state.documents, state.tokens = writer.flush()  # first the data: a checkpoint never names what is not on the disk
            state.save(checkpoint_path)

        try:
            _encode_all(inputs, key, tokenizer, writer, state, save, checkpoint_seconds)
            index = writer.finish()
        finally:
            writer.close()
        checkpoint_path.unlink()
    counts = f"{index.num_documents:,} documents, {index.num_tokens:,} tokens as {index.dtype.name}"
    say(f"{prefix}: {counts}; {state.read - state.documents} empty documents left out")
    return index


def _input_facts(path: Path) -> dict[str, Any]:
    _reader_of(path)
    try:
        return {"path": str(path), "size": path.stat().st_size}
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}", "it was given as --input", "check the name") from error


def _reader_of(path: Path) -> Callable[[Iterable[bytes], Path, str], Iterator[str]]:
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return _json_documents
    if name.endswith(".txt"):
        return _text_documents
    raise ConfigError(f"{path}: unknown kind of input", "its name does not end in .jsonl, .json or .txt (or .gz)", "rename or convert it")


def _already_there(prefix: Path, checkpoint_path: Path) -> Index:
    """The output exists. If a kill came after the last rename, only the checkpoint is left over; otherwise it is not ours to overwrite."""
    if not checkpoint_path.exists():
        do = "remove it yourself, or choose another --output-prefix"
        raise StorageError(f"{prefix}.bin/.idx: exists already", "nothing is overwritten", do)
    index = Index.read(prefix)
    index.check_token_file_size()
    Path(f"{prefix}.lengths.partial").unlink(missing_ok=True)
    checkpoint_path.unlink()
    say(f"{prefix}: was complete already")
    return index


def _encode_all(
    inputs: list[Path],
    key: str,
    tokenizer: Any,
    writer: Writer,
    state: Checkpoint,
    save: Callable[[], None],
    checkpoint_seconds: float,
) -> None:
    """Encode from `state` to the end of the last input; `save` every `checkpoint_seconds` and at the end."""
    bar, saved = Bar("converting", sum(path.stat().st_size for path in inputs)), time.monotonic()
    documents = islice(_documents(inputs, key), state.read, None)
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        for ids in tokenizer.encode([text for text, _ in batch]):
            if ids:
                writer.add(ids)
        state.read += len(batch)
        bar.at(batch[-1][1])
        if time.monotonic() - saved >= checkpoint_seconds:
            save()
            saved = time.monotonic()
    save()
    bar.finish()


def _documents(inputs: list[Path], key: str) -> Iterator[tuple[str, int]]:
    """Every document, and the number of bytes read so far, as stored."""
    done = 0
    for path in inputs:
        with path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            try:
                for text in _reader_of(path)(file, path, key):
                    yield text, done + raw.tell()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{path}: broken gzip: {error}", "the file is cut off or damaged", "fetch it again") from error
        done += path.stat().st_size


def _json_documents(file: Iterable[bytes], path: Path, key: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError) as error:
            why, do = f"each line must be a JSON object with the key {key}", "repair the line, or name the right key with --jsonl-key"
            raise DataError(f"{path}: line {number}: no document: {error!r}", why, do) from error
        if not isinstance(text, str):
            what = f"{path}: line {number}: {key} is {type(text).__name__}, not text"
            raise DataError(what, "a document must be a string", "repair the line")
        yield text


def _text_documents(file: Iterable[bytes], path: Path, key: str) -> Iterator[str]:
    block: list[str] = []
    for number, line in enumerate(chain(file, [b"\n"]), start=1):  # a blank line ends the last document too
        if line.strip():
            try:
                block.append(line.decode())
            except UnicodeDecodeError as error:
                what = f"{path}: line {number}: not UTF-8"
                raise DataError(what, "the text has another encoding", "convert it to UTF-8 first") from error
        elif block:
            yield "".join(block).rstrip("\r\n")
            block = []
