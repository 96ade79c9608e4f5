"""Read documents from Parquet and Arrow files, the formats of Hugging Face's data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.data.text_documents import Key, at, text_of, unreadable
from common.errors import DataError, first_line, listed

PARQUET = ".parquet"
ROWS = 1024  # read together


def table_documents(
    path: Path, begin: int, end: int, key: Key, on_read: Callable[[int], object]
) -> Iterator[str]:
    """Yield the texts of row groups [begin, end) of a Parquet file, or of an Arrow file.

    `on_read`: called with bytes that were read. Raises DataError, which names the row, and OSError.
    """
    import pyarrow

    is_parquet = path.suffix.lower() == PARQUET
    columns = _parquet_columns(path, begin, end, key) if is_parquet else _arrow_columns(path, key)
    rows = 0
    if is_parquet and begin:
        metadata = open_parquet(path).metadata
        rows = sum(metadata.row_group(group).num_rows for group in range(begin))
    try:
        for column, size in columns:
            try:
                column.validate(full=True)  # or else a damaged offset reads any memory
                values = column.to_pylist()
                is_text = callable(key) or all(isinstance(text, str) for text in values)
            except pyarrow.ArrowInvalid:
                is_text = False
            if not is_text:
                raise _bad_row(path, "the row" if callable(key) else key, column, rows)
            yield from _texts(path, key, values, rows)
            rows += len(column)
            on_read(size)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def _texts(path: Path, key: Key, values: list[Any], before: int) -> Iterator[str]:
    """Yield the texts of `values`, or of records if `key` is a function of them.

    `before`: rows before them. Raises DataError.
    """
    if not callable(key):
        yield from values
        return
    for row, record in enumerate(values, start=before + 1):
        try:
            text = text_of(record, key)
        except DataError as error:
            raise at(f"{path}: row {row:,}", error) from error
        yield text


def open_parquet(path: Path) -> Any:
    """Return the open Parquet file at `path`, a pyarrow.parquet.ParquetFile. Raises DataError."""
    state = path.stat()
    return _open_parquet(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(1)  # parsing the metadata of thousands of row groups takes a second
def _open_parquet(path: Path, state: tuple[int, ...]) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def row_group_bytes(path: Path) -> int:
    """Return the mean of the bytes that a Parquet file stores for a row group, 0 without any."""
    return path.stat().st_size // max(1, open_parquet(path).num_row_groups)


def _parquet_columns(path: Path, begin: int, end: int, key: Key) -> Iterator[tuple[Any, int]]:
    """Yield (column, bytes of the file) of at most ROWS rows of row groups [begin, end).

    The column is `key` or, if that is a function, one of structs with all columns.
    """
    file = open_parquet(path)
    columns = None
    if not callable(key):
        _require_column(path, key, file.schema_arrow.names)
        columns = [key]
    rows = sum(file.metadata.row_group(group).num_rows for group in range(begin, end))
    stored = row_group_bytes(path) * (end - begin)
    for batch in file.iter_batches(ROWS, row_groups=range(begin, end), columns=columns):
        column = batch.to_struct_array() if callable(key) else batch.column(0)
        yield column, stored * len(batch) // max(1, rows)


def _arrow_columns(path: Path, key: Key) -> Iterator[tuple[Any, int]]:
    """Yield (column, bytes of the file) of each batch of an Arrow file, of either format.

    The column: see `_parquet_columns`.
    """
    import pyarrow

    # Not a memory map, in which a failing disk ends the process.
    with pyarrow.OSFile(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
            batches = iter(reader)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        if not callable(key):
            _require_column(path, key, reader.schema.names)
        for batch in batches:
            column = batch.to_struct_array() if callable(key) else batch.column(key)
            yield column, batch.nbytes


def _require_column(path: Path, key: str, names: list[str]) -> None:
    if names.count(key) != 1:
        raise DataError(
            f"{path}: {'several columns' if key in names else 'no column'} {key}",
            f"it has {listed(names, 8)}",
            "name the column that holds the text with --key",
        )


def _bad_row(path: Path, key: str, column: Any, before: int) -> Exception:
    """Return the error for the first row of `column` without text. `before`: rows before it."""
    import pyarrow

    # All rows of a dictionary with a damaged value are invalid.
    later = " or later" if pyarrow.types.is_dictionary(column.type) else ""
    for row in range(len(column)):
        value = column.slice(row, 1)
        try:
            value.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            return DataError(
                f"{path}: row {before + row + 1:,}{later}: {key} is damaged: {first_line(error)}",
                "text must be valid UTF-8, and the file must be whole",
                "repair the row, or fetch the file again",
            )
        (text,) = value.to_pylist()
        if not isinstance(text, str):
            return DataError(
                f"{path}: row {before + row + 1:,}: {key} is {type(text).__name__}, not text",
                "a document is a string",
                "name a column of text with --key, or remove the row",
            )
    return unreadable(path, ValueError(f"{key} is damaged"))
