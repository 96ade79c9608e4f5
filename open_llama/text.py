"""`prepare text`: convert text to Megatron's token files, in parallel.

The inputs are cut into parts of PART_BYTES. Worker processes tokenize parts and write each as a
file of its own in DATADIR/.parts. At the end the parts are joined in the order of the inputs, so
the result does not depend on the number of processes. An interrupted preparation continues
with the missing parts.

A document is for validation if the SHA-256 of its text, as a fraction of its range, is below the
validation fraction. So equal documents are always in the same split.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from common.data import corpus
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import index_path
from common.data.indexed_dataset_writer import IndexedDatasetWriter, token_dtype
from common.data.manifest import sha256_of
from common.data.preparation import locked, say
from common.data.text_documents import json_documents
from common.errors import ConfigError, DataError, StorageError, write_whole
from common.terminal import Progress
from open_llama.tokenizer import COMPANIONS, Tokenizer, load_tokenizer, tokenizer_file

PART_BYTES = 16 << 20
BATCH_DOCUMENTS = 256  # encoded in one call
# Characters. A longer plain text file becomes several documents, cut at line ends.
LONGEST_TEXT = 1 << 20
VOCABULARY_CHARACTERS = 5_000_000  # most characters that a tokenizer is trained on
# Up to 2,000 characters of them that end before a space or line end, if there is one.
PIECE = re.compile(r".{1,2000}(?!\S)|.{1,2000}", re.DOTALL)
VOCABULARY_BYTES = 1 << 30  # of the inputs that can be divided, read for a tokenizer
PLACE_BYTES = 1 << 16  # read together, of JSON lines
SPLITS = ("train", "validation")
PARTS = ".parts"  # folder of the tokenized parts in DATADIR
RECORD = "text.json"  # identity of the preparation that made the files beside it
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".tex")
TABLE_SUFFIXES = (".parquet", ".arrow")
KNOWN = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)


@dataclass(frozen=True)
class Source:
    """Bytes [begin, end) of a file, or row groups [begin, end) of a Parquet file.

    A compressed file, a plain text file or an Arrow file is always one whole source.
    """

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class Settings:
    """The options that, with the inputs, decide the tokens."""

    tokenizer: str  # path of the tokenizer file
    eos: str
    key: str  # JSON key or column that holds the text
    validation_fraction: float


def prepare_text(
    inputs: list[Path],
    data_dir: Path,
    settings: Settings,
    processes: int,
    vocab_size: int = 0,
) -> None:
    """Tokenize `inputs` into train and validation files in `data_dir`.

    `vocab_size`: if not 0, first train a SentencePiece tokenizer of this many pieces on the inputs.
    `settings` then names no tokenizer.

    Raises ConfigError for inputs, a tokenizer or options that cannot be used, DataError for damaged
    inputs or an empty split, StorageError if `data_dir` holds other token files.
    """
    files = input_files(inputs)
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir / f".{RECORD}.lock"):
        tokenizer = place_tokenizer(files, data_dir, settings, vocab_size)
        settings = replace(settings, tokenizer=str(tokenizer))
        record = identity(files, settings) | {"train_tokenizer": vocab_size}
        if (data_dir / RECORD).is_file():
            _require_equal(data_dir, record)
            say(f"{data_dir}: complete")
            return
        size = load_tokenizer(tokenizer, settings.eos).vocab_size
        if vocab_size and size != vocab_size:
            what = f"{tokenizer} has {size:,} pieces, not {vocab_size:,}"
            why = "an earlier try made it, and nothing is overwritten"
            raise StorageError(what, why, "remove it, or name another --data-dir")
        parts = parts_folder(data_dir, record)
        tokenize(divide(files), parts, settings, processes)
        indices = join(parts, data_dir, size)
        write_whole(data_dir / RECORD, json.dumps(record, indent=1).encode() + b"\n")
        shutil.rmtree(parts)
    for split, index in indices.items():
        say(f"{data_dir / split}: {index.num_documents:,} documents, {index.num_tokens:,} tokens")
    say(f"{tokenizer}: a vocabulary of {size:,} tokens")


# --- inputs


def input_files(inputs: list[Path]) -> list[Path]:
    """Return the files to read: the given files, and the files of known types in given folders.

    In folders, .json files are left out. Raises ConfigError for a file that does not exist or whose
    type is unknown, for a folder without files to read, and for one that cannot be listed.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            every = list(_files_below(path))
            # Other .json files in folders are settings, such as those of a data set on disk.
            inside = sorted(
                file
                for file in every
                if kind_of(file) and ".json" not in map(str.lower, file.suffixes)
            )
            if not inside:
                why = f"no file in it ends in {', '.join(KNOWN)} (or .gz)"
                raise ConfigError(f"{path}: nothing to read", why, "name files or another folder")
            left_out = len(every) - len(inside)
            say(f"{path}: {len(inside):,} files to read, {left_out:,} of other types left out")
            found += inside
        elif not path.is_file():
            raise ConfigError(f"{path}: no such file", "it is an --input", "check the name")
        elif not kind_of(path):
            why = f"its name does not end in {', '.join(KNOWN)} (or .gz)"
            raise ConfigError(f"{path}: unsupported file type", why, "rename or convert it")
        else:
            found.append(path)
    return [path.absolute() for path in found]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder. Raises ConfigError if a folder cannot be listed."""

    def refuse(error: OSError) -> None:
        what = f"{error.filename}: cannot be listed: {error.strerror}"
        why = f"it is in the input {folder}"
        raise ConfigError(what, why, "make it readable, or name other files") from error

    for name, _, names in os.walk(folder, onerror=refuse):
        yield from (path for path in (Path(name) / each for each in names) if path.is_file())


def kind_of(path: Path) -> str:
    """Return "json", "text" or "table"; "" if the name has none of their suffixes."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in JSON_SUFFIXES:
        return "json"
    if suffix in TABLE_SUFFIXES:
        return "table" if not _has_suffix(path, ".gz") else ""
    return "text" if suffix in TEXT_SUFFIXES else ""


def _has_suffix(path: Path, suffix: str) -> bool:
    """Return whether the name ends in `suffix`, in small or capital letters."""
    return path.suffix.lower() == suffix


def divide(files: list[Path]) -> list[list[Source]]:
    """Divide the files into parts of about PART_BYTES.

    A part is a piece of a large file, or a group of small ones.
    """
    parts: list[list[Source]] = [[]]
    size = 0
    for path in files:
        for source in _sources_of(path):
            length = _bytes_of(source)
            if parts[-1] and size + length > PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(source)
            size += length
    return parts


def _sources_of(path: Path) -> Iterator[Source]:
    """Yield a file as sources of about PART_BYTES, if its format allows to divide it."""
    size = path.stat().st_size
    if _has_suffix(path, ".parquet"):
        yield from (Source(str(path), group, group + 1) for group in range(_row_groups(path)))
    elif kind_of(path) == "json" and not _has_suffix(path, ".gz"):
        for begin in range(0, size, PART_BYTES):
            yield Source(str(path), begin, min(begin + PART_BYTES, size))
    else:
        yield Source(str(path), 0, size)


def _bytes_of(source: Source) -> int:
    """Return the stored bytes of a source, for Parquet its file's mean bytes per row group."""
    path = Path(source.path)
    if _has_suffix(path, ".parquet"):
        return path.stat().st_size // max(1, _row_groups(path))
    return source.end - source.begin


def _row_groups(path: Path) -> int:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_metadata(path).num_row_groups
    except (ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def documents(source: Source, key: str) -> Iterator[str]:
    """Yield the documents of a source. Raises DataError."""
    path = Path(source.path)
    kind = kind_of(path)
    if kind == "table":
        yield from _table_documents(path, source, key)
        return
    try:
        with path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if _has_suffix(path, ".gz") else raw
            if kind == "json":
                lines = file if _has_suffix(path, ".gz") else _lines_within(file, source)
                yield from json_documents(lines, path, key, "--key")
            else:
                yield from _text_documents(file.read(), path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _unreadable(path, error) from error


def _documents_of_part(part: list[Source], key: str) -> Iterator[str]:
    for source in part:
        yield from documents(source, key)


def _lines_within(file: Any, source: Source) -> Iterator[bytes]:
    """Yield the lines that begin within the source's bytes."""
    if source.begin:
        file.seek(source.begin - 1)
        file.readline()  # the rest of a line that began before
    while file.tell() < source.end:
        line = file.readline()
        if not line:
            return
        yield line


def _text_documents(content: bytes, path: Path) -> Iterator[str]:
    """Yield a plain text file as one document, or as several if it exceeds LONGEST_TEXT."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8", "the text has another encoding", "convert it to UTF-8 first"
        ) from error
    while len(text) > LONGEST_TEXT:
        last_line_end = text.rfind("\n", 0, LONGEST_TEXT)
        end = LONGEST_TEXT if last_line_end < 0 else last_line_end + 1
        yield text[:end]
        text = text[end:]
    yield text


def _table_documents(path: Path, source: Source, key: str) -> Iterator[str]:
    """Yield the column `key` of a Parquet row group, or of a whole Arrow file.

    These are the formats of Hugging Face's data sets.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        if _has_suffix(path, ".parquet"):
            with parquet.ParquetFile(path) as file:
                table = file.read_row_group(source.begin)
        else:
            table = _arrow_table(path)
        for chunk in table.column(key).chunks:
            for value in chunk.to_pylist():
                if not isinstance(value, str):
                    raise DataError(
                        f"{path}: {key} is {type(value).__name__}, not text",
                        "a document is a string",
                        "name a column of text with --key",
                    )
                yield value
    except KeyError:
        raise DataError(
            f"{path}: no column {key}",
            f"it has {', '.join(table.column_names)}",
            "name the column that holds the text with --key",
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _arrow_table(path: Path) -> Any:
    """Read an Arrow file of either format, stream or file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        try:
            return pyarrow.ipc.open_stream(file).read_all()
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return pyarrow.ipc.open_file(file).read_all()


def _unreadable(path: Path, error: Exception) -> DataError:
    first_line = str(error).partition("\n")[0]
    return DataError(
        f"{path}: cannot be read: {first_line}", "the file is damaged or cut off", "fetch it again"
    )


# --- the tokenizer


def place_tokenizer(files: list[Path], data_dir: Path, settings: Settings, vocab_size: int) -> Path:
    """Copy the tokenizer to `data_dir`, or train one there. Return its file.

    Raises StorageError if another tokenizer is there.
    """
    if vocab_size:
        target = data_dir / "tokenizer.model"
        if not target.exists():
            train_tokenizer(files, settings.key, vocab_size, target)
        return target
    source = tokenizer_file(Path(settings.tokenizer))
    load_tokenizer(source, settings.eos)  # before anything is copied
    target = data_dir / ("tokenizer.json" if source.suffix == ".json" else "tokenizer.model")
    if target.exists() and sha256_of(target) != sha256_of(source):
        why = "the token files there were made with that one"
        raise StorageError(f"{target} is another tokenizer", why, "name another --data-dir")
    if not target.exists():
        shutil.copyfile(source, target)
        for name in COMPANIONS[target.name]:
            if source.with_name(name).is_file():
                shutil.copyfile(source.with_name(name), data_dir / name)
    return target


def train_tokenizer(files: list[Path], key: str, vocab_size: int, target: Path) -> None:
    """Train a SentencePiece tokenizer on text spread over the inputs."""
    say(f"training a tokenizer of {vocab_size:,} pieces")
    texts = vocabulary_texts(files, key)
    if not texts:
        raise _no_documents()
    try:
        corpus.train_sentencepiece(texts, vocab_size, target)
    except RuntimeError as error:
        raise _no_tokenizer(vocab_size, str(error)) from error


def vocabulary_texts(files: list[Path], key: str) -> list[str]:
    """Return at most VOCABULARY_CHARACTERS of the inputs' text, spread evenly over all of it.

    Text beyond that is cut into pieces, and those with the lowest hashes are taken, so that no
    order of the documents leaves a kind of them out.
    """
    found: list[tuple[int, str]] = []  # hash and piece
    characters = 0
    for place in _places(files):
        for text in filter(str.strip, documents(place, key)):
            pieces = [(draw_of(piece), piece) for piece in PIECE.findall(text)]
            found += pieces
            characters += len(text)
            if characters > 2 * VOCABULARY_CHARACTERS:  # now and then, because it sorts
                found = _lowest(found)
                characters = sum(len(piece) for _, piece in found)
    if characters > VOCABULARY_CHARACTERS:
        found = _lowest(found)
    return [piece for _, piece in found]


def _lowest(pieces: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return VOCABULARY_CHARACTERS of pieces with the lowest hashes, in their order."""
    pieces = sorted(pieces)
    ends = accumulate(len(piece) for _, piece in pieces)
    return pieces[: sum(end <= VOCABULARY_CHARACTERS for end in ends)]


def _places(files: list[Path]) -> Iterator[Source]:
    """Yield the sources to read for a tokenizer, spread evenly over the inputs.

    Of JSON lines and Parquet together these are about VOCABULARY_BYTES. Others are read whole.
    """
    stride = math.ceil(max(1, sum(path.stat().st_size for path in files)) / VOCABULARY_BYTES)
    for path in files:
        sources = list(_sources_of(path))
        if kind_of(path) == "json" and len(sources) > 1:
            sources = [
                Source(str(path), begin, min(begin + PLACE_BYTES, sources[-1].end))
                for begin in range(0, sources[-1].end, PLACE_BYTES)
            ]
        yield from sources[::stride]


def _no_tokenizer(vocab_size: int, error: str) -> ConfigError:
    """Return the error for a training that SentencePiece refused with the message `error`."""
    what = f"no tokenizer of {vocab_size} pieces"
    if most := re.search(r"too high .*<= (\d+)", error):
        why = f"the text gives at most {most[1]}: it has too few different words"
        return ConfigError(what, why, f"set --train-tokenizer to {most[1]} or less, or add text")
    if least := re.search(r"required_chars\. \d+ vs (\d+)", error):
        why = f"its single characters and bytes alone are {least[1]}"
        return ConfigError(what, why, f"set --train-tokenizer to {least[1]} or more")
    why = "SentencePiece refused the number or the text"
    return ConfigError(f"{what}: {error}", why, "change --train-tokenizer, or the text")


# --- parts


def identity(files: list[Path], settings: Settings) -> dict[str, Any]:
    """Return the identity of a preparation: its options, and its inputs' names, sizes and times."""
    inputs = []
    for path in files:
        state = path.stat()
        inputs.append([str(path), state.st_size, state.st_mtime_ns])
    tokenizer = sha256_of(Path(settings.tokenizer))
    return {"inputs": inputs, **asdict(settings), "tokenizer": tokenizer}


def _require_equal(data_dir: Path, record: dict[str, Any]) -> None:
    """Raise StorageError unless the files in `data_dir` are those of the preparation `record`."""
    if json.loads((data_dir / RECORD).read_text()) != record:
        what = f"{data_dir} holds token files of other inputs or options"
        raise StorageError(what, "nothing is overwritten", "name another --data-dir")


def parts_folder(data_dir: Path, record: dict[str, Any]) -> Path:
    """Return the folder of the parts, empty unless the same preparation was interrupted.

    Raises StorageError if there are token files of an unknown preparation.
    """
    folder = data_dir / PARTS
    known = folder / RECORD
    if known.is_file() and json.loads(known.read_text()) == record:
        return folder  # token files beside it are from an interrupted join
    for split in SPLITS:
        if index_path(data_dir / split).exists():
            what = f"{index_path(data_dir / split)} exists"
            do = "remove it, or name another --data-dir"
            raise StorageError(what, "nothing is overwritten", do)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_whole(known, json.dumps(record).encode())
    return folder


def tokenize(parts: list[list[Source]], folder: Path, settings: Settings, processes: int) -> None:
    """Write the missing parts to `folder`, in `processes` worker processes."""
    sizes = [sum(map(_bytes_of, part)) for part in parts]
    missing = [number for number in range(len(parts)) if not _part(folder, number).is_file()]
    done = sum(sizes) - sum(sizes[number] for number in missing)
    if done:
        say(f"continuing: {len(parts) - len(missing)} of {len(parts)} parts are complete")
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (settings,))
    try:
        with pool, Progress("tokenizing", sum(sizes), "B") as progress:
            progress.at(done)
            futures: dict[Future[None], int] = {
                pool.submit(write_part, parts[number], _part(folder, number), settings): number
                for number in missing
            }
            for future in as_completed(futures):
                error = future.exception()
                if error:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise error
                done += sizes[futures[future]]
                progress.at(done)
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process ended",
            "it crashed, or the system killed it because memory ran out",
            "start again with fewer --processes; complete parts are kept",
        ) from error


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


_tokenizer: Tokenizer | None = None  # that of this worker process


def _start_worker(settings: Settings) -> None:
    global _tokenizer
    _tokenizer = load_tokenizer(Path(settings.tokenizer), settings.eos)


def write_part(part: list[Source], path: Path, settings: Settings) -> None:
    """Tokenize the documents of `part` and write them to `path`.

    The file has, for each split, the tokens of its documents one after another, and their lengths.
    `fractions` is the lowest and highest validation fraction at which a document changes its split,
    float64 [1, 2], or [0, 2] without documents.
    """
    assert _tokenizer is not None
    dtype = token_dtype(_tokenizer.vocab_size)
    tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    draws: list[int] = []
    not_blank = filter(str.strip, _documents_of_part(part, settings.key))
    while batch := list(islice(not_blank, BATCH_DOCUMENTS)):
        for text, ids in zip(batch, _tokenizer.encode(batch), strict=True):
            draws.append(draw_of(text))
            split = split_of(text, settings.validation_fraction)
            tokens[split].append(np.array([*ids, _tokenizer.eos], dtype))
    ends = [[min(draws) / 2**64, max(draws) / 2**64]] if draws else []
    arrays = {"fractions": np.array(ends).reshape(-1, 2)}
    for split, rows in tokens.items():
        arrays[f"{split}_tokens"] = np.concatenate([np.empty(0, dtype), *rows])
        arrays[f"{split}_lengths"] = np.array([len(row) for row in rows], np.int64)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.replace(path)


def split_of(text: str, validation_fraction: float) -> str:
    """Return the split of a document, which depends only on its text."""
    return "validation" if draw_of(text) < validation_fraction * 2**64 else "train"


def draw_of(text: str) -> int:
    """Return the first 64 bits of the text's SHA-256."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8])


def join(folder: Path, data_dir: Path, vocab_size: int) -> dict[str, Index]:
    """Write the token files of both splits from the parts. Raises DataError if a split is empty."""
    paths = sorted(folder.glob("*.npz"))
    _require_both_splits(paths)  # before a file is written, which a next try would not overwrite
    indices = {}
    for split in SPLITS:
        writer = IndexedDatasetWriter(data_dir / split, vocab_size)
        for document in _documents_of(paths, split):
            writer.add(document)
        indices[split] = writer.finish()
    return indices


def _require_both_splits(paths: list[Path]) -> None:
    numbers = dict.fromkeys(SPLITS, 0)
    fractions = np.empty((0, 2))  # of each part, its documents' lowest and highest
    for path in paths:
        with np.load(path) as arrays:
            for split in SPLITS:
                numbers[split] += len(arrays[f"{split}_lengths"])
            fractions = np.concatenate([fractions, arrays["fractions"]])
    for split, number in numbers.items():
        if not number:
            raise _empty_split(split, sum(numbers.values()), fractions)


def _empty_split(split: str, documents: int, fractions: np.ndarray) -> DataError:
    if not documents:
        return _no_documents()
    lowest = float(fractions.min())
    highest = float(fractions.max())
    do = "split the text into more files or lines, or add documents"
    if split == "validation":
        why = f"documents are drawn at random by their hash, and the lowest draw is {lowest:.4f}"
        enough = _two_digits(lowest, math.ceil)
        fits = f"{enough:g} or more"
    else:
        why = f"documents are drawn at random by their hash, and the highest draw is {highest:.4f}"
        enough = _two_digits(highest, math.floor)
        fits = f"{enough:g} or less"
    if lowest < enough <= highest:  # as in split_of: at least one document on either side
        do = f"set --validation-fraction to {fits}, or {do}"
    return DataError(f"no document for {split} among {documents:,}", why, do)


def _no_documents() -> DataError:
    why = "all texts are empty or blank"
    return DataError("no document among the inputs", why, "add text")


def _two_digits(number: float, rounded: Callable[[float], int]) -> float:
    """Round a number between 0 and 1 to two significant digits with math.ceil or math.floor."""
    scale = 10 ** (1 - math.floor(math.log10(number)))
    return rounded(number * scale) / scale


def _documents_of(paths: Iterable[Path], split: str) -> Iterator[np.ndarray]:
    for path in paths:
        with np.load(path) as arrays:
            tokens = arrays[f"{split}_tokens"]
            lengths = arrays[f"{split}_lengths"]
        ends = np.cumsum(lengths)
        for start, end in zip(ends - lengths, ends, strict=True):
            yield tokens[start:end]
