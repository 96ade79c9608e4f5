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
    batches = _parquet_batches(path, begin, end, key) if is_parquet else _arrow_batches(path, key)
    before = 0
    if is_parquet and begin:
        metadata = open_parquet(path).metadata
        before = sum(metadata.row_group(group).num_rows for group in range(begin))
    try:
        for batch, size in batches:
            try:
                batch.validate(full=True)  # or else a damaged offset reads any memory
                records = batch.to_struct_array().to_pylist()
            except ValueError as error:  # also pyarrow.ArrowInvalid
                raise _damaged_row(path, batch, before, error) from error
            for row, record in enumerate(records, start=before + 1):
                try:
                    text = text_of(record, key)
                except DataError as error:
                    raise at(f"{path}: row {row:,}", error) from error
                yield text
            before += len(batch)
            on_read(size)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


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


def _parquet_batches(path: Path, begin: int, end: int, key: Key) -> Iterator[tuple[Any, int]]:
    """Yield (batch, bytes of the file) of at most ROWS rows of row groups [begin, end).

    The batch has the column `key` or, if that is a function, all columns.
    """
    file = open_parquet(path)
    columns = None
    if not callable(key):
        _require_column(path, key, file.schema_arrow.names)
        columns = [key]
    rows = sum(file.metadata.row_group(group).num_rows for group in range(begin, end))
    stored = row_group_bytes(path) * (end - begin)
    for batch in file.iter_batches(ROWS, row_groups=range(begin, end), columns=columns):
        yield batch, stored * len(batch) // max(1, rows)


def _arrow_batches(path: Path, key: Key) -> Iterator[tuple[Any, int]]:
    """Yield (batch, bytes of the file) of an Arrow file, of either format.

    The batch: see `_parquet_batches`.
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
            yield batch if callable(key) else batch.select([key]), batch.nbytes


def _require_column(path: Path, key: str, names: list[str]) -> None:
    if names.count(key) != 1:
        raise DataError(
            f"{path}: {'several columns' if key in names else 'no column'} {key}",
            f"it has {listed(names, 8)}",
            "name the column that holds the text with --key",
        )


def _damaged_row(path: Path, batch: Any, before: int, error: ValueError) -> Exception:
    """Return the error for the first damaged row of `batch`, or for `error` if no row is damaged.

    `before`: rows before the batch.
    """
    import pyarrow

    # All rows of a dictionary with a damaged value are invalid.
    dictionaries = any(pyarrow.types.is_dictionary(column.type) for column in batch.schema)
    later = " or later" if dictionaries else ""
    for row in range(len(batch)):
        try:
            batch.slice(row, 1).validate(full=True)
        except pyarrow.ArrowInvalid as damage:
            return DataError(
                f"{path}: row {before + row + 1:,}{later}: damaged: {first_line(damage)}",
                "text must be valid UTF-8, and the file must be whole",
                "repair the row, or fetch the file again",
            )
    return unreadable(path, error)
