"""Read the header of Megatron's `.idx`, and count the sequences and documents of token files.

Token files may have a mask, which is no part of Megatron's format: `<prefix>.mask` has one byte for
each token, 1 if the loss counts it as a label and else 0.

The launcher checks the counts before a run. No function here opens a `.bin`. Standard library only.
Layout of the files: indexed_dataset.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common.errors import DataError
from common.paths import open_regular

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
CHUNK = 1 << 20  # sequence lengths read at a time: 4 MiB


@dataclass(frozen=True)
class Header:
    """The header of an `.idx`."""

    dtype: str  # dtype of the token ids, such as "<u2"
    num_sequences: int
    num_boundaries: int

    @property
    def itemsize(self) -> int:
        """Bytes of a token id."""
        return int(self.dtype[-1])


def read_header(path: Path, start: bytes, size: int) -> Header:
    """Return the header of an `.idx`.

    `start`: the first HEADER.size bytes of the file. `size`: bytes of the whole file. Raises
    DataError if the file is damaged.
    """
    if size < HEADER.size:
        raise content_error(path, f"a header of {HEADER.size} bytes", f"{size} bytes in all")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(start)
    if magic != MAGIC:
        raise content_error(
            path, f"the first bytes to be {MAGIC!r}", f"{magic!r}: not a Megatron index"
        )
    if version != VERSION:
        raise content_error(path, f"version {VERSION}", f"version {version}")
    if code not in DTYPE_CODES:
        known = ", ".join(f"{known} ({dtype})" for known, dtype in DTYPE_CODES.items())
        raise content_error(path, f"a dtype code of token ids: {known}", f"code {code}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size != expected:
        raise content_error(
            path,
            f"{expected} bytes for {num_sequences} sequences and {num_boundaries} boundaries",
            f"{size} bytes",
        )
    return Header(DTYPE_CODES[code], num_sequences, num_boundaries)


def stored_sequences(prefix: Path, sequence_length: int) -> int:
    """Return the number of whole sequences in the stream of `<prefix>.bin`, from its size.

    Raises DataError if a file is missing or the `.idx` is damaged.
    """
    path = index_path(prefix)
    try:
        with open_regular(path) as file:
            header = read_header(path, file.read(HEADER.size), path.stat().st_size)
        path = tokens_path(prefix)
        size = path.stat().st_size
    except OSError as error:
        raise cannot_open(path, error) from error
    return whole_sequences(size // header.itemsize, sequence_length)


def stored_documents(prefix: Path, sequence_length: int, limit: int) -> int:
    """Return the number of documents with a label that counts, counted up to `limit`.

    Raises DataError if a file is missing or damaged.
    """
    counts = label_counts(prefix, sequence_length)
    return sum(1 for _ in islice(filter(None, counts), limit))


def label_counts(prefix: Path, sequence_length: int) -> Iterator[int]:
    """Yield the number of labels of each document that count, within a sequence of that length.

    A document of n tokens has n - 1 labels. Without a mask, all of them count. Raises DataError.
    """
    path = index_path(prefix)
    mask = mask_path(prefix)
    try:
        with (
            open_regular(path) as file,
            open_regular(mask) if mask.exists() else nullcontext() as marks,
        ):
            header = read_header(path, file.read(HEADER.size), path.stat().st_size)
            if marks:
                tokens = tokens_path(prefix).stat().st_size // header.itemsize
                if (size := mask.stat().st_size) != tokens:
                    raise content_error(mask, f"{tokens} bytes, one for each token", f"{size}")
            for first in range(0, header.num_sequences, CHUNK):
                count = min(CHUNK, header.num_sequences - first)
                for length in struct.unpack(f"<{count}i", file.read(4 * count)):
                    if marks:
                        yield marks.read(length).count(1, 1, sequence_length + 1)
                    else:
                        yield max(0, min(length - 1, sequence_length))
    except OSError as error:
        raise cannot_open(path, error) from error


def require_training(prefix: Path, got: int, unit: str, do: str) -> None:
    """Raise DataError if the training data hold none of `unit`, such as "documents".

    `got`: the number that they hold. `do`: what to do about it.
    """
    if not got:
        raise DataError(f"{index_path(prefix)}: expected {unit}, got 0", "nothing can train", do)


def require_validation(prefix: Path, got: int, expected: int, unit: str, do: str) -> None:
    """Raise DataError if the validation data hold fewer than `expected` of `unit`.

    For the parameters, see `require_training`.
    """
    if got < expected:
        what = f"{index_path(prefix)}: expected at least {expected} {unit}, got {got}"
        raise DataError(what, "every evaluation must see all of them", do)


def whole_sequences(tokens: int, sequence_length: int) -> int:
    """Return the number of whole sequences in a stream. Its last label needs one more token."""
    return max(tokens - 1, 0) // sequence_length


def index_path(prefix: Path) -> Path:
    """Return the path of the `.idx`."""
    # Not by with_suffix, because prefixes such as `c4-train.en_6_text_document` have dots.
    return Path(f"{prefix}.idx")


def tokens_path(prefix: Path) -> Path:
    """Return the path of the `.bin`."""
    return Path(f"{prefix}.bin")


def mask_path(prefix: Path) -> Path:
    """Return the path of the mask, which only some token files have."""
    return Path(f"{prefix}.mask")


def content_error(path: Path, expected: str, got: str) -> DataError:
    """Return the error for a token file with unexpected content."""
    return DataError(
        f"{path}: expected {expected}, got {got}",
        "the file is damaged, incomplete or in another format",
        "fetch or build it again",
    )


def cannot_open(path: Path, error: OSError) -> DataError:
    """Return the error for a token file that the system does not open."""
    return DataError(
        f"{path}: cannot be opened: {error.strerror}",
        "its path follows from DATADIR, --data-dir, or --data without .bin and .idx",
        "check that path, or prepare the data",
    )
