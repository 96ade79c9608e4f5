"""Write Megatron's token files `<prefix>.bin` and `.idx` (layout: indexed_dataset.py)."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from common.atomic_write import create, naming, rename_complete, sync
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    content_error,
    index_path,
    tokens_path,
)

UINT16_VOCAB_LIMIT = 65500  # megatron-core, DType.optimal_dtype


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 for a vocabulary below 65,500 tokens, else int32, as Megatron does."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


class IndexedDatasetWriter:
    """Writer of a pair of token files, one sequence per document.

    The files have temporary names until `finish` renames them. Needs 4 bytes of memory per
    document. Raises OSError if a file cannot be written.
    """

    def __init__(self, prefix: Path, vocab_size: int):
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.lengths = array("i")
        self._bin = create(tokens_path(self.prefix))

    def add(self, ids: np.ndarray | list[int]) -> None:
        """Append a document. Raises DataError if it is empty or an id is not in the vocabulary."""
        wide = np.asarray(ids, dtype=np.int64)
        path = tokens_path(self.prefix)
        if wide.ndim != 1 or not wide.size:
            raise content_error(
                path,
                f"document {len(self.lengths)} as a non-empty list of ids",
                f"an array of shape {wide.shape}",
            )
        low = int(wide.min())
        high = int(wide.max())
        if low < 0 or high >= self.vocab_size:
            raise content_error(
                path,
                f"ids from 0 to {self.vocab_size - 1}, stored as {self.dtype.name}",
                f"id {low if low < 0 else high} in document {len(self.lengths)}",
            )
        with naming(path):
            self._bin.write(wide.astype(self.dtype).tobytes())
        self.lengths.append(wide.size)

    def finish(self) -> Index:
        """Write the `.idx` and rename both files. Return the Index, read back with all checks."""
        if not self.lengths:
            raise content_error(tokens_path(self.prefix), "at least one document", "none")
        with naming(tokens_path(self.prefix)), self._bin:
            sync(self._bin)
        lengths = np.array(self.lengths, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        offsets = ends - lengths * self.dtype.itemsize
        boundaries = np.arange(len(lengths) + 1, dtype="<i8")
        code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == self.dtype)
        with naming(index_path(self.prefix)), create(index_path(self.prefix)) as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            for part in (lengths, offsets, boundaries):
                file.write(part.tobytes())
            sync(file)
        rename_complete(Path(self._bin.name), tokens_path(self.prefix))
        # Last, because an existing .idx means that the pair is complete.
        rename_complete(Path(file.name), index_path(self.prefix))
        index = Index.read(self.prefix)
        index.check_token_file_size()
        return index
