"""Read documents from lines of JSON objects, as in C4."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import DataError, listed

LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # valid in JSON, but not in UTF-8


def json_documents(
    file: Iterable[bytes], path: Path, key: str, option: str = "--jsonl-key"
) -> Iterator[str]:
    """Yield the text under `key` of each line of a JSON lines file.

    `file`: the open file.
    `path`: its name, for errors.
    `option`: the option that names the key, for errors.

    Raises DataError if a line is not a JSON object or has no valid text.
    """
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: line {number}: no document: not JSON: {error}",
                "each line must be a JSON object",
                "repair the line, or convert the file to JSON lines",
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"{path}: line {number}: no document: {type(record).__name__}, not an object",
                "each line must be a JSON object",
                "repair the line, or convert the file to JSON lines",
            )
        if key not in record:
            raise DataError(
                f'{path}: line {number}: no key "{key}"',
                f"it has {listed(record, 8) or 'no key'}",
                f"name the key that holds the text with {option}, or repair the line",
            )
        text = record[key]
        if not isinstance(text, str):
            raise DataError(
                f"{path}: line {number}: {key} is {type(text).__name__}, not text",
                "a document must be a string",
                "repair the line",
            )
        if LONE_SURROGATE.search(text):
            raise DataError(
                f"{path}: line {number}: {key} contains half of a surrogate pair",
                "tokenizers reject it, because it does not encode a character",
                "repair the line, or leave it out",
            )
        yield text
