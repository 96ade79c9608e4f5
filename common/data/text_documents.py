"""Read documents from JSON objects, in lines as in C4 or in an array, and from plain text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from common.errors import DataError, first_line, listed

BLOCK_BYTES = 1 << 20  # of plain text, or to count lines, read together
# Characters. Longer plain text becomes several documents, cut at line ends.
LONGEST_TEXT = 1 << 20
# The JSON key or column that holds the text, or a function that makes it from the whole record. The
# function raises a DataError that does not name the place of the record.
Key = str | Callable[[dict[str, Any]], str]


def json_documents(file: Iterable[bytes], path: Path, key: Key, skipped: int = 0) -> Iterator[str]:
    """Yield the text of each line of a JSON lines file.

    `file`: the open file, or some of its lines.
    `path`: its name, for errors.
    `skipped`: bytes of the file before the first line of `file`, for the line numbers in errors.

    Raises DataError if a line is not a JSON object or has no valid text.
    """
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = text_of(_parsed(line), key)
        except DataError as error:
            # Counted only now, because counting reads all of the file before this line.
            raise at(f"{path}: line {_line_ends(path, skipped) + number}", error) from error
        yield text


def array_documents(content: bytes, path: Path, key: Key) -> Iterator[str]:
    """Yield the text of each object in the JSON array `content`. Raises DataError."""
    number = 0
    try:
        for record in _parsed(content):
            number += 1
            yield text_of(record, key)
    except DataError as error:
        raise at(f"{path}: element {number}" if number else f"{path}", error) from error


def at(place: str, error: DataError) -> DataError:
    """Return `error` with the place of the record in front."""
    return DataError(f"{place}: {error.what}", error.why, error.do)


def blocks_of_lines(file: Iterable[bytes], path: Path) -> Iterator[str]:
    """Yield the documents of a plain text file, which blank lines separate. Raises DataError."""
    block: list[str] = []
    # The added blank line ends the last document.
    for number, line in enumerate(chain(file, [b"\n"]), start=1):
        if line.strip():
            try:
                block.append(line.decode())
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{path}: line {number}") from error
        elif block:
            yield "".join(block).rstrip("\r\n")
            block = []


def plain_documents(blocks: Iterable[bytes], path: Path, has_mark: bool) -> Iterator[str]:
    """Yield plain text as one document, or as several if it exceeds LONGEST_TEXT.

    `has_mark`: whether it may begin with the byte order mark that Windows writes, which is left
    out. Raises DataError.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig" if has_mark else "utf-8")()
    text = ""
    for block in chain(blocks, [b""]):
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(str(path)) from error
        while len(text) > LONGEST_TEXT:
            last_line_end = text.rfind("\n", 0, LONGEST_TEXT)
            end = LONGEST_TEXT if last_line_end < 0 else last_line_end + 1
            yield text[:end]
            text = text[end:]
    yield text


def unreadable(path: Path, error: Exception) -> Exception:
    """Return the error for a file of documents that cannot be read because of `error`.

    Failures of the disk, which have an errno, are returned unchanged.
    """
    if isinstance(error, OSError) and error.errno:
        return error
    return DataError(
        f"{path}: cannot be read: {first_line(error)}",
        "the file is damaged or cut off",
        "fetch it again",
    )


NAME_KEY = (
    "use prepare chat for conversations; otherwise give the key of the text with --key, or repair "
    "the line"
)


def _not_utf8(place: str) -> DataError:
    why = "the text has another encoding"
    return DataError(f"{place}: not UTF-8", why, "convert it to UTF-8 first")


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"no document: not JSON: {error}",
            "each line must be a JSON object",
            "repair the line, or convert the file to JSON lines",
        ) from error


def text_of(record: Any, key: Key) -> str:
    """Return the text of a record. Raises DataError, which does not name the record's place."""
    if not isinstance(record, dict):
        raise DataError(
            f"no document: {type(record).__name__}, not an object",
            "each line must be a JSON object",
            "repair the line, or convert the file to JSON lines",
        )
    if callable(key):
        text = key(record)
        key = "the conversation"
    elif key in record:
        text = record[key]
    else:
        raise DataError(
            f'no key "{key}"',
            f"it has {listed(record, 8) or 'no key'}",
            NAME_KEY,
        )
    if not isinstance(text, str):
        raise DataError(
            f"{key} is {type(text).__name__}, not text",
            "a document must be a string",
            NAME_KEY,
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{key} contains half of a surrogate pair",  # valid in JSON, but not in UTF-8
            "tokenizers reject it, because it does not encode a character",
            "repair the line, or leave it out",
        ) from None
    return text


def _line_ends(path: Path, size: int) -> int:
    """Return the number of line ends in the first `size` bytes of a file."""
    ends = 0
    with path.open("rb") as file:
        while block := file.read(min(BLOCK_BYTES, size - file.tell())):
            ends += block.count(b"\n")
    return ends
