"""Megatron's token files: a pair `<prefix>.idx` (lengths, offsets) and `<prefix>.bin` (token ids, one after the other).

Layout of `.idx`, all little endian (source: megatron-core, `datasets/indexed_dataset.py`):

    offset       type      content
    0            9 bytes   b"MMIDIDX" and two zero bytes
    9            u64       version = 1
    17           u8        dtype code of the tokens (DTYPE_CODES)
    18           u64       N = number of sequences
    26           u64       D = number of document boundaries = documents + 1
    34           i32[N]    sequence lengths, in tokens
    34+4N        i64[N]    byte offset of each sequence in `.bin`: running sum of length x item size, from 0
    34+12N       i64[D]    document boundaries in sequence numbers, first 0, last N

In MLPerf's C4 files a document is one sequence. `.bin` has no header.

Metadata and tokens are opened apart: MLPerf's clock must start before any token file is opened, while document counts and
lengths may be read earlier (training_rules.adoc, "Other Uses of Data"). So `Index.read` touches the `.idx` alone, and only
`Index.open_tokens` opens the `.bin`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from common.errors import DataError, StorageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, D: 34 bytes
DTYPE_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
TOKEN_DTYPE_CODES = (3, 4, 5, 8)  # what token ids can sensibly be; bytes and floats are somebody else's data
UINT16_VOCAB_LIMIT = 65500  # megatron-core, DType.optimal_dtype
CHUNK = 1 << 22  # entries checked or written at a time: 32 MiB of int64


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500, else int32: the choice of Megatron's preprocessor."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


class Index:
    """What the `.idx` says. Memory-mapped, so 45 million documents cost no memory until they are looked at.

    sequence_lengths int32 [N] in tokens, sequence_offsets int64 [N] in bytes, document_boundaries int64 [D] in sequences.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, lengths: np.ndarray, offsets: np.ndarray, boundaries: np.ndarray):
        self.prefix, self.dtype = prefix, dtype
        self.sequence_lengths, self.sequence_offsets, self.document_boundaries = lengths, offsets, boundaries
        self.num_tokens = (int(offsets[-1]) // dtype.itemsize + int(lengths[-1])) if len(lengths) else 0

    @classmethod
    def read(cls, prefix: Path) -> Index:
        """Read and check `<prefix>.idx`; never opens the `.bin`. Raises DataError, or StorageError if the disk fails."""
        prefix = Path(prefix)
        path = index_path(prefix)
        dtype, num_sequences, num_boundaries = _read_header(path)
        try:
            raw = np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise _cannot_read(path, error) from error
        lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        offsets = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        boundaries = np.frombuffer(raw, "<i8", num_boundaries, HEADER.size + 12 * num_sequences)
        _check_boundaries(path, boundaries, num_sequences)
        _check_offsets(path, lengths, offsets, dtype.itemsize)
        return cls(prefix, dtype, lengths, offsets, boundaries)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_boundaries) - 1

    def check_token_file_size(self) -> None:
        """Compare the size of the `.bin` with the header, without opening it. Raises DataError."""
        path, expected = tokens_path(self.prefix), self.num_tokens * self.dtype.itemsize
        try:
            got = path.stat().st_size
        except OSError as error:
            raise _cannot_read(path, error) from error
        if got != expected:
            raise _wrong(path, f"{expected} bytes ({self.num_tokens} tokens of {self.dtype.itemsize} bytes, from the .idx)", f"{got} bytes")

    def open_tokens(self) -> Tokens:
        """Open the `.bin`. In a timed run: only after run_start."""
        self.check_token_file_size()
        return Tokens(self)


class Tokens:
    """The open `.bin`.

    Read with `pread` and not through a memory map: a failing disk then raises instead of killing the process with SIGBUS,
    and a slow read does not hold Python's lock while the training loop wants to launch kernels.
    """

    def __init__(self, index: Index):
        self.index, self.path = index, tokens_path(index.prefix)
        try:
            self._file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise _cannot_read(self.path, error) from error

    def read(self, first: int, count: int) -> np.ndarray:
        """`count` token ids from the `first` on, in file order across sequences; the stored dtype, read-only.

        Raises DataError if the file ends early, StorageError if it cannot be read.
        """
        itemsize = self.index.dtype.itemsize
        wanted, parts, got = count * itemsize, [], 0
        while got < wanted:  # one pread returns at most 2 GiB
            try:
                part = os.pread(self._file, wanted - got, first * itemsize + got)
            except OSError as error:
                raise StorageError(
                    f"{self.path}: {error.strerror}", f"reading token {first} failed", "check the disk or the mount"
                ) from error
            if not part:
                raise _wrong(
                    self.path, f"{count} tokens at token {first}", f"{got // itemsize} (the file became shorter while it was open)"
                )
            parts.append(part)
            got += len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.index.dtype)

    def read_sequence(self, sequence: int, offset: int, count: int) -> np.ndarray:
        """`count` token ids of one sequence from its token `offset` on."""
        return self.read(int(self.index.sequence_offsets[sequence]) // self.index.dtype.itemsize + offset, count)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self):
        if hasattr(self, "_file"):
            self.close()

    def __enter__(self) -> Tokens:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Writer:
    """Writes documents one by one, each as one sequence, to `.partial` names; `finish` renames: all of it or nothing.

    Lengths stream to a file as well, so that memory stays flat and a conversion can go on after a kill: `flush` makes what
    was added durable, and `Writer(prefix, vocab_size, documents, tokens)` cuts the partial files back to such a point.
    """

    def __init__(self, prefix: Path, vocab_size: int, documents: int = 0, tokens: int = 0):
        self.prefix, self.vocab_size, self.dtype = Path(prefix), vocab_size, token_dtype(vocab_size)
        self.documents, self.tokens = documents, tokens
        self._partial_bin = _partial(tokens_path(self.prefix))
        self._partial_lengths = _partial(self.prefix.with_name(self.prefix.name + ".lengths"))
        if documents:
            self._take_back_renamed_bin()
        self._bin = _open_at(self._partial_bin, tokens * self.dtype.itemsize)
        self._lengths = _open_at(self._partial_lengths, documents * 4)

    def add(self, ids: np.ndarray | list[int]) -> None:
        """Append one document. Raises DataError if it is empty or an id is outside [0, vocab_size)."""
        wide = np.asarray(ids, dtype=np.int64)
        if wide.ndim != 1 or not wide.size:
            raise _wrong(
                tokens_path(self.prefix), f"document {self.documents} as a non-empty list of ids", f"an array of shape {wide.shape}"
            )
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high >= self.vocab_size:
            wanted = f"ids from 0 to {self.vocab_size - 1}, stored as {self.dtype.name}"
            raise _wrong(tokens_path(self.prefix), wanted, f"id {low if low < 0 else high} in document {self.documents}")
        try:
            self._bin.write(wide.astype(self.dtype).tobytes())
            self._lengths.write(struct.pack("<i", wide.size))
        except OSError as error:
            raise _cannot_write(self._partial_bin, error) from error
        self.documents += 1
        self.tokens += wide.size

    def flush(self) -> tuple[int, int]:
        """Force everything added onto the disk; return (documents, tokens), from which a new Writer can go on."""
        for file in (self._bin, self._lengths):
            _to_disk(file, self._partial_bin)
        return self.documents, self.tokens

    def finish(self) -> Index:
        """Write the `.idx`, give both files their names, and read the result back through the checks of `Index`."""
        if not self.documents:
            raise _wrong(tokens_path(self.prefix), "at least one document", "none")
        self.flush()
        self.close()
        partial_index = _partial(index_path(self.prefix))
        try:
            self._write_index(partial_index)
            self._partial_bin.replace(tokens_path(self.prefix))
            partial_index.replace(index_path(self.prefix))  # last: an .idx means that the pair is complete
            self._partial_lengths.unlink()
        except OSError as error:
            raise _cannot_write(partial_index, error) from error
        index = Index.read(self.prefix)
        index.check_token_file_size()
        return index

    def close(self) -> None:
        """Close the partial files and leave them where they are."""
        self._bin.close()
        self._lengths.close()

    def _write_index(self, path: Path) -> None:
        lengths = np.fromfile(self._partial_lengths, "<i4")
        code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == self.dtype)
        with path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.tobytes())
            offset = 0
            for start in range(0, len(lengths), CHUNK):
                ends = offset + np.cumsum(lengths[start : start + CHUNK], dtype=np.int64) * self.dtype.itemsize
                file.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
                offset = int(ends[-1])
            for start in range(0, len(lengths) + 1, CHUNK):
                file.write(np.arange(start, min(start + CHUNK, len(lengths) + 1), dtype="<i8").tobytes())
            _to_disk(file, path)

    def _take_back_renamed_bin(self) -> None:
        """A kill between the two renames of `finish` leaves a named `.bin` without `.idx`: it is our partial file."""
        final = tokens_path(self.prefix)
        if not self._partial_bin.exists() and final.exists() and not index_path(self.prefix).exists():
            final.replace(self._partial_bin)


def index_path(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")  # not with_suffix: prefixes such as `c4-train.en_6_text_document` have dots


def tokens_path(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """dtype, N and D of `path`, after checking magic, version, dtype code and file size."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _cannot_read(path, error) from error
    if len(head) < HEADER.size:
        raise _wrong(path, f"a header of {HEADER.size} bytes", f"{len(head)} bytes in all")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(head)
    if magic != MAGIC:
        raise _wrong(path, f"the first bytes to be {MAGIC!r}", f"{magic!r}: this is no Megatron index")
    if version != VERSION:
        raise _wrong(path, f"version {VERSION}", f"version {version}")
    if code not in TOKEN_DTYPE_CODES:
        known = ", ".join(f"{c} ({np.dtype(DTYPE_CODES[c]).name})" for c in TOKEN_DTYPE_CODES)
        name = f" ({np.dtype(DTYPE_CODES[code]).name})" if code in DTYPE_CODES else ""
        raise _wrong(path, f"a dtype code of token ids: {known}", f"code {code}{name}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size != expected:
        hint = " (a multimodal file, which has one more byte per sequence?)" if size == expected + num_sequences else ""
        raise _wrong(path, f"{expected} bytes for {num_sequences} sequences and {num_boundaries} boundaries", f"{size} bytes{hint}")
    return np.dtype(DTYPE_CODES[code]), num_sequences, num_boundaries


def _check_boundaries(path: Path, boundaries: np.ndarray, num_sequences: int) -> None:
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != num_sequences:
        got = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "no boundaries"
        raise _wrong(path, f"document boundaries from 0 to {num_sequences}", got)
    for start in range(0, len(boundaries) - 1, CHUNK):
        part = boundaries[start : start + CHUNK + 1]
        falling = part[1:] < part[:-1]
        if falling.any():
            at = start + int(falling.argmax())
            raise _wrong(path, "document boundaries that never fall", f"{boundaries[at]} then {boundaries[at + 1]} at document {at}")


def _check_offsets(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> None:
    """The offsets must be the running sum of the lengths: no gap, no overlap, nothing negative."""
    expected_first = 0
    for start in range(0, len(lengths), CHUNK):
        part = lengths[start : start + CHUNK]
        if part.min() < 0:
            at = start + int((part < 0).argmax())
            raise _wrong(path, "sequence lengths of 0 or more", f"{lengths[at]} for sequence {at}")
        ends = np.cumsum(part, dtype=np.int64)
        ends *= itemsize
        ends += expected_first
        got = offsets[start : start + CHUNK]
        if got[0] != expected_first or not np.array_equal(got[1:], ends[:-1]):
            expected = np.concatenate(([expected_first], ends[:-1]))
            at = int((got != expected).argmax())
            raise _wrong(path, f"sequence {start + at} at byte {expected[at]} (sum of the lengths before)", f"byte {got[at]}")
        expected_first = int(ends[-1])


def _open_at(path: Path, size: int):
    """Open for writing with exactly `size` bytes kept: 0 starts anew, more goes on behind a checkpoint."""
    try:
        file = path.open("r+b" if size else "wb")
        got = os.fstat(file.fileno()).st_size
        if got < size:
            file.close()
            raise _wrong(path, f"at least the {size} bytes of the checkpoint", f"{got} bytes")
        file.truncate(size)
        file.seek(size)
        return file
    except OSError as error:
        raise _cannot_write(path, error) from error


def _to_disk(file, path: Path) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _cannot_write(path, error) from error


def _wrong(path: Path, expected: str, got: str) -> DataError:
    return DataError(
        f"{path}: expected {expected}, got {got}", "the file is damaged, incomplete or of another kind", "fetch or build it again"
    )


def _cannot_read(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be opened: {error.strerror}",
        "the token files are named by rules.py and DATADIR",
        "check DATADIR, or prepare the data",
    )


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot be written: {error.strerror}", "the disk is full, read-only or gone", "make room, or choose another place"
    )
