"""Manifests: JSON files with the sizes, SHA-256 and token counts of the files in a folder.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import DataError, write_text

BLOCK = 1 << 22  # bytes read at a time
# The sample of `sampled_facts_of`: SAMPLE_BLOCKS blocks, SAMPLE_BYTES in total.
SAMPLE_BLOCKS = 256
SAMPLE_BYTES = 1 << 20
# Larger files are not hashed as a whole before each run: their sample is compared. 64 MiB take
# 0.04 to 0.2 s.
WHOLE_BYTES = 1 << 26


@dataclass(frozen=True)
class FileFacts:
    """Size and checksums of a file. None: unknown."""

    size: int | None = None  # bytes
    sha256: str | None = None  # hexadecimal
    # SHA-256 of the sample of `sampled_facts_of`, for a file of more than WHOLE_BYTES.
    sample: str | None = None

    def difference(
        self, path: Path, whole: bool = True, on_read: Callable[[int], None] | None = None
    ) -> str:
        """Return how the file at `path` differs from these facts, or "" if it does not.

        `whole`: read all of the file, even if its sample is known. `on_read`: see `sha256_of`.
        """
        try:
            size = path.stat().st_size
            if self.size is not None and size != self.size:
                return f"it has {size:,} bytes instead of {self.size:,}"
            if self.sample and not whole:
                found = sampled_facts_of(path).sha256
                return "" if found == self.sample else "its content was changed"
            if self.sha256 and sha256_of(path, on_read) != self.sha256:
                return "its SHA-256 differs"
        except FileNotFoundError:
            return "it is missing"
        return ""


@dataclass(frozen=True)
class PairFacts:
    """Content of a .bin/.idx pair. None: unknown."""

    dtype: str  # numpy name of the token ids
    documents: int | None = None
    tokens: int | None = None
    largest_id: int | None = None  # largest token id


@dataclass(frozen=True)
class Manifest:
    """Expected properties of a folder's files. Unknown properties are not checked."""

    source: str  # where the files come from, or how they are built
    vocab_size: int
    files: dict[str, FileFacts] = field(default_factory=dict)  # by name
    pairs: dict[str, PairFacts] = field(default_factory=dict)  # by prefix of a .bin/.idx pair
    # Other keys of the JSON object: what the files were made of (`prepare text`).
    about: dict[str, Any] = field(default_factory=dict)

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
            files = {name: FileFacts(**facts) for name, facts in table.pop("files").items()}
            pairs = {name: PairFacts(**facts) for name, facts in table.pop("pairs").items()}
            return cls(table.pop("source"), table.pop("vocab_size"), files, pairs, table)
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
        """Write the manifest atomically. Raises StorageError."""
        table = {
            "source": self.source,
            "vocab_size": self.vocab_size,
            "files": {name: _known(facts) for name, facts in self.files.items()},
            "pairs": {name: _known(facts) for name, facts in self.pairs.items()},
        }
        write_text(path, json.dumps(table | self.about, indent=2) + "\n")


def _known(facts: FileFacts | PairFacts) -> dict[str, Any]:
    """Return name -> value of the facts that are known."""
    return {name: value for name, value in asdict(facts).items() if value is not None}


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
    """Return all facts of a file. `on_read`: see `sha256_of`. Raises OSError."""
    size = path.stat().st_size
    sample = sampled_facts_of(path).sha256 if size > WHOLE_BYTES else None
    return FileFacts(size, sha256_of(path, on_read), sample)


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
