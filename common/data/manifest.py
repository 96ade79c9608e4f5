"""Manifests: JSON files with the sizes, SHA-256 and token counts of the files in a folder.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.atomic_write import write_whole
from common.errors import DataError

BLOCK = 1 << 22  # bytes read at a time
# The sample of `sampled_facts_of`: SAMPLE_BLOCKS blocks, SAMPLE_BYTES in total.
SAMPLE_BLOCKS = 256
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file. None: unknown."""

    size: int | None = None  # bytes
    sha256: str | None = None  # hexadecimal


@dataclass(frozen=True)
class PairFacts:
    """Content of a .bin/.idx pair. None: unknown."""

    dtype: str  # numpy name of the token ids
    documents: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Expected properties of a folder's files. Unknown properties are not checked."""

    source: str  # where the files come from, or how they are built
    vocab_size: int
    files: dict[str, FileFacts] = field(default_factory=dict)  # by name
    pairs: dict[str, PairFacts] = field(default_factory=dict)  # by prefix of a .bin/.idx pair

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest. Raises DataError if `path` does not exist or is not a manifest."""
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(
                f"{path} is not a regular file",
                "a pipe or a device may never end",
                "name an existing manifest",
            )
        try:
            table = json.loads(Path(path).read_text())
            files = {name: FileFacts(**facts) for name, facts in table["files"].items()}
            pairs = {name: PairFacts(**facts) for name, facts in table["pairs"].items()}
            return cls(table["source"], table["vocab_size"], files, pairs)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be opened: {error.strerror}",
                "there is no readable manifest at this path",
                "name an existing manifest",
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path}: not a manifest: {error!r}",
                "the file is damaged or has another format",
                "restore it, or write it again",
            ) from error

    def write(self, path: Path) -> None:
        """Write the manifest atomically. Raises OSError."""
        write_whole(path, json.dumps(asdict(self), indent=2).encode() + b"\n")


def sha256_of(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    `on_read`: called with the size of each block that was read, in bytes.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if on_read:
                on_read(len(block))
    return digest.hexdigest()


def facts_of(path: Path, on_read: Callable[[int], None] | None = None) -> FileFacts:
    """Return size and SHA-256 of a file. `on_read`: see `sha256_of`."""
    return FileFacts(path.stat().st_size, sha256_of(path, on_read))


def sampled_facts_of(path: Path) -> FileFacts:
    """Return the size of a file and the SHA-256 of blocks at equal distances in it.

    The sample identifies files that are too large to hash as a whole before each run. Its blocks
    cover the whole file, because files often differ in the middle only: the first MiB of weights is
    the embedding or the output head, which merged adapters leave as they were. A file of at most
    SAMPLE_BYTES is hashed as a whole. Raises OSError.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(SAMPLE_BLOCKS):
                file.seek(size * number // SAMPLE_BLOCKS)
                digest.update(file.read(SAMPLE_BYTES // SAMPLE_BLOCKS))
    return FileFacts(size, digest.hexdigest())
