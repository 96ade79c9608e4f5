"""Read documents from lines of JSON objects, as in C4."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import DataError

LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # json.loads accepts them, UTF-8 does not


def json_documents(file: Iterable[bytes], path: Path, key: str) -> Iterator[str]:
    """Yield the text in `key` of each line of `file`, which is `path`. Raises DataError."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"each line must be a JSON object with the key {key}"
            do = "repair the line, or name the right key with --jsonl-key"
            raise DataError(f"{path}: line {number}: no document: {error!r}", why, do) from error
        if not isinstance(text, str):
            what = f"{path}: line {number}: {key} is {type(text).__name__}, not text"
            raise DataError(what, "a document must be a string", "repair the line")
        if LONE_SURROGATE.search(text):
            what = f"{path}: line {number}: {key} contains half of a surrogate pair"
            raise DataError(
                what,
                "tokenizers reject it, because it does not encode a character",
                "repair the line, or leave it out",
            )
        yield text
