"""Convert text to Megatron's token files, in parallel.

The inputs are cut into parts of about PART_BYTES. Worker processes tokenize the parts, each into
files of its own. A compressed input is one part of any size, so documents are written in batches.
At the end the parts are joined in the order of the inputs, so the result does not depend on the
number of processes. An interrupted preparation continues with the missing parts. text_inputs.py
reads the inputs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from common.atomic_write import new_file
from common.data import text_inputs
from common.data.indexed_dataset_header import index_path, mask_path
from common.data.indexed_dataset_writer import IndexedDatasetWriter, token_dtype
from common.data.manifest import PairFacts
from common.data.preparation import require_unchanged, say
from common.data.text_documents import Key
from common.data.text_inputs import Source, bytes_of, divide, documents, draw_of, no_documents
from common.errors import (
    DataError,
    RunError,
    StorageError,
    failure_of,
    first_line,
    listed,
    write_text,
)
from common.terminal import Progress

# Encoded in one call: documents, until they have this many characters.
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
# A worker ends if a batch takes longer than BATCH_FLOOR_S plus its characters / CHARACTERS_PER_S.
# One core encodes more than 500,000 characters a second. A regular expression that backtracks takes
# a time that doubles with each character.
BATCH_FLOOR_S = 120.0
CHARACTERS_PER_S = 10_000
LOOK_S = 1.0  # between two looks at how much was read
SPLITS = ("train", "validation")
IDENTITY = "text.json"  # file in the folder of the parts: the inputs and options
# Raise it when the same inputs and options give other parts: when the division of the inputs, the
# reading of documents, the use of the tokenizer, the split or the files of a part change. Parts of
# another version are not continued.
PARTS_VERSION = 3

# From texts to documents of ids, [tokens], or of ids and their mask, [2, tokens].
Encode = Callable[[list[str]], Sequence[ArrayLike]]

PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Work:
    """How text becomes documents of tokens. Worker processes get a copy."""

    tokenizer: Path
    # Reads the tokenizer. Its result turns texts into whole documents of ids. A document without
    # ids is left out.
    load: Callable[[Path], Encode]
    vocab_size: int
    key: Key
    validation_fraction: float = 0.0  # of the documents
    blank_lines: bool = False  # whether they separate the documents of a plain text file
    masked: bool = False  # whether a document has a mask, which is 1 for tokens that count


def write_token_files(
    files: list[Path],
    work: Work,
    prefixes: dict[str, Path],
    folder: Path,
    identity: dict[str, Any],
    processes: int,
) -> dict[str, PairFacts]:
    """Write the token files `<prefix>.bin/.idx` of each split. Return their contents by split.

    If the documents have masks, also write `<prefix>.mask`, one byte for each token.

    `folder`: of the parts, which remain there.
    `identity`: the options that decide the tokens, and as "inputs" the result of `input_states`.

    Raises DataError for inputs that are damaged or change and for an empty split, StorageError if
    there are token files of an unknown preparation.
    """
    states = identity["inputs"]
    try:
        parts = divide(files, work.blank_lines)
        _make_folder(folder, list(prefixes.values()), identity, len(parts))
        tokenize(parts, folder, work, processes)
    except (OSError, DataError):
        require_unchanged(states)  # a change explains other errors
        raise
    require_unchanged(states)
    return join(folder, prefixes, work, len(parts))


def _make_folder(folder: Path, prefixes: list[Path], identity: dict[str, Any], count: int) -> None:
    """Make the folder of `count` parts, empty unless the same preparation was interrupted."""
    known = folder / IDENTITY
    made = {"parts": count, "part_bytes": text_inputs.PART_BYTES, "parts_version": PARTS_VERSION}
    record = json.dumps(identity | made)
    if known.is_file() and known.read_text() == record:
        return  # token files beside it are from an interrupted join
    for prefix in prefixes:
        if index_path(prefix).exists():
            do = "remove it, or choose another name or folder"
            raise StorageError(f"{index_path(prefix)} exists", "nothing is overwritten", do)
    if folder.exists():
        say(f"{folder}: begun with other inputs, options or another version; beginning again")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_text(known, record)


def tokenize(parts: list[list[Source]], folder: Path, work: Work, processes: int) -> None:
    """Write the missing parts to `folder`, in `processes` worker processes."""
    sizes = [sum(map(bytes_of, part)) for part in parts]
    missing = [number for number in range(len(parts)) if not _part(folder, number).is_file()]
    done = sum(sizes) - sum(sizes[number] for number in missing)  # bytes
    if done:
        say(f"continuing: {len(parts) - len(missing)} of {len(parts)} parts are complete")
    tasks = ((parts[number], _part(folder, number)) for number in missing)
    workers: list[_Worker] = []
    try:
        with Progress("tokenizing", sum(sizes), "B") as progress:
            progress.at(done)
            workers += [_Worker(work) for _ in missing[:processes]]
            while busy := [worker for worker in workers if worker.is_busy]:
                ready = wait([worker.pipe for worker in busy], LOOK_S)
                for worker in busy:
                    if worker.pipe in ready:
                        done += worker.follow(tasks)
                progress.at(min(done, sum(sizes)))
    except OSError as error:
        if folder.is_dir():
            raise
        why = "something removed it while the text was tokenized"
        raise DataError(f"{folder} is missing", why, "run the command again") from error
    finally:
        for worker in workers:
            worker.end()


Task = tuple[list[Source], Path]  # a part, and the file to write


class _Worker:
    """A process that writes parts. It gets them by a pipe, because locks need /dev/shm."""

    def __init__(self, work: Work):
        self.work = work
        self.task: Task | None = None
        self.is_busy = True
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_write_parts, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()

    def follow(self, tasks: Iterator[Task]) -> int:
        """Read one message, and answer with the next task if it asks for one.

        Return the bytes that were read for a part since the last message. Raises the error of the
        process, and DataError if it died.
        """
        try:
            message = self.pipe.recv()
            if message is None:
                self.task = next(tasks, None)
                self.is_busy = self.task is not None
                self.pipe.send(self.task)
                return 0
        except (EOFError, ConnectionError) as error:
            raise self._death() from error
        if isinstance(message, BaseException):
            raise message
        return int(message)

    def _death(self) -> DataError:
        self.process.join()
        code = self.process.exitcode
        paths = [source.path for source in self.task[0]] if self.task else []
        why = "it crashed: the tokenizer or a file that it read is damaged"
        do = "repair or leave out the file; complete parts are kept"
        if code == -signal.SIGALRM:
            why = "a regular expression of the tokenizer backtracked for more than"
            why += f" {BATCH_FLOOR_S:g} s on a document"
        elif code == -signal.SIGKILL:
            why = "somebody or the system killed it, probably because memory ran out"
            do = "start again with fewer --processes; complete parts are kept"
        what = f"a process that tokenizes by {self.work.tokenizer} ended with exit code {code}"
        return DataError(f"{what}, reading {listed(paths, 3)}" if paths else what, why, do)

    def end(self) -> None:
        """End the process at once: one part may take hours."""
        self.process.terminate()
        self.pipe.close()
        self.process.join()


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


def _tokens(part: Path, split: str) -> Path:
    return part.with_suffix(f".{split}.bin")


def _write_parts(pipe: Connection, work: Work) -> None:
    """Ask for tasks by None and write their parts. Send the numbers of bytes read, and errors."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic in Rust prints lines of its own
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        encode = work.load(work.tokenizer)
        pipe.send(None)
        while task := pipe.recv():
            part, path = task
            write_part(part, path, work, encode, pipe.send)
            pipe.send(None)
    except BaseException as error:
        error = failure_of(error) or error  # the cause is not sent
        error.add_note(traceback.format_exc())
        pipe.send(error)


def _end_with(parent: BaseProcess) -> None:
    """End this process when `parent` has ended. Nothing else would, if the parent is killed."""
    parent.join()
    os._exit(1)


def write_part(
    part: list[Source], path: Path, work: Work, encode: Encode, on_read: Callable[[int], object]
) -> None:
    """Tokenize the documents of `part`, and write `path` last: if it exists, the part is complete.

    `_tokens(path, split)` has the tokens of a split's documents one after another, each document
    with its mask behind it if it has one. `path` has their lengths in tokens, and as `fractions`
    the lowest and highest validation fraction at which a document changes its split, float64
    [1, 2], or [0, 2] without documents.

    `encode`: the function that `work` loads.
    `on_read`: called with numbers of bytes. Their sum is the size of the part.
    """
    unread = sum(map(bytes_of, part))

    def count(size: int) -> None:
        nonlocal unread
        unread -= size
        on_read(size)

    dtype = token_dtype(work.vocab_size)
    lengths = {split: array("q") for split in SPLITS}
    draws: list[int] = []  # the lowest and the highest
    texts = chain.from_iterable(documents(each, work.key, work.blank_lines, count) for each in part)
    with ExitStack() as stack:
        files = {split: stack.enter_context(new_file(_tokens(path, split))) for split in SPLITS}
        for batch in _batches(texts):
            for text, ids in zip(batch, _encoded(batch, work, encode), strict=True):
                if ids.size:
                    draw = draw_of(text)
                    split = split_of(draw, work.validation_fraction)
                    files[split].write(ids.astype(dtype).tobytes())
                    lengths[split].append(ids.shape[-1])
                    draws = [min([*draws, draw]), max([*draws, draw])]
    arrays = {f"{split}_lengths": np.array(lengths[split], np.int64) for split in SPLITS}
    ends = [[draw / 2**64 for draw in draws]] if draws else []
    with new_file(path) as file:
        np.savez(file, fractions=np.array(ends).reshape(-1, 2), **arrays)  # type: ignore[arg-type]
    on_read(unread)  # negative if blocks overlap


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield `texts` in lists of at most BATCH_DOCUMENTS, and about BATCH_CHARACTERS in total."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _encoded(texts: list[str], work: Work, encode: Encode) -> list[np.ndarray]:
    """Return the documents of `texts`, int64. Ends this process if that takes too long.

    Raises DataError if the tokenizer fails, or if an id is outside its vocabulary.
    """
    limit_s = BATCH_FLOOR_S + sum(map(len, texts)) / CHARACTERS_PER_S
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # its signal ends a process without a handler
    try:
        encoded = [np.array(ids, np.int64) for ids in encode(texts)]
        largest = max((int(ids.max()) for ids in encoded if ids.size), default=0)
        if largest >= work.vocab_size:
            raise ValueError(f"token id {largest} in a vocabulary of {work.vocab_size} tokens")
        return encoded
    except (RunError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise DataError(
            f"{work.tokenizer} cannot encode the input: {type(error).__name__}: {str(error)[:200]}",
            "its rules fail on one of the documents",
            "use the model's own tokenizer",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def split_of(draw: int, validation_fraction: float) -> str:
    """Return the split of a document by its `draw_of`, which depends only on its text."""
    return "validation" if draw < validation_fraction * 2**64 else "train"


def join(folder: Path, prefixes: dict[str, Path], work: Work, count: int) -> dict[str, PairFacts]:
    """Write the token files of each split from all `count` parts. Return their contents by split.

    Raises DataError if a part is missing or damaged, or a split is empty.
    """
    paths = [_part(folder, number) for number in range(count)]
    # Before a file is written, which a next try would not overwrite.
    _require_documents(paths, list(prefixes))
    pairs = {}
    with Progress("joining", len(paths) * len(prefixes), "parts") as progress:
        for split, prefix in prefixes.items():
            writer = IndexedDatasetWriter(prefix, work.vocab_size)
            largest_id = 0
            with new_file(mask_path(prefix)) if work.masked else nullcontext() as mask:
                for path in paths:
                    for document in _documents_of(path, split, work):
                        writer.add(document[0])
                        largest_id = max(largest_id, int(document[0].max()))
                        if mask:
                            mask.write(document[1].astype(np.uint8).tobytes())
                    progress.advance(1)
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


def _require_documents(paths: list[Path], splits: list[str]) -> None:
    """Raise DataError if a split has no document."""
    numbers = dict.fromkeys(splits, 0)
    fractions = np.empty((0, 2))  # of each part, its documents' lowest and highest
    for path in paths:
        with _opened(path) as arrays:
            for split in splits:
                numbers[split] += len(arrays[f"{split}_lengths"])
            fractions = np.concatenate([fractions, arrays["fractions"]])
    for split, number in numbers.items():
        if not number:
            raise _empty_split(split, sum(numbers.values()), fractions)


def _empty_split(split: str, documents: int, fractions: np.ndarray) -> DataError:
    if not documents:
        return no_documents()
    lowest = fractions.min()
    highest = fractions.max()
    do = "split the text into more files or lines, or add documents"
    if lowest < highest:
        do = f"set --validation-fraction between {lowest:.4g} and {highest:.4g}, or {do}"
    why = "documents are drawn at random by their hash"
    return DataError(f"no document for {split} among {documents:,}", why, do)


def _documents_of(path: Path, split: str, work: Work) -> Iterator[np.ndarray]:
    """Yield the documents of a part: their ids, and their mask if there are masks."""
    dtype = token_dtype(work.vocab_size)
    rows = 2 if work.masked else 1
    with _opened(path) as arrays:
        lengths = arrays[f"{split}_lengths"]
        tokens = _tokens(path, split)
        if tokens.stat().st_size != rows * lengths.sum() * dtype.itemsize:
            raise ValueError(f"{tokens.name} has another size than its documents")
    with tokens.open("rb") as file:
        for length in lengths:
            yield np.fromfile(file, dtype, rows * length).reshape(rows, length)
