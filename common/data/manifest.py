"""Sizes, SHA-256 and counts of the files in a folder, as JSON. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import DataError, write_whole

BLOCK = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class FileFacts:
    size: int | None = None  # bytes; None: unknown
    sha256: str | None = None


@dataclass(frozen=True)
class PairFacts:
    dtype: str  # numpy name of the token ids
    documents: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Expected properties of a folder's files. An unknown property is None and is not checked."""

    source: str
    vocab_size: int
    files: dict[str, FileFacts] = field(default_factory=dict)  # by name
    pairs: dict[str, PairFacts] = field(default_factory=dict)  # by prefix of a .bin/.idx pair

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest. Raises DataError if there is none at `path`, or if it is damaged."""
        if path.exists() and not path.is_file():
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
                "no manifest there",
                "name an existing manifest",
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{path}: not a manifest: {error!r}"
            raise DataError(
                what, "the file is damaged or of another kind", "restore it, or write it again"
            ) from error

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self), indent=2).encode() + b"\n")


def sha256_of(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal. Calls `on_read` with the bytes of each block."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if on_read:
                on_read(len(block))
    return digest.hexdigest()


def facts_of(path: Path, on_read: Callable[[int], None] | None = None) -> FileFacts:
    return FileFacts(path.stat().st_size, sha256_of(path, on_read))
