"""Text to tokenize: files of text, JSON lines or tables, and the documents in them."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.command_line import count
from common.data.preparation import say
from common.data.text_documents import blocks_of_lines, json_documents
from common.errors import ConfigError, DataError
from common.folder_walk import walk
from common.terminal import plural

PART_BYTES = 16 << 20
# Characters. A longer plain text file becomes several documents, cut at line ends.
LONGEST_TEXT = 1 << 20
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".tex")
TABLE_SUFFIXES = (".parquet", ".arrow")
KNOWN = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)
OTHER_TYPES = "of other types"
# Names of splits, also as a part of a file's name: train-00000-of-00002.parquet, c4-train.0.jsonl.
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Source:
    """Bytes [begin, end) of a file, or row groups [begin, end) of a Parquet file.

    A compressed file, a plain text file or an Arrow file is always one whole source.
    """

    path: str
    begin: int
    end: int


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that tokenizes text, without its tokenizer and output."""
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="files or folders: JSON lines or plain text (both also as .gz), .parquet or .arrow; "
        "in folders, .json files are left out",
    )
    parser.add_argument(
        "--key", default="text", help="JSON key or column that holds the text (default: text)"
    )
    parser.add_argument(
        "--processes",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="worker processes (default: one for each CPU)",
    )


def input_files(inputs: list[Path]) -> list[Path]:
    """Return the files to read: the given files, and the files of known types in given folders.

    Each file is returned once. For what is left out of folders see `_files_in`. Raises ConfigError
    for a file that does not exist or whose type is unknown, for a file beside its compressed copy,
    for a folder without files to read or with several splits, and for one that cannot be listed.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found += _files_in(path)
        elif not path.is_file():
            raise ConfigError(
                f"{path}: no such file",
                "--input needs an existing file or folder",
                "check the path",
            )
        elif not kind_of(path):
            why = f"its name does not end in {', '.join(KNOWN)} (or .gz)"
            raise ConfigError(f"{path}: unsupported file type", why, "rename or convert it")
        else:
            found.append(path)
    return _each_once([path.absolute() for path in found])


def _each_once(files: list[Path]) -> list[Path]:
    """Return the files without those that are the same file as an earlier one.

    Raises ConfigError for a file beside its compressed copy.
    """
    once: dict[tuple[int, int], Path] = {}
    for path in files:
        state = path.stat()
        once.setdefault((state.st_dev, state.st_ino), path)
    if repeated := len(files) - len(once):
        say(f"note: {plural(repeated, 'file')} named or linked more than once, each read once")
    uncompressed: dict[str, Path] = {}
    for path in once.values():
        name = str(path)[:-3] if _has_suffix(path, ".gz") else str(path)
        other = uncompressed.setdefault(name, path)
        if other is not path:
            raise ConfigError(
                f"{path}: {other.name} is beside it",
                "one is probably the compressed copy of the other, and its documents would be read"
                " twice",
                "remove or rename one of them",
            )
    return list(once.values())


def _files_in(folder: Path) -> list[Path]:
    """Return the files to read in a folder and below it, sorted, and print what is left out.

    Left out are hidden files and folders, and files of other types. Among these are .json files,
    which hold settings, for example of a data set on disk. In a data set on disk, only the files
    of its state.json are read, and never a cache. Linked folders are entered. For errors see
    `input_files`.
    """

    def refuse(error: OSError) -> None:
        what = f"{error.filename}: cannot be listed: {error.strerror}"
        why = f"it is in the input {folder}"
        raise ConfigError(what, why, "make it readable, or name other files") from error

    inside: list[Path] = []
    left_out: Counter[str] = Counter()
    json_files = 0
    repeated: list[Path] = []
    for current, subfolders, names in walk(folder, refuse, repeated.append):
        hidden = {name for name in (*subfolders, *names) if _is_hidden(name)}
        left_out["hidden"] += len(hidden)
        subfolders[:] = [name for name in subfolders if name not in hidden]
        saved = _saved_by_datasets(current)
        listed = set(saved or ())
        if saved is not None:
            left_out["folder in a data set"] += len(subfolders)
            subfolders.clear()
            inside += saved
        for path in (current / name for name in names if name not in hidden):
            if not path.is_file():
                left_out["broken link or device"] += 1
            elif _is_json(path) or not kind_of(path):
                left_out[OTHER_TYPES] += 1
                json_files += _is_json(path)
            elif saved is not None:
                left_out["not listed in state.json"] += path not in listed
            elif path.name.startswith("cache-") and _has_suffix(path, ".arrow"):
                left_out["cache of datasets"] += 1
            else:
                inside.append(path)
    left_out["folder linked again"] = len(repeated)
    if not inside:
        suffixes = ", ".join(suffix for suffix in KNOWN if suffix != ".json")
        why = f"no file in it ends in {suffixes} (or .gz)"
        if reasons := _counts(left_out):
            why += f"; left out: {reasons}"
        do = "name files or another folder"
        if json_files:
            do = "name its .json files themselves if they are JSON lines"
        raise ConfigError(f"{folder}: nothing to read", why, do)
    _refuse_splits(folder, inside)
    others = left_out.pop(OTHER_TYPES, 0)
    line = f"{folder}: {len(inside):,} files to read, {others:,} of other types left out"
    if reasons := _counts(left_out):
        line += f", and also {reasons}"
    say(line)
    return sorted(inside)


def _counts(left_out: Counter[str]) -> str:
    """Return the reasons for leaving entries out, with their numbers, such as "hidden: 3"."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items() if count)


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or belongs to a Mac's archive."""
    return name.startswith(".") or name == "__MACOSX"


def _saved_by_datasets(folder: Path) -> list[Path] | None:
    """Return the data files of a folder that save_to_disk of Hugging Face's datasets wrote.

    None for another folder. Raises ConfigError for a folder of several splits, and for one whose
    files are missing or not named.
    """
    splits = _settings(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list) and len(splits) > 1:
        raise _several_splits(folder, sorted(map(str, splits)), folder / str(splits[0]))
    entries = _settings(folder / "state.json").get("_data_files")
    if not isinstance(entries, list):
        return None
    files = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not (folder / name).is_file():
            raise ConfigError(
                f"{folder / 'state.json'} names a file that is not there: {name}",
                "the data set is not complete",
                "save or copy it again, or name its files",
            )
        files.append(folder / name)
    return files


def _settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if there is none. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON: {error}",
            "it names the data files of a data set on disk",
            "name the files to read instead of the folder",
        ) from error
    return found if isinstance(found, dict) else {}


def _refuse_splits(folder: Path, files: list[Path]) -> None:
    """Raise ConfigError if the names of `files` or their folders are `train` and other splits."""
    first: dict[str, Path] = {}
    for path in sorted(files):
        if split := _split_of(path, folder):
            first.setdefault(split, path)
    if len(first) > 1 and "train" in first:
        raise _several_splits(folder, sorted(first), first["train"])


def _several_splits(folder: Path, splits: list[str], example: Path) -> ConfigError:
    return ConfigError(
        f"{folder} has several splits: {', '.join(splits)}",
        "documents that are kept for tests would be trained on",
        f"name the files or the folder of one split, such as {example}",
    )


def _split_of(path: Path, folder: Path) -> str:
    """Return the split that the name of a file or of its nearest folder names, or "".

    Text files other than .txt belong to no split: a program may have test.py and train.py.
    """
    kind = kind_of(path)
    name = path.name.lower().removesuffix(".gz")
    if kind == "text" and not name.endswith(".txt"):
        return ""
    words = re.split(r"[.]" if kind == "text" else r"[-_.]", Path(name).stem)
    words += map(str.lower, reversed(path.relative_to(folder).parts[:-1]))
    return next((word for word in words if word in SPLIT_NAMES), "")


def _is_json(path: Path) -> bool:
    """Return whether the name has the suffix .json, which a .gz may follow."""
    return ".json" in map(str.lower, path.suffixes)


def kind_of(path: Path) -> str:
    """Return "json", "text" or "table"; "" if the name has none of their suffixes."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in JSON_SUFFIXES:
        return "json"
    if suffix in TABLE_SUFFIXES:
        return "table" if not _has_suffix(path, ".gz") else ""
    return "text" if suffix in TEXT_SUFFIXES else ""


def _has_suffix(path: Path, suffix: str) -> bool:
    """Return whether the name ends in `suffix`, in small or capital letters."""
    return path.suffix.lower() == suffix


def divide(files: list[Path]) -> list[list[Source]]:
    """Divide the files into parts of about PART_BYTES.

    A part is a piece of a large file, or a group of small ones.
    """
    parts: list[list[Source]] = [[]]
    size = 0
    for path in files:
        for source in sources_of(path):
            length = bytes_of(source)
            if parts[-1] and size + length > PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(source)
            size += length
    return parts


def sources_of(path: Path) -> Iterator[Source]:
    """Yield a file as sources of about PART_BYTES, if its format allows to divide it."""
    size = path.stat().st_size
    if _has_suffix(path, ".parquet"):
        yield from (Source(str(path), group, group + 1) for group in range(_row_groups(path)))
    elif kind_of(path) == "json" and not _has_suffix(path, ".gz"):
        for begin in range(0, size, PART_BYTES):
            yield Source(str(path), begin, min(begin + PART_BYTES, size))
    else:
        yield Source(str(path), 0, size)


def bytes_of(source: Source) -> int:
    """Return the stored bytes of a source, for Parquet its file's mean bytes per row group."""
    path = Path(source.path)
    if _has_suffix(path, ".parquet"):
        return path.stat().st_size // max(1, _row_groups(path))
    return source.end - source.begin


@cache  # asked for each row group, and the metadata of a file with a thousand take milliseconds
def _row_groups(path: Path) -> int:
    """Return the number of row groups in a Parquet file. Raises DataError."""
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_metadata(path).num_row_groups
    except (ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def documents(source: Source, key: str, blank_lines: bool = False) -> Iterator[str]:
    """Yield the documents of a source. Raises DataError.

    `blank_lines`: whether blank lines separate the documents of a plain text file.
    """
    path = Path(source.path)
    kind = kind_of(path)
    if kind == "table":
        yield from _table_documents(path, source, key)
        return
    try:
        with path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if _has_suffix(path, ".gz") else raw
            if kind == "text" and blank_lines:
                yield from blocks_of_lines(file, path)
            elif kind == "text":
                yield from _text_documents(file.read(), path)
            elif _has_suffix(path, ".gz"):
                yield from json_documents(file, path, key)
            else:
                skipped = _seek_line(file, source.begin)
                yield from json_documents(_lines_until(file, source.end), path, key, skipped)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _unreadable(path, error) from error


def _seek_line(file: Any, begin: int) -> int:
    """Go to the first line that begins at byte `begin` or later. Return the byte of its start."""
    if begin:
        file.seek(begin - 1)
        file.readline()  # the rest of a line that began before
    return file.tell()


def _lines_until(file: Any, end: int) -> Iterator[bytes]:
    """Yield the lines that begin before byte `end`."""
    while file.tell() < end:
        line = file.readline()
        if not line:
            return
        yield line


def _text_documents(content: bytes, path: Path) -> Iterator[str]:
    """Yield a plain text file as one document, or as several if it exceeds LONGEST_TEXT."""
    try:
        text = content.decode("utf-8-sig")  # without the byte order mark that Windows writes
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8", "the text has another encoding", "convert it to UTF-8 first"
        ) from error
    while len(text) > LONGEST_TEXT:
        last_line_end = text.rfind("\n", 0, LONGEST_TEXT)
        end = LONGEST_TEXT if last_line_end < 0 else last_line_end + 1
        yield text[:end]
        text = text[end:]
    yield text


def _table_documents(path: Path, source: Source, key: str) -> Iterator[str]:
    """Yield the column `key` of a Parquet row group, or of a whole Arrow file.

    These are the formats of Hugging Face's data sets.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        if _has_suffix(path, ".parquet"):
            with parquet.ParquetFile(path) as file:
                table = file.read_row_group(source.begin)
        else:
            table = _arrow_table(path)
        for chunk in table.column(key).chunks:
            for value in chunk.to_pylist():
                if not isinstance(value, str):
                    raise DataError(
                        f"{path}: {key} is {type(value).__name__}, not text",
                        "a document is a string",
                        "name a column of text with --key",
                    )
                yield value
    except KeyError:
        raise DataError(
            f"{path}: no column {key}",
            f"it has {', '.join(table.column_names)}",
            "name the column that holds the text with --key",
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _arrow_table(path: Path) -> Any:
    """Read an Arrow file of either format, stream or file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        try:
            return pyarrow.ipc.open_stream(file).read_all()
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return pyarrow.ipc.open_file(file).read_all()


def _unreadable(path: Path, error: Exception) -> DataError:
    first_line = str(error).partition("\n")[0]
    return DataError(
        f"{path}: cannot be read: {first_line}", "the file is damaged or cut off", "fetch it again"
    )


def draw_of(text: str) -> int:
    """Return the first 64 bits of the text's SHA-256."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8])


def no_documents() -> DataError:
    """Return the error for inputs without a document."""
    why = "all texts are empty or blank"
    return DataError("no document among the inputs", why, "add text")
