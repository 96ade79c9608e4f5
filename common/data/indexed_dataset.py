"""Read Megatron's token files.

They are pairs of `<prefix>.idx` (lengths, offsets) and `<prefix>.bin` (token ids, no header).

Layout of `.idx`, all little endian (source: megatron-core, `datasets/indexed_dataset.py`):

    offset       type      content
    0            9 bytes   b"MMIDIDX" and two zero bytes
    9            u64       version = 1
    17           u8        dtype code of the tokens (DTYPE_CODES in indexed_dataset_header.py)
    18           u64       N = number of sequences
    26           u64       D = number of document boundaries = documents + 1
    34           i32[N]    sequence lengths, in tokens
    34+4N        i64[N]    byte offset of each sequence in `.bin`: running sum of length x item
                           size, from 0
    34+12N       i64[D]    document boundaries in sequence numbers, first 0, last N

In MLPerf's C4 files a document is one sequence.

`Index.read` opens only the `.idx`, and `Index.open_tokens` opens the `.bin`. MLPerf's clock must
start before any token file is opened, but document counts and lengths may be read earlier
(training_rules.adoc, "Other Uses of Data").
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from common.atomic_write import naming
from common.data.indexed_dataset_header import (
    HEADER,
    cannot_open,
    content_error,
    index_path,
    read_header,
    tokens_path,
)
from common.paths import open_regular

CHUNK = 1 << 22  # entries checked at a time: 32 MiB of int64


class Index:
    """The content of an `.idx` in memory: 20 bytes per document, 0.9 GB for 45 million documents.

    `sequence_lengths`: int32 [N], in tokens.
    `sequence_offsets`: int64 [N], in bytes of the `.bin`.
    `document_boundaries`: int64 [D], in sequences.
    """

    def __init__(
        self,
        prefix: Path,
        dtype: np.dtype,
        lengths: np.ndarray,
        offsets: np.ndarray,
        boundaries: np.ndarray,
    ):
        self.prefix = prefix
        self.dtype = dtype
        self.sequence_lengths = lengths
        self.sequence_offsets = offsets
        self.document_boundaries = boundaries
        self.num_sequences = len(lengths)
        self.num_documents = len(boundaries) - 1
        self.num_tokens = 0
        if len(lengths):
            self.num_tokens = int(offsets[-1]) // dtype.itemsize + int(lengths[-1])

    @classmethod
    def read(cls, prefix: Path) -> Index:
        """Read and check `<prefix>.idx` without opening the `.bin`. Raises DataError."""
        prefix = Path(prefix)
        path = index_path(prefix)
        try:
            # Not a memory map: if a mapped file is truncated later, SIGBUS kills the process.
            with open_regular(path) as file:
                raw = np.fromfile(file, np.uint8)
        except OSError as error:
            raise cannot_open(path, error) from error
        header = read_header(path, raw[: HEADER.size].tobytes(), len(raw))
        dtype = np.dtype(header.dtype)
        num_sequences = header.num_sequences
        lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        offsets = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        boundaries = np.frombuffer(
            raw, "<i8", header.num_boundaries, HEADER.size + 12 * num_sequences
        )
        _check_boundaries(path, boundaries, num_sequences)
        _check_offsets(path, lengths, offsets, dtype.itemsize)
        return cls(prefix, dtype, lengths, offsets, boundaries)

    def check_token_file_size(self) -> None:
        """Raise DataError unless the `.bin` has the size that follows from the `.idx`.

        Does not open the `.bin`.
        """
        path = tokens_path(self.prefix)
        expected = self.num_tokens * self.dtype.itemsize
        try:
            got = path.stat().st_size
        except OSError as error:
            raise cannot_open(path, error) from error
        if got != expected:
            raise content_error(
                path,
                f"{expected} bytes ({self.num_tokens} tokens of {self.dtype.itemsize} bytes, "
                "from the .idx)",
                f"{got} bytes",
            )

    def open_tokens(self) -> Tokens:
        """Open the `.bin`. A timed run calls this only after run_start."""
        self.check_token_file_size()
        return Tokens(self)


class Tokens(AbstractContextManager):
    """An open `.bin`.

    Reads use `pread` instead of a memory map. So a failing disk raises an error and does not kill
    the process with SIGBUS. And a slow read does not hold Python's global interpreter lock, which
    the training loop needs to launch kernels.
    """

    def __init__(self, index: Index):
        self.index = index
        self.path = tokens_path(index.prefix)
        try:
            self._file = open_regular(self.path)
        except OSError as error:
            raise cannot_open(self.path, error) from error

    def read(self, first: int, count: int) -> np.ndarray:
        """Return `count` token ids from number `first` of the file on, across sequences.

        The array is read-only and has the stored dtype. Raises DataError if the file ends early,
        OSError if it cannot be read.
        """
        itemsize = self.index.dtype.itemsize
        size = count * itemsize
        data = b""
        while len(data) < size:  # one pread returns at most 2 GiB
            with naming(self.path):
                part = os.pread(self._file.fileno(), size - len(data), first * itemsize + len(data))
            if not part:
                got = f"{len(data) // itemsize} (the file became shorter while it was open)"
                raise content_error(self.path, f"{count} tokens at token {first}", got)
            data = data + part if data else part
        return np.frombuffer(data, self.index.dtype)

    def read_sequence(self, sequence: int, offset: int, count: int) -> np.ndarray:
        """Return `count` token ids of one sequence, starting at its token `offset`."""
        first = int(self.index.sequence_offsets[sequence]) // self.index.dtype.itemsize
        return self.read(first + offset, count)

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _check_boundaries(path: Path, boundaries: np.ndarray, num_sequences: int) -> None:
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != num_sequences:
        got = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "no boundaries"
        raise content_error(path, f"document boundaries from 0 to {num_sequences}", got)
    falling = boundaries[1:] < boundaries[:-1]
    if falling.any():
        at = int(falling.argmax())
        raise content_error(
            path,
            "document boundaries that never fall",
            f"{boundaries[at]} then {boundaries[at + 1]} at document {at}",
        )


def _check_offsets(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> None:
    """Raise DataError unless no length is negative and the offsets are their running sum."""
    expected_first = 0
    for start in range(0, len(lengths), CHUNK):
        part = lengths[start : start + CHUNK]
        if part.min() < 0:
            at = start + int((part < 0).argmax())
            raise content_error(
                path, "sequence lengths of 0 or more", f"{lengths[at]} for sequence {at}"
            )
        ends = np.cumsum(part, dtype=np.int64)
        ends *= itemsize
        ends += expected_first
        got = offsets[start : start + CHUNK]
        if got[0] != expected_first or not np.array_equal(got[1:], ends[:-1]):
            expected = np.concatenate(([expected_first], ends[:-1]))
            at = int((got != expected).argmax())
            raise content_error(
                path,
                f"sequence {start + at} at byte {expected[at]} (sum of the lengths before)",
                f"byte {got[at]}",
            )
        expected_first = int(ends[-1])
