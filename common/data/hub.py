"""Download files of a Hugging Face repository, with resume and checksums.

`prepare fetch --download` uses this module.

A file is downloaded to `.<name>.part`, which the next call continues after an interruption. It gets
its own name when its size and checksum match the hub's list. The checksum is SHA-256, or git's
SHA-1 for a small file that is stored in git. So an interrupted download never leaves part of a file
under the file's name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any

from common.data.manifest import sha256_of
from common.data.preparation import locked, require_free_space, say
from common.errors import DataError, PreflightError, RunError, StorageError, failure_of, first_line
from common.packages import pip_install
from common.terminal import Progress

# Bytes of one request. tokenizer.json fits in one: for a file in git, a server may ignore the range
# and send the whole file.
BLOCK = 2**24
LIMIT_S = 600.0  # for the answer to one request: 28 kB/s are the minimum


def download(repository: str, revision: str, names: Sequence[str], folder: Path, kind: str) -> None:
    """Download the files called `names`, from any folder of the repository, to `folder`.

    `kind`: "model" or "dataset".

    Raises PreflightError if huggingface_hub is not installed or the disk is too full. Raises
    DataError if the hub does not have a file or sends a different one. Raises StorageError if a
    file cannot be written or a different file has its name.
    """
    try:
        from huggingface_hub import HfApi, HfFileSystem
    except ImportError as error:
        raise PreflightError(
            "huggingface_hub is not installed", str(error), pip_install("huggingface_hub")
        ) from None
    source: dict[str, Any] = {"repo_id": repository, "revision": revision, "repo_type": kind}
    root = f"{repository}@{revision}"
    if kind == "dataset":
        root = f"datasets/{root}"
    try:
        with locked(folder / ".download.lock"):
            listed = _answer(lambda: list(HfApi().list_repo_tree(recursive=True, **source)))
            for name in names:
                entry = _entry(listed, name, repository, revision)
                path = folder / name
                if not path.exists():
                    # `hf_hub_download` does not resume what another process began (version 2).
                    open_file = partial(HfFileSystem().open, f"{root}/{entry.path}")
                    remote = _answer(partial(open_file, size=entry.size, cache_type="none"))
                    _complete(remote, entry, path, repository)
                elif difference := _difference(path, entry):
                    raise StorageError(
                        f"{path} is not the file of {repository}",
                        f"{difference}; nothing is overwritten",
                        "move it away and run the command again",
                    )
                say(f"{path}: {entry.size:,} bytes, as {repository} has it at {revision}")
    except RunError:
        raise
    except Exception as error:
        # Which class is raised (httpx, huggingface_hub or the system) depends on the version of
        # huggingface_hub.
        raise failure_of(error) or DataError(
            f"{repository} could not be downloaded",
            f"{type(error).__name__}: {first_line(error)}",
            "check the network; for a gated repository accept its license on its page, "
            "then: hf auth login",
        ) from error


def _entry(listed: list[Any], name: str, repository: str, revision: str) -> Any:
    """Return the hub's entry of the file called `name`. Raises DataError if there is none."""
    for entry in listed:
        # Entries without a size are folders.
        if hasattr(entry, "size") and Path(entry.path).name == name:
            return entry
    raise DataError(
        f"{repository} has no {name}",
        f"it is not in revision {revision}",
        "download it with the commands below",
    )


def _complete(remote: IO[bytes], entry: Any, path: Path, repository: str) -> None:
    """Download what `path`'s part lacks, then give it its name. Raises DataError."""
    part = path.with_name(f".{path.name}.part")
    if part.is_symlink():  # nothing is appended to a file elsewhere
        part.unlink()
    with part.open("ab") as file, Progress(path.name, entry.size, "B") as progress:
        require_free_space(path.parent, entry.size - file.tell(), path.name)
        remote.seek(file.tell())
        # A server may send more than requested, which the size shows.
        while file.tell() < entry.size and (block := _answer(lambda: remote.read(BLOCK))):
            file.write(block[: entry.size + 1 - file.tell()])
            progress.at(file.tell())
    difference = _difference(part, entry)
    if difference:
        part.unlink()
        raise DataError(
            f"{path.name}: the downloaded file is damaged: {difference}",
            f"{repository} or the network sent other bytes",
            "run the command again to download the file again",
        )
    part.replace(path)


def _answer(request: Callable[[], Any]) -> Any:
    """Return the result of `request`. Raises DataError if it takes more than LIMIT_S.

    It runs in a thread, which is then abandoned, because a read from a server that sends one byte
    a second cannot be interrupted.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(LIMIT_S)
    except TimeoutError:
        raise DataError(
            "the server is too slow",
            f"it did not answer a request in {LIMIT_S:.0f} s",
            "run the command again: it resumes the download",
        ) from None


def _difference(path: Path, entry: Any) -> str:
    """Return how a file differs from the hub's entry for it, or "" if it does not."""
    size = path.stat().st_size
    if size != entry.size:
        return f"{size:,} bytes instead of {entry.size:,}"
    if entry.lfs is not None:
        checksum = sha256_of(path)
        expected = entry.lfs.sha256
    else:
        # The SHA-1 of a git object includes its type and size.
        checksum = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
        expected = entry.blob_id
    return f"its checksum is {checksum} instead of {expected}" if checksum != expected else ""
