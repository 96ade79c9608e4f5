"""Tokenized parts of the inputs of `prepare text`: written in parallel, then joined."""

from __future__ import annotations

import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic_write import new_file
from common.data.indexed_dataset_header import index_path
from common.data.indexed_dataset_writer import IndexedDatasetWriter, token_dtype
from common.data.manifest import PairFacts
from common.data.preparation import say
from common.errors import DataError, StorageError, first_line, write_text
from common.terminal import Progress
from open_llama import text_inputs
from open_llama.text_inputs import Source, bytes_of, documents_of_part, draw_of, no_documents
from open_llama.tokenizer import RECORD, Tokenizer, load_tokenizer

BATCH_DOCUMENTS = 256  # encoded in one call
SPLITS = ("train", "validation")
PARTS = ".parts"  # folder of the tokenized parts in DATADIR
# Raise it when the same inputs and options give other parts: when the division of the inputs, the
# reading of documents, the use of the tokenizer, the split or the content of a part's file changes.
# Parts of another version are not continued.
PARTS_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """The options that, with the inputs, decide the tokens."""

    tokenizer: str  # path of the tokenizer file
    eos: str
    key: str  # JSON key or column that holds the text
    validation_fraction: float


def parts_folder(data_dir: Path, identity: dict[str, Any], count: int) -> Path:
    """Return the folder of the `count` parts, empty unless the same preparation was interrupted.

    `identity`: the inputs and options. Raises StorageError if there are token files of an unknown
    preparation.
    """
    folder = data_dir / PARTS
    known = folder / RECORD
    made = {"parts": count, "part_bytes": text_inputs.PART_BYTES, "parts_version": PARTS_VERSION}
    record = json.dumps(identity | made)
    if known.is_file() and known.read_text() == record:
        return folder  # token files beside it are from an interrupted join
    for split in SPLITS:
        if index_path(data_dir / split).exists():
            what = f"{index_path(data_dir / split)} exists"
            do = "remove it, or name another --data-dir"
            raise StorageError(what, "nothing is overwritten", do)
    if folder.exists():
        say(f"{folder}: begun with other inputs, options or another version; beginning again")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_text(known, record)
    return folder


def tokenize(parts: list[list[Source]], folder: Path, settings: Settings, processes: int) -> None:
    """Write the missing parts to `folder`, in `processes` worker processes."""
    sizes = [sum(map(bytes_of, part)) for part in parts]
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
                    if not folder.is_dir():
                        why = "something removed it while the text was tokenized"
                        raise DataError(f"{folder} is missing", why, "run the command again")
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
    not_blank = filter(str.strip, documents_of_part(part, settings.key))
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
    with new_file(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def split_of(text: str, validation_fraction: float) -> str:
    """Return the split of a document, which depends only on its text."""
    return "validation" if draw_of(text) < validation_fraction * 2**64 else "train"


def join(folder: Path, data_dir: Path, vocab_size: int, count: int) -> dict[str, PairFacts]:
    """Write the token files of both splits from all `count` parts. Return their contents by split.

    Raises DataError if a part is missing or damaged, or a split is empty.
    """
    paths = [_part(folder, number) for number in range(count)]
    _require_both_splits(paths)  # before a file is written, which a next try would not overwrite
    pairs = {}
    for split in SPLITS:
        writer = IndexedDatasetWriter(data_dir / split, vocab_size)
        largest_id = 0
        for document in _documents_of(paths, split):
            writer.add(document)
            largest_id = max(largest_id, int(document.max()))
        index = writer.finish()
        pairs[split] = PairFacts(
            index.dtype.name, index.num_documents, index.num_tokens, largest_id
        )
    return pairs


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a part. Raises DataError if it is missing or cannot be read."""
    try:
        with np.load(path) as arrays:
            yield arrays
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        missing = isinstance(error, FileNotFoundError)
        raise DataError(
            f"{path} {'is missing' if missing else f'cannot be read: {first_line(error)}'}",
            "this part of the tokenized text was complete; it was removed or damaged since then",
            "run the command again, without the damaged file: only missing parts are made again",
        ) from error


def _require_both_splits(paths: list[Path]) -> None:
    numbers = dict.fromkeys(SPLITS, 0)
    fractions = np.empty((0, 2))  # of each part, its documents' lowest and highest
    for path in paths:
        with _opened(path) as arrays:
            for split in SPLITS:
                numbers[split] += len(arrays[f"{split}_lengths"])
            fractions = np.concatenate([fractions, arrays["fractions"]])
    for split, number in numbers.items():
        if not number:
            raise _empty_split(split, sum(numbers.values()), fractions)


def _empty_split(split: str, documents: int, fractions: np.ndarray) -> DataError:
    if not documents:
        return no_documents()
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


def _two_digits(number: float, rounded: Callable[[float], int]) -> float:
    """Round a number between 0 and 1 to two significant digits with math.ceil or math.floor."""
    scale = 10 ** (1 - math.floor(math.log10(number)))
    return rounded(number * scale) / scale


def _documents_of(paths: Iterable[Path], split: str) -> Iterator[np.ndarray]:
    for path in paths:
        with _opened(path) as arrays:
            tokens = arrays[f"{split}_tokens"]
            lengths = arrays[f"{split}_lengths"]
        ends = np.cumsum(lengths)
        for start, end in zip(ends - lengths, ends, strict=True):
            yield tokens[start:end]
