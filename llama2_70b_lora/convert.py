"""Convert MLCommons' parquet files, or AMD's packed .npy files, to the flat token files that data.py describes.

Every row is checked before it is written (verify.checked_rows). The sidecar is written last: after an interruption the next call starts
again. pyarrow is imported here only, and torch not at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet, types

from common.data.manifest import sha256_of
from common.data.preparation import locked, say
from common.errors import DataError, StorageError
from llama2_70b_lora.data import DTYPE, SIDECAR, GovReport, Split, tokens_path
from llama2_70b_lora.packed_npy import as_row, read_packed
from llama2_70b_lora.rules import CLOSED, Rules
from llama2_70b_lora.verify import SPLITS, RowSource, checked_rows, verify_data

LOCK = ".govreport.lock"
BATCH_ROWS = 64  # read from a parquet file at a time: 8 MiB


def convert(parquet_dir: Path, data_dir: Path, rules: Rules = CLOSED) -> None:
    """Write `govreport-*.bin` and `govreport.json` to `data_dir` from MLCommons' parquet files. Raises DataError, StorageError."""
    inputs = {split: _find(parquet_dir, rf"{split}-\d+-of-\d+\.parquet", f"{split}-00000-of-00001.parquet") for split in SPLITS}
    _convert_once(data_dir, inputs, parquet_rows, rules)


def convert_npy(npy_dir: Path, data_dir: Path, rules: Rules = CLOSED) -> None:
    """The same from AMD's train.npy and validation.npy. They are pickles; nothing in them is executed."""
    inputs = {split: _find(npy_dir, rf"{split}\.npy", f"{split}.npy") for split in SPLITS}
    _convert_once(data_dir, inputs, packed_rows, rules)


def _find(folder: Path, pattern: str, example: str) -> list[Path]:
    """Files in `folder`, or in its `data/` as on the Hugging Face hub."""
    for place in (folder, folder / "data"):
        if found := sorted(path for path in place.glob("*") if re.fullmatch(pattern, path.name)):
            return found
    raise DataError(f"{folder}: there is no {example}", "the folder has other files, or none", "check the path, or see prepare fetch")


def _convert_once(data_dir: Path, inputs: dict[str, list[Path]], read: Callable[[list[Path]], RowSource], rules: Rules) -> None:
    source = "; ".join(f"{file.name} sha256 {sha256_of(file)}" for split in SPLITS for file in inputs[split])
    with locked(data_dir / LOCK):
        if (data_dir / SIDECAR).exists():
            if GovReport.read(data_dir).source == source:
                verify_data(data_dir, rules)
                say(f"{data_dir}: was complete already")
                return
            why = "it was converted from other files, and nothing is overwritten"
            raise StorageError(f"{data_dir / SIDECAR}: exists already", why, "choose another --data-dir, or remove it yourself")
        write_rows(data_dir, source, {split: read(inputs[split]) for split in SPLITS}, rules)


def write_rows(data_dir: Path, source: str, rows: dict[str, RowSource], rules: Rules) -> None:
    """Check and write both splits, first under temporary names, and the sidecar last. Raises DataError."""
    expected = {"train": rules.train_samples, "validation": rules.eval_samples}
    final = {split: tokens_path(data_dir, split) for split in SPLITS}
    partial = {split: path.with_name(path.name + ".partial") for split, path in final.items()}
    seen: dict[bytes, str] = {}
    for split in SPLITS:
        with partial[split].open("wb") as file:
            for row in checked_rows(rows[split], split, expected[split], rules, seen):
                file.write(row.astype(DTYPE).tobytes())
            file.flush()
            os.fsync(file.fileno())
    (data_dir / SIDECAR).unlink(missing_ok=True)  # of an earlier miniature: it does not describe the new files
    for split in SPLITS:
        partial[split].replace(final[split])
    train, validation = (Split(expected[split], sha256_of(final[split])) for split in SPLITS)
    GovReport(data_dir, source, rules.sequence_length, rules.shape.vocab_size, train, validation).write()
    say(f"{data_dir}: {train.rows} training and {validation.rows} validation sequences of {rules.sequence_length} tokens")


def parquet_rows(paths: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and int64 [2, sequence] of every row, in order. Raises DataError."""
    for path in paths:
        try:
            yield from _rows_of_file(path)
        except (pyarrow.ArrowException, OSError) as error:  # damage inside a file can be either
            what = f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}"
            raise DataError(what, "the file is incomplete or damaged", "fetch it again") from error


def _rows_of_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    with parquet.ParquetFile(path) as file:
        if missing := {"input_ids", "labels"} - set(file.schema_arrow.names):
            what = f"{path}: there is no column {' and no '.join(sorted(missing))}"
            raise DataError(what, "it is not the tokenized GovReport", "check the path")
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=["input_ids", "labels"]):
            columns = (_lists(batch.column(name), path, name) for name in ("input_ids", "labels"))
            for ids, labels in zip(*columns, strict=True):
                name = f"{path}: row {number}"
                if len(ids) != len(labels):
                    raise DataError(f"{name}: {len(ids)} input_ids and {len(labels)} labels", "each id needs a label", "fetch it again")
                yield name, np.stack((ids, labels))
                number += 1


def _lists(column: pyarrow.Array, path: Path, name: str) -> list[np.ndarray]:
    """A column of lists of integers, as int64 arrays."""
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise DataError(f"{path}: column {name} is {kind}", "it must have lists of integers", "check that it is the tokenized GovReport")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise DataError(f"{path}: column {name} has missing values", "every row must be a list of integers", "fetch it again")
    flat = values.to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return [flat[begin:end] for begin, end in pairwise((0, *ends.tolist()))]


def packed_rows(paths: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and int64 [2, sequence] of every row of AMD's files. A file is in memory at once: about 1 GB for the training set."""
    for path in paths:
        for i, packed in enumerate(read_packed(path)):
            name = f"{path}: row {i}"
            yield name, as_row(packed, name)
