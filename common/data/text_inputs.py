"""Text to tokenize: files of text, JSON lines or tables, and the documents in them."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.atomic_write import naming
from common.data.preparation import say
from common.data.table_documents import (
    PARQUET,
    open_parquet,
    row_group_bytes,
    table_documents,
)
from common.data.text_documents import (
    BLOCK_BYTES,
    Key,
    array_documents,
    blocks_of_lines,
    json_documents,
    plain_documents,
    unreadable,
)
from common.errors import ConfigError, DataError
from common.folder_walk import walk
from common.machine.host import cpu_count
from common.terminal import plural
from common.values import count

PART_BYTES = 16 << 20
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".tex")
TABLE_SUFFIXES = (PARQUET, ".arrow")
KNOWN = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)
COMPRESSED = (".gz", ".zst")
# Names of splits, also as a part of a file's name: train-00000-of-00002.parquet, c4-train.0.jsonl.
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Source:
    """Bytes [begin, end) of a file, or row groups [begin, end) of a Parquet file.

    A compressed file or an Arrow file is always one whole source.
    """

    path: str
    begin: int
    end: int


def add_text_options(parser: argparse.ArgumentParser, key: bool = True) -> None:
    """Add the options of a command that tokenizes text, without its tokenizer and output.

    `key`: whether one key or column holds the text.
    """
    kind = "plain text" if key else "arrays"
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files or folders: JSON lines or {kind} (both also as .gz or .zst), .parquet or "
        ".arrow; in folders, .json files are left out",
    )
    if key:
        parser.add_argument(
            "--key",
            default="text",
            help="JSON key or column that holds the text (default: %(default)s)",
        )
    parser.add_argument(
        "--processes",
        type=count,
        default=cpu_count(),
        metavar="N",
        help="worker processes (default: one for each CPU that they may use)",
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
            why = f"its name does not end in {', '.join(KNOWN)} (or .gz, .zst)"
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
        name = str(path.with_suffix("") if is_compressed(path) else path)
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
            elif _is_json(path):
                left_out[".json"] += 1
            elif not kind_of(path):
                left_out["of other types"] += 1
            elif saved is not None:
                left_out["not listed in state.json"] += path not in listed
            elif path.name.startswith("cache-") and _has_suffix(path, ".arrow"):
                left_out["cache of datasets"] += 1
            else:
                inside.append(path)
    left_out["folder linked again"] = len(repeated)
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items() if count)
    others = f"; left out: {reasons}" if reasons else ""
    if not inside:
        suffixes = ", ".join(suffix for suffix in KNOWN if suffix != ".json")
        do = "name files or another folder"
        if left_out[".json"]:
            do = "name its .json files themselves if they are JSON lines"
        why = f"no file in it ends in {suffixes} (or .gz, .zst){others}"
        raise ConfigError(f"{folder}: nothing to read", why, do)
    _refuse_splits(folder, inside)
    say(f"{folder}: {len(inside):,} files to read{others}")
    return sorted(inside)


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
    name = _uncompressed(path)
    if kind == "text" and name.suffix != ".txt":
        return ""
    words = re.split(r"[.]" if kind == "text" else r"[-_.]", name.stem)
    words += map(str.lower, reversed(path.relative_to(folder).parts[:-1]))
    return next((word for word in words if word in SPLIT_NAMES), "")


def _is_json(path: Path) -> bool:
    """Return whether the name has the suffix .json, which .gz or .zst may follow."""
    return ".json" in map(str.lower, path.suffixes)


def kind_of(path: Path) -> str:
    """Return "json", "text" or "table"; "" if the name has none of their suffixes."""
    suffix = _uncompressed(path).suffix
    if suffix in JSON_SUFFIXES:
        return "json"
    if suffix in TABLE_SUFFIXES:
        return "" if is_compressed(path) else "table"
    return "text" if suffix in TEXT_SUFFIXES else ""


def _uncompressed(path: Path) -> Path:
    """Return the name in small letters, without the suffix of a compressed file."""
    name = Path(path.name.lower())
    return name.with_suffix("") if is_compressed(path) else name


def is_compressed(path: Path) -> bool:
    """Return whether the name has the suffix of a compressed file."""
    return path.suffix.lower() in COMPRESSED


def _has_suffix(path: Path, suffix: str) -> bool:
    """Return whether the name ends in `suffix`, in small or capital letters."""
    return path.suffix.lower() == suffix


def divide(files: list[Path], blank_lines: bool = False) -> list[list[Source]]:
    """Divide the files into parts of about PART_BYTES.

    A part is a piece of a large file, or a group of small ones. `blank_lines`: see `documents`.
    """
    parts: list[list[Source]] = [[]]
    size = 0
    for path in files:
        for source in sources_of(path, blank_lines):
            length = bytes_of(source)
            if parts[-1] and size + length > PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(source)
            size += length
    return parts


def sources_of(path: Path, blank_lines: bool = False) -> Iterator[Source]:
    """Yield a file as sources of about PART_BYTES, if it can be divided.

    `blank_lines`: see `documents`. Such a plain text file is not divided.
    """
    kind = kind_of(path)
    size = path.stat().st_size
    step = PART_BYTES
    if _has_suffix(path, PARQUET):
        step = max(1, PART_BYTES // max(1, row_group_bytes(path)))
        size = open_parquet(path).num_row_groups
    elif kind == "table" or is_compressed(path) or (kind == "text" and blank_lines):
        step = max(1, size)
    elif kind == "json":
        with naming(path), _opened(path, lambda size: None) as file:
            step = max(1, size) if _is_array(file) else PART_BYTES
    for begin in range(0, size, step):
        yield Source(str(path), begin, min(begin + step, size))


def bytes_of(source: Source) -> int:
    """Return the stored bytes of a source, for Parquet its file's mean for each row group."""
    path = Path(source.path)
    each = row_group_bytes(path) if _has_suffix(path, PARQUET) else 1
    return each * (source.end - source.begin)


def documents(
    source: Source,
    key: Key,
    blank_lines: bool = False,
    on_read: Callable[[int], object] = lambda size: None,
) -> Iterator[str]:
    """Yield the documents of a source. Raises DataError, or OSError with the path.

    `blank_lines`: whether blank lines separate the documents of a plain text file.
    `on_read`: called with the number of bytes that were read since the last call.
    """
    path = Path(source.path)
    with naming(path):
        if kind_of(path) == "table":
            yield from table_documents(path, source.begin, source.end, key, on_read)
            return
        try:
            with _opened(path, on_read) as file:
                if kind_of(path) == "json" and not source.begin and _is_array(file):
                    yield from array_documents(file.read(), path, key)
                elif kind_of(path) == "json":
                    skipped = _seek_line(file, source.begin)
                    lines = file if is_compressed(path) else _lines_until(file, source.end)
                    yield from json_documents(lines, path, key, skipped)
                elif blank_lines:
                    yield from blocks_of_lines(file, path)
                else:
                    yield from plain_documents(_blocks(file, source), path, not source.begin)
        except (EOFError, zlib.error, OSError) as error:
            raise unreadable(path, error) from error


class _CountedFile(io.FileIO):
    """A file that passes the number of bytes of each read to a function."""

    def __init__(self, path: Path, on_read: Callable[[int], object]):
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        self.on_read(size)
        return size


def _opened(path: Path, on_read: Callable[[int], object]) -> Any:
    """Open a file for reading, and decompress it if it is compressed."""
    file: Any = io.BufferedReader(_CountedFile(path, on_read), 1 << 17)
    if _has_suffix(path, ".gz"):
        return gzip.GzipFile(fileobj=file)
    if _has_suffix(path, ".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return file


def _is_array(file: Any) -> bool:
    """Return whether a JSON file, which was just opened, holds an array instead of lines."""
    return file.peek(BLOCK_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _seek_line(file: Any, begin: int) -> int:
    """Go to the first line that begins at byte `begin` or later. Return the byte of its start."""
    if not begin:
        return 0
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


def _blocks(file: Any, source: Source) -> Iterator[bytes]:
    """Yield the plain text of a source in blocks of at most BLOCK_BYTES."""
    left = 1 << 62  # of a compressed file, which is read to its end
    if not is_compressed(Path(source.path)):
        end = _text_start(file, source.end)
        left = end - file.seek(_text_start(file, source.begin))
    while block := file.read(min(BLOCK_BYTES, left)):
        left -= len(block)
        yield block


def _text_start(file: Any, begin: int) -> int:
    """Return the start of the first line of plain text at byte `begin` or later.

    If no line ends in the next BLOCK_BYTES, return the start of the first character.
    """
    if not begin:
        return 0
    file.seek(begin - 1)
    block = file.read(BLOCK_BYTES)
    start = block.find(b"\n") + 1
    if not start:
        # At most 3 bytes of a character of UTF-8 follow its first one.
        start = next((n for n in range(1, 4) if block[n : n + 1] and block[n] & 0xC0 != 0x80), 1)
    return begin - 1 + start


def draw_of(text: str) -> int:
    """Return the first 64 bits of the text's SHA-256."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8])


def no_documents() -> DataError:
    """Return the error for inputs without a document."""
    why = "all texts are empty or blank"
    return DataError("no document among the inputs", why, "add text")
