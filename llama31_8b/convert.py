"""Text to Megatron's .bin/.idx with a SentencePiece model, resumable after a kill with the same bytes as result: `prepare convert`."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from common.data import corpus
from common.data.indexed_dataset import Index, Writer, index_path, tokens_path
from common.data.preparation import (
    Bar,
    locked,
    say,
    sha256_of,
)
from common.errors import ConfigError, DataError, StorageError

BATCH_DOCUMENTS = 512  # encoded in one call, on all cores
CHECKPOINT_SECONDS = 10.0


@dataclass
class Checkpoint:
    """How far a conversion is: everything before `position` of input `file` is in the partial output, and nothing after it."""

    job: dict[str, Any]  # inputs with sizes, tokenizer, key: a conversion goes on only with the same
    file: int = 0  # number of the current input
    position: int = 0  # its next byte, after decompression
    documents: int = 0
    tokens: int = 0
    empty: int = 0  # documents without a token, left out as Megatron's preprocessor does

    @classmethod
    def load(cls, path: Path, job: dict[str, Any]) -> Checkpoint:
        """The checkpoint at `path`, or a fresh one. Raises DataError if it is of another conversion."""
        if not path.exists():
            return cls(job)
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}: not a checkpoint: {error}", "the file is damaged", "delete it and the .partial files, and start anew"
            ) from error
        if found.job != job:
            raise DataError(
                f"{path}: belongs to another conversion",
                "its inputs, their sizes, the tokenizer or the key differ from what was asked now",
                "give the same arguments, choose another --output-prefix, or delete it with the .partial files beside it",
            )
        return found

    def save(self, path: Path) -> None:
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)


def convert(inputs: list[Path], tokenizer_path: Path, prefix: Path, key: str, checkpoint_seconds: float = CHECKPOINT_SECONDS) -> Index:
    """Tokenize `inputs` into `<prefix>.bin/.idx`, one sequence per document, without bos or eos, as the reference's preprocessing.

    `.jsonl`, `.json` (one object per line, as C4 has it) hold a document in `key`; `.txt` one per block between blank lines, so
    that a file of any size streams. Both may be `.gz`. A killed conversion goes on from `<prefix>.checkpoint.json` when started
    again with the same arguments, and ends with the same bytes. Raises ConfigError, DataError, StorageError.
    """
    tokenizer = corpus.load_sentencepiece(tokenizer_path)
    job = {"inputs": [_input_facts(path) for path in inputs], "tokenizer_sha256": sha256_of(tokenizer_path), "key": key}
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with locked(prefix.with_name(f".{prefix.name}.lock")):
        checkpoint_path = prefix.with_name(prefix.name + ".checkpoint.json")
        state = Checkpoint.load(checkpoint_path, job)
        if index_path(prefix).exists() or (tokens_path(prefix).exists() and not checkpoint_path.exists()):
            return _already_there(prefix, checkpoint_path, state)
        if state.documents:
            say(f"going on after {state.documents:,} documents")
        writer = Writer(prefix, tokenizer.vocab_size(), state.documents, state.tokens)
        try:
            _encode_all(inputs, key, tokenizer, writer, state, checkpoint_path, checkpoint_seconds)
            index = writer.finish()
        finally:
            writer.close()
        checkpoint_path.unlink()
    say(
        f"{prefix}: {index.num_documents:,} documents, {index.num_tokens:,} tokens as {index.dtype.name}; {state.empty} empty ones left out"
    )
    return index


def _input_facts(path: Path) -> dict[str, Any]:
    _kind_of(path)
    try:
        return {"path": str(path), "size": path.stat().st_size}
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}", "it was given as --input", "check the name") from error


def _kind_of(path: Path) -> Callable[[IO[bytes], Path, int, str], Iterator[tuple[int, str]]]:
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return _json_documents
    if name.endswith(".txt"):
        return _text_documents
    raise ConfigError(f"{path}: unknown kind of input", "its name says neither .jsonl, .json nor .txt (also .gz)", "rename or convert it")


def _already_there(prefix: Path, checkpoint_path: Path, state: Checkpoint) -> Index:
    """The output exists: whole but for its checkpoint, if a kill came after the last rename; otherwise not ours to overwrite."""
    if checkpoint_path.exists():
        index = Index.read(prefix)
        if (index.num_documents, index.num_tokens) == (state.documents, state.tokens):
            index.check_token_file_size()
            prefix.with_name(prefix.name + ".lengths.partial").unlink(missing_ok=True)
            checkpoint_path.unlink()
            say(f"{prefix}: was complete already")
            return index
    raise StorageError(
        f"{prefix}.bin/.idx: exists already", "nothing is overwritten", "remove it yourself, or choose another --output-prefix"
    )


def _encode_all(
    inputs: list[Path], key: str, tokenizer: Any, writer: Writer, state: Checkpoint, checkpoint_path: Path, checkpoint_seconds: float
) -> None:
    """Encode from `state` to the end of the last input, with a checkpoint every so many seconds and one at the end."""
    sizes = [path.stat().st_size for path in inputs]
    bar = Bar("converting", sum(sizes))
    saved = time.monotonic()

    def save() -> None:
        state.documents, state.tokens = writer.flush()  # the data first: a checkpoint never promises what is not on the disk
        state.save(checkpoint_path)

    while state.file < len(inputs):
        for position, texts, raw_position in _batches(inputs[state.file], state.position, key):
            for ids in tokenizer.encode(texts):
                if ids:
                    writer.add(ids)
                else:
                    state.empty += 1
            state.position = position
            bar.at(sum(sizes[: state.file]) + raw_position)
            if time.monotonic() - saved >= checkpoint_seconds:
                save()
                saved = time.monotonic()
        state.file, state.position = state.file + 1, 0
    save()
    bar.finish()


def _batches(path: Path, position: int, key: str) -> Iterator[tuple[int, list[str], int]]:
    """(next byte after decompression, up to BATCH_DOCUMENTS texts, byte in the file as stored) from `position` on."""
    with path.open("rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        texts: list[str] = []
        try:
            file.seek(position)
            for after, text in _kind_of(path)(file, path, position, key):
                position = after
                texts.append(text)
                if len(texts) == BATCH_DOCUMENTS:
                    yield position, texts, raw.tell()
                    texts = []
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path}: broken gzip after byte {position}: {error}", "the file is cut off or damaged", "fetch it again"
            ) from error
        if texts:
            yield position, texts, raw.tell()


def _json_documents(file: IO[bytes], path: Path, position: int, key: str) -> Iterator[tuple[int, str]]:
    for line in file:
        start, position = position, position + len(line)
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError) as error:
            do = "repair the line, or name the right key with --jsonl-key"
            raise DataError(
                f"{path}: byte {start}: no document: {error!r}", f"each line must be a JSON object with the key {key}", do
            ) from error
        if not isinstance(text, str):
            raise DataError(
                f"{path}: byte {start}: {key} is no text but {type(text).__name__}", "a document must be a string", "repair the line"
            )
        yield position, text


def _text_documents(file: IO[bytes], path: Path, position: int, key: str) -> Iterator[tuple[int, str]]:
    block: list[bytes] = []
    start = position
    for line in file:
        position += len(line)
        if line.strip():
            block.append(line)
        elif block:
            yield position, _decoded(block, path, start)
            block, start = [], position
        else:
            start = position
    if block:
        yield position, _decoded(block, path, start)


def _decoded(block: list[bytes], path: Path, start: int) -> str:
    try:
        return b"".join(block).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {start + error.start}: not UTF-8", "the text has another encoding", "convert it to UTF-8 first"
        ) from error
