"""`prepare fetch --download`: files of a Hugging Face repository, resumed after a kill, and checked by the sums in the hub's own list.

A file is fetched into STAGE inside of its folder, under its sum. It gets its name when its size and its sum are those of the list: SHA-256, or
for a small file that is kept in git the SHA-1 that git names it by. So no kill leaves a part of a file under the file's name.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.data.manifest import sha256_of
from common.data.preparation import locked, require_free_space, say
from common.errors import DataError, PreflightError, RunError, StorageError, failure_of

STAGE = ".download"


def download(repository: str, revision: str, names: Sequence[str], folder: Path, kind: str) -> None:
    """Fetch the files called `names`, in whatever folder of the repository they are, into `folder`. `kind`: "model" or "dataset".

    Raises PreflightError without huggingface_hub or room on the disk, DataError where the hub does not give the files, or others,
    StorageError where a file cannot be written, or is there already and is another one.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise PreflightError("huggingface_hub is not installed", str(error), "pip install -e '.[prepare]'") from None
    where: dict[str, Any] = {"repo_id": repository, "revision": revision, "repo_type": kind}
    try:
        with locked(folder / f"{STAGE}.lock"):
            listed = [entry for entry in huggingface_hub.HfApi().list_repo_tree(recursive=True, **where) if hasattr(entry, "size")]
            for name in names:
                entry = next((entry for entry in listed if Path(entry.path).name == name), None)
                if entry is None:
                    raise DataError(f"{repository} has no {name}", f"it is not in revision {revision}", "fetch it by hand, as below")
                if not (folder / name).exists():
                    require_free_space(folder, entry.size, name)
                    staged = _staged(huggingface_hub.hf_hub_url(filename=entry.path, **where), entry, folder / STAGE)
                    if wrong := _difference(staged, entry):
                        staged.unlink()
                        raise DataError(f"{name} came damaged: {wrong}", f"from {repository}", "start again: it is fetched anew")
                    staged.replace(folder / name)
                elif wrong := _difference(folder / name, entry):
                    do = "move it away, and start again"
                    raise StorageError(f"{folder / name} is not the file of {repository}", f"{wrong}; nothing is overwritten", do)
                say(f"{folder / name}: {entry.size:,} bytes, as {repository} has it at {revision}")
            shutil.rmtree(folder / STAGE, ignore_errors=True)
    except RunError:
        raise
    except Exception as error:  # httpx's, the hub's own and the system's: the versions of the hub differ in them
        text = str(error).strip().partition("\n")[0]
        do = "check the network; for a gated repository accept its license on its page, then: hf auth login"
        raise failure_of(error) or DataError(f"{repository} could not be downloaded", f"{type(error).__name__}: {text}", do) from error


def _staged(url: str, entry, folder: Path) -> Path:
    """The file, from the byte on that the last attempt came to. `hf_hub_download` would begin anew in each process (huggingface_hub 2)."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    folder.mkdir(exist_ok=True)
    path = folder / (entry.lfs.sha256 if entry.lfs else entry.blob_id)
    with path.open("ab") as file:
        if file.tell() < entry.size:
            http_get(url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=entry.size)
    return path


def _difference(path: Path, entry) -> str:
    """Between a file and the hub's entry for it; empty if there is none."""
    size = path.stat().st_size
    if size != entry.size:
        return f"{size:,} bytes, {entry.size:,} expected"
    if entry.lfs is not None:
        found, expected = sha256_of(path), entry.lfs.sha256
    else:
        found, expected = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest(), entry.blob_id
    return f"its sum is {found}, {expected} expected" if found != expected else ""
