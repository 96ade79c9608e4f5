"""Read Megatron's token files: a pair `<prefix>.idx` (lengths, offsets) and `<prefix>.bin` (token
ids, without a header).

Layout of `.idx`, all little endian (source: megatron-core, `datasets/indexed_dataset.py`):

    offset       type      content
    0            9 bytes   b"MMIDIDX" and two zero bytes
    9            u64       version = 1
    17           u8        dtype code of the tokens (DTYPE_CODES)
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
import struct
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from common.errors import DataError, StorageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, D: 34 bytes
# Dtypes that token ids can have: integers of at least 16 bits. Megatron defines more codes.
DTYPE_CODES = {
    3: "<i2",
    4: "<i4",
    5: "<i8",
    8: "<u2",
}
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
            raw = np.fromfile(path, np.uint8)
        except OSError as error:
            raise _cannot_open(path, error) from error
        dtype, num_sequences, num_boundaries = _read_header(path, raw)
        lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        offsets = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        boundaries = np.frombuffer(raw, "<i8", num_boundaries, HEADER.size + 12 * num_sequences)
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
            raise _cannot_open(path, error) from error
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
    the process with SIGBUS, and a slow read does not hold Python's global interpreter lock while
    the training loop launches kernels.
    """

    def __init__(self, index: Index):
        self.index = index
        self.path = tokens_path(index.prefix)
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise _cannot_open(self.path, error) from error

    def read(self, first: int, count: int) -> np.ndarray:
        """Return `count` token ids from number `first` of the file on, across sequences.

        The array is read-only and has the stored dtype. Raises DataError if the file ends early,
        StorageError if it cannot be read.
        """
        itemsize = self.index.dtype.itemsize
        size = count * itemsize
        data = b""
        while len(data) < size:  # one pread returns at most 2 GiB
            try:
                part = os.pread(self._file.fileno(), size - len(data), first * itemsize + len(data))
            except OSError as error:
                raise StorageError(
                    f"{self.path}: {error.strerror}",
                    f"reading token {first} failed",
                    "check the disk or the mount",
                ) from error
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


def index_path(prefix: Path) -> Path:
    """Return the path of the `.idx`."""
    # Not by with_suffix, because prefixes such as `c4-train.en_6_text_document` have dots.
    return Path(f"{prefix}.idx")


def tokens_path(prefix: Path) -> Path:
    """Return the path of the `.bin`."""
    return Path(f"{prefix}.bin")


def _read_header(path: Path, raw: np.ndarray) -> tuple[np.dtype, int, int]:
    """Return (dtype, N, D) from the bytes of an `.idx`. Raises DataError if they are damaged."""
    size = len(raw)
    if size < HEADER.size:
        raise content_error(path, f"a header of {HEADER.size} bytes", f"{size} bytes in all")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(
        raw[: HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise content_error(
            path, f"the first bytes to be {MAGIC!r}", f"{magic!r}: not a Megatron index"
        )
    if version != VERSION:
        raise content_error(path, f"version {VERSION}", f"version {version}")
    if code not in DTYPE_CODES:
        known = ", ".join(f"{known} ({np.dtype(name).name})" for known, name in DTYPE_CODES.items())
        raise content_error(path, f"a dtype code of token ids: {known}", f"code {code}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size != expected:
        raise content_error(
            path,
            f"{expected} bytes for {num_sequences} sequences and {num_boundaries} boundaries",
            f"{size} bytes",
        )
    return np.dtype(DTYPE_CODES[code]), num_sequences, num_boundaries


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


def content_error(path: Path, expected: str, got: str) -> DataError:
    """Return the error for a token file with unexpected content."""
    return DataError(
        f"{path}: expected {expected}, got {got}",
        "the file is damaged, incomplete or in another format",
        "fetch or build it again",
    )


def _cannot_open(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be opened: {error.strerror}",
        "DATADIR and rules.py define the paths of the token files",
        "check DATADIR, or prepare the data",
    )
