"""What the `prepare` programs share: build a folder once, a lock, a progress bar, exit codes. Standard library only.

All text goes to stderr; stdout is for the log.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from common.data.manifest import Manifest, PairFacts, facts_of
from common.errors import DataError, Interrupted, PreflightError, RunError, StorageError


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_to_exit_code(work: Callable[[], object]) -> int:
    """Do `work`; on a failure print its three lines and return the exit code of its family."""
    try:
        work()
        return 0
    except RunError as error:
        failure = error
    except KeyboardInterrupt:
        failure = Interrupted(signal.SIGINT)
    except OSError as error:
        what = f"{error.filename}: " * bool(error.filename) + str(error.strerror or error)
        failure = StorageError(what, "the system refused a file operation", "check space, permissions and the mount")
    say(failure.lines())
    return failure.exit_code


class Bar:
    """Progress of a long piece of work: a bar that rewrites itself on a terminal, a line every 15 seconds elsewhere."""

    def __init__(self, title: str, total: int, unit: str = "bytes", stream: TextIO | None = None, every_s: float | None = None):
        self.title, self.total, self.unit, self.stream = title, max(total, 1), unit, stream or sys.stderr
        self.on_terminal = self.stream.isatty()
        self.every_s = every_s if every_s is not None else (0.2 if self.on_terminal else 15.0)
        self.began = self.shown = time.monotonic()

    def at(self, done: int) -> None:
        if time.monotonic() - self.shown >= self.every_s:
            self.shown = time.monotonic()
            self._write(done, "" if self.on_terminal else "\n")

    def finish(self) -> None:
        if self.on_terminal:
            self._write(self.total, "\n")

    def _write(self, done: int, end: str) -> None:
        share, spent = min(done / self.total, 1.0), time.monotonic() - self.began
        left = f", {spent * (1 - share) / share:.0f} s left" if share > 0 else ""
        bar = f"\r\x1b[K[{'#' * int(30 * share):.<30}] " if self.on_terminal else ""
        self.stream.write(f"{bar}{self.title} {100 * share:3.0f} % ({done:,} of {self.total:,} {self.unit}{left}){end}")
        self.stream.flush()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits. The kernel releases the lock when a process dies."""
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
    """Raise PreflightError unless the file system of `folder` has that much space; the folder need not exist yet."""
    existing = next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        what = f"{folder}: {for_what} needs {needed_bytes / 1e9:.0f} GB, {free / 1e9:.1f} GB are free"
        raise PreflightError(what, f"the file system of {existing} is too full", "free space, or name a folder on another disk")


@dataclass(frozen=True)
class Recipe:
    """Files that a build makes in a folder, and how to recognize them."""

    title: str  # of the files, for messages
    source: str  # what they are made from, recipe number included: with another source they are built again
    vocab_size: int
    files: tuple[str, ...]  # names, relative to the folder
    manifest: str  # written last: where it exists, the files are complete
    lock: str


def build_once(folder: Path, recipe: Recipe, build: Callable[[Path], Manifest]) -> None:
    """Let `build` make the recipe's files in `folder`, then write the manifest it returns; do nothing where they are complete.

    A kill at any point leaves a folder without manifest, which the next call builds again. Raises StorageError if files of these names
    are in a folder where this recipe was never built: they belong to somebody else.
    """
    if not _defect(folder, recipe):  # before the lock, since the folder may be read-only
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
    ours = (folder / recipe.lock).exists() or (folder / recipe.manifest).exists()
    for name in recipe.files:
        if not ours and (folder / name).exists():
            raise StorageError(
                f"{folder / name}: exists already", "it was not made here, and nothing is overwritten", "name another folder"
            )


def _defect(folder: Path, recipe: Recipe) -> str:
    """Why the files must be built (again); empty if each of them is what the manifest says."""
    if not (folder / recipe.manifest).exists():
        return "not built yet, or not to the end"
    try:
        manifest = Manifest.read(folder / recipe.manifest)
    except DataError as error:
        return error.what
    if (manifest.source, manifest.vocab_size, set(manifest.files)) != (recipe.source, recipe.vocab_size, set(recipe.files)):
        return f"built by another recipe: {manifest.source}"
    for name, facts in manifest.files.items():
        if not (folder / name).is_file() or facts_of(folder / name) != facts:
            return f"{name} is missing or damaged"
    return ""
