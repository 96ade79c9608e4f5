"""What preparing data needs, whatever the benchmark: manifests, checksums, a lock, a progress bar, and failing well.

Standard library only. All text goes to stderr: stdout belongs to the log.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from common.errors import DataError, Interrupted, PreflightError, RunError, StorageError

HASH_CHUNK = 1 << 22  # bytes


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_to_exit_code(work: Callable[[], object]) -> int:
    """Do `work`; on a failure print its what, why and do, and return the exit code of its family."""
    try:
        work()
        return 0
    except RunError as error:
        failure = error
    except KeyboardInterrupt:
        failure = Interrupted(signal.SIGINT)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        failure = StorageError(
            f"{place}{error.strerror or error}", "the system refused a file operation", "check space, permissions and the mount"
        )
    say(failure.lines())
    return failure.exit_code


class Bar:
    """How far a long piece of work is: a bar that rewrites itself on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, total: int, unit: str = "bytes", stream: TextIO | None = None, every_s: float | None = None):
        self.title, self.total, self.unit, self.stream = title, max(total, 1), unit, stream or sys.stderr
        self.on_terminal = self.stream.isatty()
        self.every_s = every_s if every_s is not None else (0.2 if self.on_terminal else 15.0)
        self.began = self.shown = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now - self.shown >= self.every_s:
            self.shown = now
            self._write(done)

    def finish(self) -> None:
        if self.on_terminal:
            self._write(self.total)
            self.stream.write("\n")
            self.stream.flush()

    def _write(self, done: int) -> None:
        share, spent = min(done / self.total, 1.0), time.monotonic() - self.began
        left = f", {spent * (1 - share) / share:.0f} s left" if share > 0 else ""
        text = f"{self.title} {100 * share:3.0f} % ({done:,} of {self.total:,} {self.unit}{left})"
        if self.on_terminal:
            filled = int(30 * share)
            self.stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {text}")
        else:
            self.stream.write(text + "\n")
        self.stream.flush()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while inside; a second process waits. The kernel lets go when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                say(f"note: {path.parent} is on a file system without locks: do not start two preparations of it at once")
            else:
                say(f"waiting: another process holds {path}")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_free_space(folder: Path, needed_bytes: int, for_what: str) -> None:
    """Raise PreflightError unless the file system of `folder` has the room; the folder need not exist yet."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        what = f"{folder}: {for_what} needs {needed_bytes / 1e9:.0f} GB, free are {free / 1e9:.1f} GB"
        raise PreflightError(what, f"the file system of {existing} is too full", "make room, or name a folder on another disk")


@dataclass(frozen=True)
class FileFacts:
    size: int | None = None  # bytes; None: not known
    sha256: str | None = None


@dataclass(frozen=True)
class PairFacts:
    dtype: str  # numpy name of the token ids
    documents: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What the files of a data folder should be. A fact that nobody has stated is None, and is then reported as not checked."""

    source: str
    vocab_size: int
    files: dict[str, FileFacts] = field(default_factory=dict)  # by name
    pairs: dict[str, PairFacts] = field(default_factory=dict)  # by prefix of a .bin/.idx pair

    @classmethod
    def read(cls, path: Path) -> Manifest:
        try:
            table = json.loads(Path(path).read_text())
            files = {name: FileFacts(**facts) for name, facts in table["files"].items()}
            pairs = {name: PairFacts(**facts) for name, facts in table["pairs"].items()}
            return cls(table["source"], table["vocab_size"], files, pairs)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened: {error.strerror}", "no manifest there", "name an existing manifest") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: not a manifest: {error!r}", "the file is damaged or of another kind", "restore it, or write it anew"
            ) from error

    def write(self, path: Path) -> None:
        """All of it or nothing, under a temporary name first."""
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        temporary.replace(path)


@dataclass(frozen=True)
class Recipe:
    """Files that a build makes in a folder of its own choice, and how to know them again."""

    title: str  # what they are, for messages
    source: str  # what they are made of, recipe number included: with another source they are built again
    vocab_size: int
    files: tuple[str, ...]  # names, relative to the folder
    manifest: str  # written last: its presence means that all is there
    lock: str


def build_once(folder: Path, recipe: Recipe, build: Callable[[Path], Manifest]) -> None:
    """Have `build` make the recipe's files in `folder` and write the manifest last; nothing where they are already whole.

    A kill at any point leaves a folder without manifest, which the next call builds again, under the same names. Raises
    StorageError where files of these names lie in a folder that this recipe never worked in: they are somebody else's.
    """
    if not _defect(folder, recipe):  # without the lock: the folder may be read-only
        say(f"{recipe.title} in {folder}: complete and verified")
        return
    _refuse_foreign_files(folder, recipe)
    with locked(folder / recipe.lock):
        defect = _defect(folder, recipe)
        if not defect:
            say(f"{recipe.title} in {folder}: another process has built it")
            return
        say(f"{recipe.title} in {folder}: building ({defect})")
        began = time.monotonic()
        (folder / recipe.manifest).unlink(missing_ok=True)  # a kill from here on must not leave a manifest of older files
        build(folder).write(folder / recipe.manifest)
        say(f"{recipe.title}: built in {time.monotonic() - began:.1f} s")


def manifest_of(folder: Path, recipe: Recipe, pairs: dict[str, PairFacts] | None = None) -> Manifest:
    """The manifest of files that were just built."""
    return Manifest(recipe.source, recipe.vocab_size, {name: facts_of(folder / name) for name in recipe.files}, pairs or {})


def _refuse_foreign_files(folder: Path, recipe: Recipe) -> None:
    if (folder / recipe.lock).exists() or (folder / recipe.manifest).exists():
        return
    for name in recipe.files:
        if (folder / name).exists():
            raise StorageError(
                f"{folder / name}: exists already", "it was not made here, and nothing is overwritten", "name another folder"
            )


def _defect(folder: Path, recipe: Recipe) -> str:
    """Why the files must be built (again); empty if every one is what the manifest says."""
    if not (folder / recipe.manifest).exists():
        return "not built yet, or not to the end"
    try:
        manifest = Manifest.read(folder / recipe.manifest)
    except DataError as error:
        return error.what
    if (manifest.source, manifest.vocab_size, set(manifest.files)) != (recipe.source, recipe.vocab_size, set(recipe.files)):
        return f"there is one of another recipe: {manifest.source}"
    for name, facts in manifest.files.items():
        if not (folder / name).is_file() or facts_of(folder / name) != facts:
            return f"{name} is missing or damaged"
    return ""


def sha256_of(path: Path, show: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal; `show` is called with the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if show is not None:
                show(done)
    return digest.hexdigest()


def facts_of(path: Path) -> FileFacts:
    return FileFacts(path.stat().st_size, sha256_of(path))
