"""Reading and writing of files, with errors for the user. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import DataError, write_text

Content = TypeVar("Content")


def read_json(path: Path, parse: Callable[[Any], Content], what: str, do: str) -> Content:
    """Return `parse` of the JSON value in the file at `path`.

    Raises DataError, with the texts `what` and `do`, if the file cannot be read or is not JSON, or
    if `parse` raises ValueError, KeyError or TypeError.
    """
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(what, f"{type(error).__name__}: {error}", do) from error


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON with `write_text`. Raises StorageError."""
    write_text(path, json.dumps(value, indent=1) + "\n")
