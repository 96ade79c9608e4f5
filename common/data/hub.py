"""Download files of a Hugging Face repository, with resume and checksums.

`prepare fetch --download` uses this module.

A file is downloaded to the folder STAGE, under a name that is its checksum. It is moved to its own
name when its size and checksum match the hub's list. The checksum is SHA-256, or git's SHA-1 for a
small file that is stored in git. So an interrupted download never leaves part of a file under the
file's name.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from common.data.manifest import sha256_of
from common.data.preparation import locked, require_free_space, say
from common.errors import DataError, PreflightError, RunError, StorageError, failure_of
from common.packages import pip_install

STAGE = ".download"
CHUNK = 2**20  # bytes written at a time
# A download fails after this many seconds without a chunk or an answer: 17 kB/s are the minimum.
SILENCE_S = 60.0


def download(repository: str, revision: str, names: Sequence[str], folder: Path, kind: str) -> None:
    """Download the files called `names`, from any folder of the repository, to `folder`.

    `kind`: "model" or "dataset".

    Raises PreflightError if huggingface_hub is not installed or the disk is too full. Raises
    DataError if the hub does not have a file or sends a different one. Raises StorageError if a
    file cannot be written or a different file has its name.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise PreflightError(
            "huggingface_hub is not installed", str(error), pip_install("huggingface_hub")
        ) from None
    source: dict[str, Any] = {"repo_id": repository, "revision": revision, "repo_type": kind}
    try:
        with locked(folder / f"{STAGE}.lock"):
            listed = _watched(
                lambda: list(huggingface_hub.HfApi().list_repo_tree(recursive=True, **source)),
                lambda: 0,
            )
            for name in names:
                entry = _entry(listed, name, repository, revision)
                url = huggingface_hub.hf_hub_url(filename=entry.path, **source)
                _fetch(url, entry, folder / name, repository)
                say(f"{folder / name}: {entry.size:,} bytes, as {repository} has it at {revision}")
            shutil.rmtree(folder / STAGE, ignore_errors=True)
    except RunError:
        raise
    except Exception as error:
        # Which class is raised (httpx, huggingface_hub or the system) depends on the version of
        # huggingface_hub.
        text = str(error).strip().partition("\n")[0]
        raise failure_of(error) or DataError(
            f"{repository} could not be downloaded",
            f"{type(error).__name__}: {text}",
            "check the network; for a gated repository accept its license on its page, "
            "then: hf auth login",
        ) from error


def _entry(listed: list[Any], name: str, repository: str, revision: str) -> Any:
    """Return the hub's entry of the file called `name`. Raises DataError if there is none."""
    for entry in listed:
        # Entries without a size are folders.
        if hasattr(entry, "size") and Path(entry.path).name == name:
            _check_entry(entry, repository)
            return entry
    raise DataError(
        f"{repository} has no {name}",
        f"it is not in revision {revision}",
        "download it with the commands below",
    )


def _fetch(url: str, entry: Any, path: Path, repository: str) -> None:
    """Download a file to `path`, or check it if it exists. Raises DataError and StorageError."""
    if path.exists():
        difference = _difference(path, entry)
        if difference:
            raise StorageError(
                f"{path} is not the file of {repository}",
                f"{difference}; nothing is overwritten",
                "move it away and run the command again",
            )
        return
    staged = path.parent / STAGE / (entry.lfs.sha256 if entry.lfs else entry.blob_id)
    present = staged.stat().st_size if staged.exists() else 0  # from an interrupted download
    require_free_space(path.parent, entry.size - present, path.name)
    _complete(url, entry, staged)
    difference = _difference(staged, entry)
    if difference:
        staged.unlink()
        raise DataError(
            f"{path.name}: the downloaded file is damaged: {difference}",
            f"{repository} or the network sent other bytes",
            "run the command again to download the file again",
        )
    staged.replace(path)


def _complete(url: str, entry: Any, path: Path) -> None:
    """Download a file to `path`, or the part of it that an interrupted download left out.

    `hf_hub_download` would start from the beginning in each process (huggingface_hub 2).
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    constants.DOWNLOAD_CHUNK_SIZE = min(CHUNK, constants.DOWNLOAD_CHUNK_SIZE)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        if file.tell() < entry.size:
            bounded: Any = _Bounded(file, entry.size)
            headers = build_hf_headers()
            try:
                _watched(
                    lambda: http_get(
                        url,
                        bounded,
                        resume_size=file.tell(),
                        headers=headers,
                        expected_size=entry.size,
                    ),
                    lambda: path.stat().st_size,
                )
            except TooLarge:
                path.unlink()
                raise DataError(
                    f"{url} sends more than its size",
                    f"the hub's list says {entry.size:,} bytes",
                    "do not trust this server",
                ) from None


def _check_entry(entry: Any, repository: str) -> None:
    """Raise DataError unless the entry has a size and a checksum.

    The checksum becomes a file name. A path in its place could write outside of STAGE.
    """
    if entry.lfs:
        checksum = entry.lfs.sha256
        length = 64
    else:
        checksum = entry.blob_id
        length = 40
    is_checksum = isinstance(checksum, str) and re.fullmatch(f"[0-9a-f]{{{length}}}", checksum)
    if not is_checksum or type(entry.size) is not int:
        raise DataError(
            f"{repository} lists {entry.path} with the checksum {str(checksum)[:80]!r} "
            f"and the size {entry.size!r}",
            f"a checksum is {length} hexadecimal digits",
            "do not trust this server",
        )


class TooLarge(Exception):
    """The server sends more bytes than the hub's list states."""


class _Bounded:
    """A file of at most `limit` bytes, flushed after each write so that its size is current."""

    def __init__(self, file: IO[bytes], limit: int):
        self.file = file
        self.limit = limit

    def write(self, chunk: bytes) -> int:
        if self.file.tell() + len(chunk) > self.limit:
            raise TooLarge
        written = self.file.write(chunk)
        self.file.flush()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _watched(work: Callable[[], Any], progress: Callable[[], int]) -> Any:
    """Return the result of `work`, which runs in a thread.

    Raises DataError if `progress` returns the same number for SILENCE_S while `work` runs. The
    thread is then abandoned, because a read from a server that sends one byte a second cannot be
    interrupted.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    last = progress()
    last_change = time.monotonic()
    while thread.is_alive():
        thread.join(0.2)
        current = progress()
        if current != last:
            last = current
            last_change = time.monotonic()
        elif time.monotonic() - last_change > SILENCE_S:
            raise DataError(
                "the server is too slow",
                f"in {SILENCE_S:.0f} s it did not answer, or sent less than {CHUNK:,} bytes",
                "run the command again: it resumes the download",
            )
    if failures:
        raise failures[0]
    return results[0]


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
