"""Functions shared by the `prepare` commands: lock a folder and build its files once.

Messages go to stderr, because stdout is for the log. Standard library only.
"""

from __future__ import annotations

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
from common.errors import NO_LOCKS, DataError, PreflightError, StorageError
from common.terminal import data_size, outlive_readers, print_stderr, shown


def say(text: str) -> None:
    """Print a message on stderr."""
    print_stderr(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path` inside the block. A second process waits for it.

    The kernel releases the lock when a process dies. The file is removed at the end, unless the
    block raises: to `build_once`, a remaining lock file means an unfinished build.
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
        except BlockingIOError:
            say(f"waiting: another process has locked {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            say(
                f"note: {path.parent} is on a file system without locks: "
                "do not start two preparations of it at once"
            )
            return file
        # The process that held the lock may have removed this file, and a third process may have
        # locked a new file of the same name.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def require_data_dir(folder: Path) -> None:
    """Raise DataError unless the directory given with --data-dir exists."""
    if not folder.is_dir():
        raise DataError(
            f"--data-dir {folder}",
            "it is not a directory" if folder.exists() else "this directory does not exist",
            "name the directory of the files to check",
        )


def require_free_space(folder: Path, needed_bytes: int, for_what: str) -> None:
    """Raise PreflightError unless the file system of `folder` has that much free space.

    `folder` need not exist yet.
    """
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise PreflightError(
            f"{folder}: {for_what} needs {data_size(needed_bytes)}, {data_size(free)} are free",
            f"the file system of {existing} is too full",
            "free space, or name a folder on another disk",
        )


@dataclass(frozen=True)
class Recipe:
    """The files that a build creates in a folder, and what identifies them."""

    title: str  # what the files are, for messages
    # Source of the files, including the recipe's version. If it changes, they are rebuilt.
    source: str
    vocab_size: int
    files: tuple[str, ...]  # names, relative to the folder
    manifest: str  # written last: if it exists, the files are complete


def build_once(folder: Path, recipe: Recipe, build: Callable[[Path], dict[str, PairFacts]]) -> None:
    """Build the recipe's files in `folder` and write their manifest, unless they are complete.

    `build`: creates the files in the given folder; returns the contents of .bin/.idx pairs by
        prefix.

    If a build is killed, the folder has no manifest, and the next call builds the files again. A
    build continues if the reader of its messages, such as `head`, exits. Raises StorageError if
    `folder` has files of these names that no build of this recipe created.
    """
    outlive_readers()
    manifest = folder / recipe.manifest
    lock = folder / f".{recipe.manifest}.lock"
    if not _defect(folder, recipe):  # before the lock, because the folder may be read-only
        say(f"{recipe.title} in {folder}: complete and verified")
        return
    foreign = [folder / name for name in recipe.files if (folder / name).exists()]
    # The lock first: another process that builds the files writes the manifest, then removes it.
    if foreign and not lock.exists() and not manifest.exists():
        raise StorageError(
            f"{foreign[0]}: exists already",
            "it was not built here, and nothing is overwritten",
            "name another folder",
        )
    with locked(lock):
        defect = _defect(folder, recipe)
        if not defect:  # another process built the files while this one waited for the lock
            return
        say(f"building the {recipe.title} in {shown(folder)}, once ({defect})")
        began = time.monotonic()
        # If the build is killed, the manifest of the older files must not remain.
        manifest.unlink(missing_ok=True)
        pairs = build(folder)
        files = {name: facts_of(folder / name) for name in recipe.files}
        Manifest(recipe.source, recipe.vocab_size, files, pairs).write(manifest)
        say(f"built in {time.monotonic() - began:.1f} s")


def _defect(folder: Path, recipe: Recipe) -> str:
    """Return why the files must be built, or "" if each of them matches the manifest."""
    path = folder / recipe.manifest
    if not path.exists():
        return "not built yet, or the build was interrupted"
    damage = damage_of(path)
    if damage:
        return damage
    manifest = Manifest.read(path)
    if (
        manifest.source != recipe.source
        or manifest.vocab_size != recipe.vocab_size
        or set(manifest.files) != set(recipe.files)
    ):
        return f"built by another recipe: {manifest.source}"
    return ""


def damage_of(path: Path) -> str:
    """Return why the manifest at `path` cannot be read or its files do not match it, or ""."""
    try:
        manifest = Manifest.read(path)
    except DataError as error:
        return error.what
    for name, facts in manifest.files.items():
        if not (path.parent / name).is_file() or facts_of(path.parent / name) != facts:
            return f"{name} is missing or damaged"
    return ""
