"""`prepare fetch --download`: download files of a Hugging Face repository, with resume and
    checksums.

A file is downloaded to STAGE in its folder, under a name that is its checksum. It is renamed when
its size and checksum are those in the hub's list: SHA-256, or git's SHA-1 for a small file that is
stored in git. So an interrupted download never leaves part of a file under the file's name.
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
# seconds without a chunk or an answer that end a download: it needs at least 17 kB/s
SILENCE_S = 60.0


def download(repository: str, revision: str, names: Sequence[str], folder: Path, kind: str) -> None:
    """Download the files called `names`, from any folder of the repository, to `folder`. `kind`:
    "model" or "dataset".

    Raises PreflightError without huggingface_hub or without space on the disk. Raises DataError if
    the hub does not provide the files, or provides different ones. Raises StorageError if a file
    cannot be written, or if a different file has its name.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise PreflightError(
            "huggingface_hub is not installed", str(error), pip_install("huggingface_hub")
        ) from None
    where: dict[str, Any] = {"repo_id": repository, "revision": revision, "repo_type": kind}
    try:
        with locked(folder / f"{STAGE}.lock"):
            entries = _watched(
                lambda: list(huggingface_hub.HfApi().list_repo_tree(recursive=True, **where)),
                lambda: 0,
            )
            listed = [entry for entry in entries if hasattr(entry, "size")]
            for name in names:
                entry = next((entry for entry in listed if Path(entry.path).name == name), None)
                if entry is None:
                    raise DataError(
                        f"{repository} has no {name}",
                        f"it is not in revision {revision}",
                        "fetch it by hand, as below",
                    )
                _require_names(entry, repository)
                if not (folder / name).exists():
                    require_free_space(folder, entry.size, name)
                    staged = _staged(
                        huggingface_hub.hf_hub_url(filename=entry.path, **where),
                        entry,
                        folder / STAGE,
                    )
                    if wrong := _difference(staged, entry):
                        staged.unlink()
                        raise DataError(
                            f"{name} came damaged: {wrong}",
                            f"from {repository}",
                            "start again: it is fetched again",
                        )
                    staged.replace(folder / name)
                elif wrong := _difference(folder / name, entry):
                    do = "move it away, and start again"
                    raise StorageError(
                        f"{folder / name} is not the file of {repository}",
                        f"{wrong}; nothing is overwritten",
                        do,
                    )
                say(f"{folder / name}: {entry.size:,} bytes, as {repository} has it at {revision}")
            shutil.rmtree(folder / STAGE, ignore_errors=True)
    except RunError:
        raise
    except Exception as error:
        # Errors of httpx, of the hub's package or of the system, depending on the version of the
        # package.
        text = str(error).strip().partition("\n")[0]
        raise failure_of(error) or DataError(
            f"{repository} could not be downloaded",
            f"{type(error).__name__}: {text}",
            "check the network; for a gated repository accept its license on its page, "
            "then: hf auth login",
        ) from error


def _staged(url: str, entry, folder: Path) -> Path:
    """Return the staged file, complete. A download resumes where the last attempt ended.

    `hf_hub_download` would start again in each process (huggingface_hub 2).
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    constants.DOWNLOAD_CHUNK_SIZE = min(CHUNK, constants.DOWNLOAD_CHUNK_SIZE)
    folder.mkdir(exist_ok=True)
    path = folder / (entry.lfs.sha256 if entry.lfs else entry.blob_id)
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
                why = f"the hub's list says {entry.size:,} bytes"
                raise DataError(
                    f"{url} sends more than its size", why, "do not trust this server"
                ) from None
    return path


def _require_names(entry: Any, repository: str) -> None:
    """Raise DataError unless a staged file's name is a checksum: a path could leave the folder."""
    sums = (entry.lfs.sha256, 64) if entry.lfs else (entry.blob_id, 40)
    name, length = sums
    if (
        not isinstance(name, str)
        or not re.fullmatch(f"[0-9a-f]{{{length}}}", name)
        or type(entry.size) is not int
    ):
        raise DataError(
            f"{repository} lists {entry.path} with the sum {str(name)[:80]!r} "
            f"and the size {entry.size!r}",
            f"a sum is {length} hexadecimal digits",
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
    """Return the result of `work`. Raises DataError if it is not done and `progress` does not
    change for SILENCE_S.

    `work` runs in a thread, which is then abandoned: a read from a server that sends a byte a
    second cannot be interrupted.
    """
    answer: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    before = progress()
    moved = time.monotonic()
    while thread.is_alive():
        thread.join(0.2)
        now = progress()
        if now != before:
            before = now
            moved = time.monotonic()
        elif time.monotonic() - moved > SILENCE_S:
            why = f"nothing came for {SILENCE_S:.0f} s, or less than {CHUNK:,} bytes"
            raise DataError("the server is too slow", why, "start again: what has come is kept")
    if failure:
        raise failure[0]
    return answer[0]


def _difference(path: Path, entry) -> str:
    """Return the difference between a file and the hub's entry for it, or "" if there is none."""
    size = path.stat().st_size
    if size != entry.size:
        return f"{size:,} bytes, {entry.size:,} expected"
    if entry.lfs is not None:
        found = sha256_of(path)
        expected = entry.lfs.sha256
    else:
        found = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
        expected = entry.blob_id
    return f"its sum is {found}, {expected} expected" if found != expected else ""
