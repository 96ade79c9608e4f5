"""What the `prepare` programs share: build a folder once, a lock, progress. Standard library only.

All text goes to stderr; stdout is for the log.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.data.manifest import Manifest, PairFacts, facts_of
from common.errors import DataError, PreflightError, StorageError
from common.terminal import shown

BAR_SECONDS = 5.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bar:
    """Progress of a long piece of work: a line every five seconds."""

    def __init__(self, title: str, total: int, unit: str):
        self.title, self.total, self.unit = title, total, unit
        self.began = self.shown = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now - self.shown >= BAR_SECONDS and done:
            self.shown = now
            left_s = (now - self.began) * (self.total - done) / done
            say(
                f"{self.title} {done / self.total:.0%} ({done:,} of {self.total:,} {self.unit}, {left_s:.0f} s left)"
            )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits. The kernel releases the lock when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                say(
                    f"note: {path.parent} is on a file system without locks: do not start two preparations of it at once"
                )
            else:
                say(f"waiting: another process holds {path}")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_free_space(folder: Path, needed_bytes: int, for_what: str) -> None:
    """Raise PreflightError unless the file system of `folder` has that much space; the folder need not exist yet."""
    existing = next(
        place for place in (folder.resolve(), *folder.resolve().parents) if place.exists()
    )
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        what = (
            f"{folder}: {for_what} needs {needed_bytes / 1e9:.0f} GB, {free / 1e9:.1f} GB are free"
        )
        raise PreflightError(
            what,
            f"the file system of {existing} is too full",
            "free space, or name a folder on another disk",
        )


@dataclass(frozen=True)
class Recipe:
    """Files that a build makes in a folder, and how to recognize them."""

    title: str  # of the files, for messages
    source: str  # what they are made from, recipe number included: with another source they are built again
    vocab_size: int
    files: tuple[str, ...]  # names, relative to the folder
    manifest: str  # written last: where it exists, the files are complete


def build_once(folder: Path, recipe: Recipe, build: Callable[[Path], dict[str, PairFacts]]) -> None:
    """Let `build` make the recipe's files in `folder`, then write their manifest; do nothing where they are complete.

    `build` returns what it knows of .bin/.idx pairs. A kill at any point leaves a folder without manifest, which the next call builds again.
    Raises StorageError if files of these names are in a folder where this recipe was never built: they belong to somebody else.
    """
    manifest, lock = folder / recipe.manifest, folder / f".{recipe.manifest}.lock"
    if not _defect(folder, recipe):  # before the lock, since the folder may be read-only
        say(f"{recipe.title} in {folder}: complete and verified")
        return
    foreign = [folder / name for name in recipe.files if (folder / name).exists()]
    if foreign and not manifest.exists() and not lock.exists():
        raise StorageError(
            f"{foreign[0]}: exists already",
            "it was not made here, and nothing is overwritten",
            "name another folder",
        )
    with locked(lock):
        if not (defect := _defect(folder, recipe)):  # another process has built it meanwhile
            return
        say(f"building the {recipe.title} in {shown(folder)}, once ({defect})")
        began = time.monotonic()
        manifest.unlink(
            missing_ok=True
        )  # a kill from here on must not leave a manifest of older files
        pairs = build(folder)
        files = {name: facts_of(folder / name) for name in recipe.files}
        Manifest(recipe.source, recipe.vocab_size, files, pairs).write(manifest)
        say(f"built in {time.monotonic() - began:.1f} s")


def _defect(folder: Path, recipe: Recipe) -> str:
    """Why the files must be built (again); empty if each of them is what the manifest says."""
    if not (folder / recipe.manifest).exists():
        return "not built yet, or not to the end"
    if damage := damage_of(folder / recipe.manifest):
        return damage
    manifest = Manifest.read(folder / recipe.manifest)
    if (manifest.source, manifest.vocab_size, set(manifest.files)) != (
        recipe.source,
        recipe.vocab_size,
        set(recipe.files),
    ):
        return f"built by another recipe: {manifest.source}"
    return ""


def damage_of(path: Path) -> str:
    """What is wrong with the manifest at `path` or with the first bad file of its folder, by size and SHA-256; empty if nothing."""
    try:
        manifest = Manifest.read(path)
    except DataError as error:
        return error.what
    for name, facts in manifest.files.items():
        if not (path.parent / name).is_file() or facts_of(path.parent / name) != facts:
            return f"{name} is missing or damaged"
    return ""
