"""Which files of a folder hold its weights, and JSON files beside them. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from common.errors import WeightsError, listed
from common.model.checkpoint_names import INDEX, SINGLE
from common.paths import open_regular

FETCH_AGAIN = "fetch the checkpoint again"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint: those that its index names, as in transformers.

    Without an index, they are all in the folder that are not hidden. Raises WeightsError if the
    index is damaged, or if a second checkpoint is beside it that transformers would read instead.
    """
    index = folder / INDEX
    if not index.exists():
        names = {path.name for path in folder.glob("*.safetensors")}
        return tuple(folder / name for name in sorted(names) if not name.startswith("."))
    names = set(index_of(folder).values())
    if missing := sorted(name for name in names if not (folder / name).exists()):
        refuse(
            f"{folder}: {listed(missing)} is missing, which {INDEX} names",
            "the checkpoint is not complete",
            FETCH_AGAIN,
        )
    if (folder / SINGLE).exists() and SINGLE not in names:
        refuse(
            f"{folder}: {SINGLE} is beside {INDEX}, which does not name it",
            "these are two checkpoints, and programs choose differently",
            "move one of them to another folder",
        )
    return tuple(folder / name for name in sorted(names))


def index_of(folder: Path) -> dict[str, str]:
    """Return tensor -> name of its file, as the index in `folder` says. Raises WeightsError."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        weight_map = {}
    names = list(weight_map.values())
    plain = [name for name in names if isinstance(name, str) and name and Path(name).name == name]
    if not plain or plain != names:
        refuse(
            f"{folder / INDEX}: no map from tensors to files of the folder",
            "the index is damaged",
            FETCH_AGAIN,
        )
    return weight_map


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises WeightsError if there is none."""
    try:
        with open_regular(path) as file:
            content = json.load(file)
    except OSError as error:
        refuse(
            f"{path}: cannot be read: {error.strerror}",
            "it belongs to the weights",
            "check the path and the disk",
        )
    except (ValueError, RecursionError) as error:
        refuse(f"{path}: not valid JSON: {error}", "the file is damaged", FETCH_AGAIN)
    if not isinstance(content, dict):
        refuse(
            f"{path}: not a JSON object", "the file is damaged or in another format", FETCH_AGAIN
        )
    return content


def refuse(what: str, why: str, do: str) -> NoReturn:
    """Raise WeightsError."""
    raise WeightsError(what, why, do)
