"""Functions shared by the `prepare` commands: lock a folder and build its files once.

Messages go to stderr, because stdout is for the log. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from common.data.manifest import Manifest, PairFacts, facts_of
from common.errors import NO_LOCKS, DataError, PreflightError, StorageError, listed
from common.terminal import Progress, data_size, outlive_readers, print_stderr, shown


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


def lack_of_space(folder: Path, needed_bytes: int, for_what: str) -> str:
    """Return a sentence if the file system of `folder` has less free space, or "".

    `folder` need not exist yet.
    """
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free >= needed_bytes:
        return ""
    return f"{folder}: {for_what} needs {data_size(needed_bytes)}, {data_size(free)} are free"


def require_free_space(folder: Path, needed_bytes: int, for_what: str) -> None:
    """Raise PreflightError unless the file system of `folder` has that much free space."""
    if lack := lack_of_space(folder, needed_bytes, for_what):
        raise PreflightError(
            lack, "the file system is too full", "free space, or name a folder on another disk"
        )


def input_states(paths: Iterable[Path]) -> list[list[str | int]]:
    """Return [path, size in bytes, time of the last change in ns] of each file. Raises OSError."""
    states: list[list[str | int]] = []
    for path in paths:
        state = path.stat()
        states.append([str(path), state.st_size, state.st_mtime_ns])
    return states


def require_unchanged(before: list[list[str | int]]) -> None:
    """Raise DataError if a file of `input_states` was changed or removed since then."""
    for state in before:
        path = Path(str(state[0]))
        if not path.is_file() or input_states([path]) != [state]:
            raise DataError(
                f"{path} was changed while it was read",
                "documents may be missing, cut off or read twice",
                "run the command again when nothing writes to the inputs",
            )


@dataclass(frozen=True)
class Recipe:
    """The files that a build creates in a folder, and what identifies them."""

    title: str  # what the files are, for messages
    # Source of the files, including the recipe's version.
    source: str
    vocab_size: int
    files: tuple[str, ...]  # names, relative to the folder
    manifest: str  # written last: if it exists, the files are complete
    about: dict[str, Any] = field(default_factory=dict)  # see Manifest
    # Whether files that are damaged, or built by another recipe, are built again. Otherwise they
    # are refused, because only the user knows whether they may be overwritten.
    rebuilds: bool = True


def build_once(folder: Path, recipe: Recipe, build: Callable[[Path], dict[str, PairFacts]]) -> None:
    """Build the recipe's files in `folder` and write their manifest, unless they are complete.

    `build`: creates the files in the given folder; returns the contents of .bin/.idx pairs by
        prefix. It may continue what an interrupted build left in the folder.

    Files are complete if each has the size and SHA-256 in the manifest. If a build is killed, the
    folder has no manifest, and the next call builds the files again. A build continues if the
    reader of its messages, such as `head`, exits. Raises StorageError if `folder` has files of
    these names that no build of this recipe created. Unless the recipe rebuilds, raises DataError
    if they are damaged.
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
            say(f"{recipe.title} in {folder}: complete and verified")
            return
        say(f"building the {recipe.title} in {shown(folder)}, once ({defect})")
        began = time.monotonic()
        # If the build is killed, the manifest of the older files must not remain.
        manifest.unlink(missing_ok=True)
        pairs = build(folder)
        total = sum((folder / name).stat().st_size for name in recipe.files)
        with Progress("SHA-256", total, "B") as progress:
            files = {name: facts_of(folder / name, progress.advance) for name in recipe.files}
        Manifest(recipe.source, recipe.vocab_size, files, pairs, recipe.about).write(manifest)
        say(f"built in {time.monotonic() - began:.1f} s")


def _defect(folder: Path, recipe: Recipe) -> str:
    """Return why the files must be built, or "" if each of them matches the manifest.

    Raises the errors of `build_once` if they exist and must not be built again.
    """
    path = folder / recipe.manifest
    if not path.exists():
        return "not built yet, or the build was interrupted"
    try:
        manifest = Manifest.read(path)
    except DataError as error:
        if not recipe.rebuilds:
            raise
        return error.what
    if not recipe.rebuilds:
        require_same_recipe(path, manifest.about, recipe.about)
    defect = _damage(path, manifest)
    if not defect and (
        manifest.source != recipe.source
        or manifest.vocab_size != recipe.vocab_size
        or set(manifest.files) != set(recipe.files)
    ):
        defect = f"built by another recipe: {manifest.source}"
    if defect and not recipe.rebuilds:
        raise DataError(
            f"{folder}: {defect}",
            f"{path} records other files, and nothing is overwritten",
            f"restore it; or, to build all again, remove {path.name}, {', '.join(recipe.files)}",
        )
    return defect


def require_same_recipe(path: Path, found: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise StorageError unless `found`, which the manifest at `path` records, equals `about`."""
    changed = [key for key in about | found if found.get(key) != about.get(key)]
    if changed:
        raise StorageError(
            f"{path.parent} holds files of other inputs or options",
            f"its {path.name} has other {listed(changed)}, and nothing is overwritten",
            "name another --data-dir",
        )


def damage_of(path: Path) -> str:
    """Return why the manifest at `path` cannot be read or its files do not match it, or ""."""
    try:
        return _damage(path, Manifest.read(path))
    except DataError as error:
        return error.what


def _damage(path: Path, manifest: Manifest) -> str:
    """Return how the files of the manifest at `path` differ from it, or "". Reads every byte."""
    total = sum(facts.size or 0 for facts in manifest.files.values())
    with Progress("SHA-256", total, "B") as progress:
        for name, facts in manifest.files.items():
            difference = facts.difference(path.parent / name, on_read=progress.advance)
            if difference:
                return f"{name} is missing or damaged: {difference}"
    return ""


def require_as_recorded(path: Path, files: Collection[Path], vocab_size: int, prepare: str) -> None:
    """Raise DataError if one of `files` differs from the manifest at `path`, or does not fit.

    `files`: the files that a run reads. If the manifest lists them, their sizes are compared, and
        their SHA-256 or, if they are large, the SHA-256 of a sample.
    `vocab_size`: the model's vocabulary; larger ids do not fit.
    `prepare`: the user's command that prepares the data, for the messages.
    """
    if not path.is_file():
        return
    manifest = Manifest.read(path)
    verify = f"{prepare} verify --data-dir {path.parent}"
    for name, facts in manifest.files.items():
        file = path.parent / name
        difference = facts.difference(file, whole=False) if file in files else ""
        if difference:
            raise DataError(
                f"{file} is not the file that {path.name} records: {difference}",
                "it was changed, or copied while it was not complete",
                f"restore it, or prepare the data in another folder; {verify} --full compares all",
            )
    for name, pair in manifest.pairs.items():
        tokens = path.parent / f"{name}.bin"
        if tokens in files and (pair.largest_id or 0) >= vocab_size:
            raise DataError(
                f"{tokens} holds the token id {pair.largest_id}",
                f"the model has a vocabulary of {vocab_size}: ids from 0 to {vocab_size - 1}",
                "use a model with a larger vocab_size, or prepare the text with its own tokenizer",
            )
