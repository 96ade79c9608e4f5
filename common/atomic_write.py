"""Write files and folders whole: under a temporary name in the target's folder, then rename them.

A file, or all files of a folder, are synced to the disk before they get their name, so that a power
failure leaves no empty one.

The temporary name is random and is created exclusively, so that it never leads through a link to a
file elsewhere. It also holds the identity of its writer: what a killed process leaves behind is
removed by the next writer of the same target, and what a living one writes is not. Standard library
only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from common.process_identity import is_gone, parse, this_process

SUFFIX = ".partial"
# Bytes of the target's name in the temporary one, which may have 255 with the writer's identity.
NAME_BYTES = 60
# Age at which a writer that cannot be examined, as on another host, counts as gone.
FOREIGN_WRITER_S = 24 * 3600.0


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` atomically. Raises OSError."""
    with new_file(path) as file:
        file.write(content)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the content of a file atomically. Raises OSError."""
    with source.open("rb") as read, new_file(target) as file:
        shutil.copyfileobj(read, file)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file that gets the name `target` when the block ends without an exception.

    It replaces a file or link of that name. After an exception, it is removed. Raises OSError with
    the target's name.
    """
    file = create(target)
    try:
        with naming(target), file:
            yield file
            sync(file)
        rename_complete(Path(file.name), target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Create a folder that gets the name `target` when the block ends without an exception.

    After an exception, it is removed with its content. Raises OSError.
    """
    remove_leftovers(target)
    folder = _new_name(target)
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync_path(path)
        rename_complete(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def create(target: Path) -> BinaryIO:
    """Create a temporary file of `target`, which the caller renames, and open it for writing.

    Its attribute `name` is its path. Raises OSError.
    """
    remove_leftovers(target)
    return open(_new_name(target), "xb", opener=_open_exclusively)


def sync(file: BinaryIO) -> None:
    """Write an open file to the disk. Raises OSError."""
    file.flush()
    _fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            _fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError without a file name, as of a read or a write."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def rename_complete(partial: Path, target: Path) -> None:
    """Give a complete file or folder its final name. Raises OSError.

    NFS repeats a request whose answer was lost. A rename that was done then fails with ENOENT or
    ESTALE.
    """
    try:
        partial.rename(target)
    except OSError:
        if partial.exists() or not target.exists():
            raise


def in_progress(target: Path) -> list[Path]:
    """Return the temporary files and folders of `target` that living processes write."""
    return [path for path, writer_is_gone in _temporary_names(target) if writer_is_gone is False]


def leftovers(target: Path) -> list[Path]:
    """Return the temporary files and folders of `target` whose writers are gone."""
    found = []
    for path, writer_is_gone in _temporary_names(target):
        with contextlib.suppress(OSError):
            age_s = time.time() - path.lstat().st_mtime
            if writer_is_gone or (writer_is_gone is None and age_s > FOREIGN_WRITER_S):
                found.append(path)
    return found


def remove_leftovers(target: Path) -> None:
    """Remove the temporary files and folders of `target` whose writers are gone."""
    for path in leftovers(target):
        with contextlib.suppress(OSError):  # another process removes it, too
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some mounts of FUSE and CIFS do not sync folders, or files.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _open_exclusively(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def _prefix(target: Path) -> str:
    return os.fsencode(target.name)[:NAME_BYTES].decode(errors="ignore") + "."


def _new_name(target: Path) -> Path:
    name = f"{_prefix(target)}{this_process()}.{secrets.token_hex(8)}{SUFFIX}"
    return target.with_name(name)


def _temporary_names(target: Path) -> Iterator[tuple[Path, bool | None]]:
    """Yield each temporary path of `target` and whether its writer is gone (see `is_gone`)."""
    prefix = _prefix(target)
    try:
        names = os.listdir(target.parent)
    except OSError:
        return
    for name in names:
        if name.startswith(prefix) and name.endswith(SUFFIX):
            writer, _, _ = name[len(prefix) : -len(SUFFIX)].rpartition(".")
            if identity := parse(writer):
                yield target.with_name(name), is_gone(identity)
