"""Write Megatron's token files: the pair `<prefix>.bin`, `<prefix>.idx` (layout: common/data/indexed_dataset.py)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.data.indexed_dataset import DTYPE_CODES, HEADER, MAGIC, VERSION, Index, index_path, tokens_path, wrong
from common.errors import StorageError

UINT16_VOCAB_LIMIT = 65500  # megatron-core, DType.optimal_dtype


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500, else int32, as Megatron's preprocessor chooses."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


class Writer:
    """Writes documents one by one, each as one sequence, to files named `.partial`; `finish` renames them.

    Sequence lengths go to a third partial file, so that memory does not grow with the number of documents. `flush` makes everything
    added so far durable; `Writer(prefix, vocab_size, documents, tokens)` truncates the partial files to such a point and continues there.
    Raises StorageError if a file cannot be written.
    """

    def __init__(self, prefix: Path, vocab_size: int, documents: int = 0, tokens: int = 0):
        self.prefix, self.vocab_size, self.dtype = Path(prefix), vocab_size, token_dtype(vocab_size)
        self.documents, self.tokens = documents, tokens
        bin_path = tokens_path(self.prefix)
        self._partial_bin, self._partial_index, self._partial_lengths = (
            Path(f"{self.prefix}.{kind}.partial") for kind in ("bin", "idx", "lengths")
        )
        # A kill between the two renames of `finish` leaves a `.bin` without `.idx`: it is the partial file of that conversion.
        if documents and not self._partial_bin.exists() and bin_path.exists() and not index_path(self.prefix).exists():
            bin_path.replace(self._partial_bin)
        self._bin = _open_at(self._partial_bin, tokens * self.dtype.itemsize)
        self._lengths = _open_at(self._partial_lengths, documents * 4)

    def add(self, ids: np.ndarray | list[int]) -> None:
        """Append one document. Raises DataError if it is empty or an id is outside [0, vocab_size)."""
        wide = np.asarray(ids, dtype=np.int64)
        path = tokens_path(self.prefix)
        if wide.ndim != 1 or not wide.size:
            raise wrong(path, f"document {self.documents} as a non-empty list of ids", f"an array of shape {wide.shape}")
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high >= self.vocab_size:
            expected = f"ids from 0 to {self.vocab_size - 1}, stored as {self.dtype.name}"
            raise wrong(path, expected, f"id {low if low < 0 else high} in document {self.documents}")
        with _writing(self._partial_bin):
            self._bin.write(wide.astype(self.dtype).tobytes())
            self._lengths.write(struct.pack("<i", wide.size))
        self.documents += 1
        self.tokens += wide.size

    def flush(self) -> tuple[int, int]:
        """Write everything added to the disk. Returns (documents, tokens), where a new Writer can continue."""
        with _writing(self._partial_bin):
            _sync(self._bin)
            _sync(self._lengths)
        return self.documents, self.tokens

    def finish(self) -> Index:
        """Write the `.idx`, rename both files, and return the pair's Index, read back through its checks."""
        if not self.documents:
            raise wrong(tokens_path(self.prefix), "at least one document", "none")
        self.flush()
        self.close()
        with _writing(self._partial_index):
            self._write_index()
            self._partial_bin.replace(tokens_path(self.prefix))
            self._partial_index.replace(index_path(self.prefix))  # last: where an .idx exists the pair is complete
            self._partial_lengths.unlink()
        index = Index.read(self.prefix)
        index.check_token_file_size()
        return index

    def close(self) -> None:
        """Close the partial files; they stay on the disk."""
        self._bin.close()
        self._lengths.close()

    def _write_index(self) -> None:
        lengths = np.fromfile(self._partial_lengths, "<i4")
        code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == self.dtype)
        with self._partial_index.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.tobytes())
            ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
            file.write((ends - lengths * self.dtype.itemsize).tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
            _sync(file)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what, why = f"{path}: cannot be written: {error.strerror}", "the disk is full, read-only or gone"
        raise StorageError(what, why, "make room, or choose another folder") from error


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open `path` for writing after its first `size` bytes; 0 starts a new file."""
    with _writing(path):
        file = path.open("r+b" if size else "wb")
        if (got := os.fstat(file.fileno()).st_size) < size:
            file.close()
            raise wrong(path, f"at least the {size} bytes of the checkpoint", f"{got} bytes")
        file.truncate(size)
        file.seek(size)
        return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
