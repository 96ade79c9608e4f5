"""Functions shared by the `prepare` programs: build a folder once and lock it. Standard library
only.

All text goes to stderr, because stdout is for the log.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from common.data.manifest import Manifest, PairFacts, facts_of
from common.errors import DataError, PreflightError, StorageError
from common.terminal import data_size, outlive_readers, print_stderr, shown


def say(text: str) -> None:
    print_stderr(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. A second process waits. The kernel releases the lock when a
    process dies.

    The file is removed at the end, unless the block raises: build_once takes a lock file that is
    left as the sign of an unfinished build.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _open_locked(path)
    with file:
        yield
        path.unlink(missing_ok=True)


def _open_locked(path: Path) -> TextIO:
    """Lock the file at `path`, waiting if necessary, and return it."""
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                say(
                    f"note: {path.parent} is on a file system without locks: "
                    "do not start two preparations of it at once"
                )
                return file
            say(f"waiting: another process has locked {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        # The process that held the lock may have removed the file, and a third one may hold a new
        # file of this name.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def require_free_space(folder: Path, needed_bytes: int, for_what: str) -> None:
    """Raise PreflightError unless `folder`, which need not exist yet, has that much free space."""
    existing = next(
        place for place in (folder.resolve(), *folder.resolve().parents) if place.exists()
    )
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        what = f"{folder}: {for_what} needs {data_size(needed_bytes)}, {data_size(free)} are free"
        raise PreflightError(
            what,
            f"the file system of {existing} is too full",
            "free space, or name a folder on another disk",
        )


@dataclass(frozen=True)
class Recipe:
    """The files that a build makes in a folder, and the properties that identify them."""

    title: str  # name of the files, for messages
    # Source of the files, including the recipe number. If it changes, they are rebuilt.
    source: str
    vocab_size: int
    files: tuple[str, ...]  # names, relative to the folder
    manifest: str  # written last: if it exists, the files are complete


def build_once(folder: Path, recipe: Recipe, build: Callable[[Path], dict[str, PairFacts]]) -> None:
    """Call `build` to make the recipe's files in `folder`, then write their manifest. Do nothing if
    they are complete.

    `build` returns what it knows about .bin/.idx pairs. If it is killed at any point, the folder
    has no manifest, and the next call builds it again. The build goes on if a reader of its
    messages, such as `head`, ends. Raises StorageError if files of these names are in a folder
    where this recipe was never built, because they were not made here.
    """
    outlive_readers()
    manifest = folder / recipe.manifest
    lock = folder / f".{recipe.manifest}.lock"
    if not _defect(folder, recipe):  # before the lock, because the folder may be read-only
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
        # A kill from here on must not leave a manifest of older files.
        manifest.unlink(missing_ok=True)
        pairs = build(folder)
        files = {name: facts_of(folder / name) for name in recipe.files}
        Manifest(recipe.source, recipe.vocab_size, files, pairs).write(manifest)
        say(f"built in {time.monotonic() - began:.1f} s")


def _defect(folder: Path, recipe: Recipe) -> str:
    """Return why the files must be built (again), or "" if each of them matches the manifest."""
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
    """Return what is wrong with the manifest at `path` or its files (size, SHA-256), or ""."""
    try:
        manifest = Manifest.read(path)
    except DataError as error:
        return error.what
    for name, facts in manifest.files.items():
        if not (path.parent / name).is_file() or facts_of(path.parent / name) != facts:
            return f"{name} is missing or damaged"
    return ""
