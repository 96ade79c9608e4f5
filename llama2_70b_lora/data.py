"""Read MLCommons' parquet files of GovReport as micro-batches.

A row is a packed sequence. Rows are read in random order, each once per epoch.

    train-00000-of-00001.parquet         columns `input_ids` and `labels`: lists of integers, a row
                                         per sequence
    validation-00000-of-00001.parquet    the same

Labels follow Hugging Face's convention: `labels[i]` is `input_ids[i]`, or -100 if token i does not
count. Hugging Face's model shifts them inside its loss, which compares the logits at position i
with `labels[i + 1]`. The loss of this package compares position i with position i. So this module
shifts the labels, once: the model receives the ids, and the labels moved left by one, with -100 at
the end. In both cases the label at position 0 is not used.

AMD's and NVIDIA's submissions differ by one position. They turned labels into a mask
(label != -100) and apply mask[i] to the loss at *input* position i, whose target is token i + 1.
The first token of each answer is then not counted, and the one after its end is. This project
follows the reference, which has Hugging Face's rule: a mask belongs to the predicted token.

Order: common/data/shuffled_epochs.py. A random order is necessary, not only allowed: in file order
the loss stays above the target (0.937 against 0.922 shuffled, as measured by AMD).

The rules do not allow a run to read tokens before the clock starts. They fix the number of rows, so
a run opens no file earlier. It then reads each file whole: 256 MB as int32 on each rank, and 0.7 GB
during the read. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.atomic_write import new_file
from common.data.shuffled_epochs import shuffled_micro_batches
from common.errors import DataError
from llama2_70b_lora.rules import DATA_FILES, Rules

COLUMNS = ("input_ids", "labels")
IGNORE_INDEX = -100  # the value of Hugging Face and of common/kernels/cross_entropy.py
OWN_FILES = "use MLCommons' own files: see prepare fetch"


def read_rows(folder: Path, split: str, rules: Rules) -> np.ndarray:
    """Return the rows of a split in file order, int32 [rows, 2, sequence]: ids, unshifted labels.

    `split`: "train" or "validation".

    In a timed run, call it only after run_start. Raises DataError if the rows do not satisfy the
    rules and `check_rows`.
    """
    # Imported here, so that commands that read no data do not need the package.
    import pyarrow
    from pyarrow import compute, parquet, types

    path = Path(folder) / DATA_FILES[split]
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read(COLUMNS)
        rows = np.empty((len(table), 2, rules.sequence_length), np.int32)
        for number, name in enumerate(COLUMNS):
            lengths = compute.list_value_length(table.column(name)).to_numpy()
            wrong = lengths != rules.sequence_length
            if wrong.any():
                row = int(wrong.argmax())
                expected = f"{rules.sequence_length} {name}"
                raise DataError(
                    f"{path}: row {row}: expected {expected}, got {lengths[row]}",
                    "all sequences of the benchmark have this length",
                    OWN_FILES,
                )
            values = compute.list_flatten(table.column(name))
            if not types.is_integer(values.type) or values.null_count:
                missing = f"{values.null_count} of them missing"
                raise DataError(
                    f"{path}: {name} has values of type {values.type}, {missing}",
                    "every row must be a list of integers",
                    OWN_FILES,
                )
            rows[:, number] = (
                values.cast(pyarrow.int32()).to_numpy().reshape(-1, rules.sequence_length)
            )
    except (pyarrow.ArrowException, KeyError, OSError) as error:  # all occur with damaged files
        reason, _, _ = str(error).partition("\n")
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)  # pyarrow's text repeats the path
        raise DataError(
            f"{path}: cannot be read as GovReport: {reason}",
            "the file is missing, damaged or in another format",
            "check DATADIR or --data-dir, or see prepare fetch",
        ) from error
    check_rows(rows, split, rules, str(path))
    return rows


def check_rows(rows: np.ndarray, split: str, rules: Rules, source: str) -> None:
    """Raise DataError unless int32 [rows, 2, sequence] are ids and unshifted labels of a split.

    `source`: their file, for the message. The rules fix the number of rows. Each row needs a
        label that counts, because its mean loss would be 0/0 otherwise.
    """
    expected = rules.train_samples if split == "train" else rules.eval_samples
    if len(rows) != expected:
        what = f"{source}: expected {expected} sequences, got {len(rows)}"
        raise DataError(what, "the file is incomplete, or not the benchmark's", OWN_FILES)
    ids = rows[:, 0]
    labels = rows[:, 1]
    counts = labels != IGNORE_INDEX
    last = rules.shape.vocab_size - 1
    same = f"the token id of the same position or {IGNORE_INDEX} as label"
    _require(ids, (ids >= 0) & (ids <= last), f"a token id from 0 to {last}", source)
    _require(labels, ~counts | (labels == ids), same, source)
    # the first label never counts, because nothing predicts it
    masked = np.flatnonzero(~counts[:, 1:].any(axis=1))
    if len(masked):
        raise DataError(
            f"{source}: all labels are masked in {len(masked)} sequences, first in row {masked[0]}",
            "the mean loss of such a sequence is 0/0",
            OWN_FILES,
        )


def _require(values: np.ndarray, valid: np.ndarray, expected: str, source: str) -> None:
    """Raise DataError for the first of `values` [rows, sequence] that is not `valid`."""
    if valid.all():
        return
    row, position = np.unravel_index(valid.argmin(), valid.shape)
    raise DataError(
        f"{source}: row {row}, position {position}:"
        f" expected {expected}, got {values[row, position]}",
        "another vocabulary was used, labels were shifted, or the file is damaged",
        OWN_FILES,
    )


def write_rows(folder: Path, split: str, rows: np.ndarray) -> None:
    """Write int32 [rows, 2, sequence] as MLCommons' file of this split, atomically."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: list(rows[:, number]) for number, name in enumerate(COLUMNS)})
    with new_file(Path(folder) / DATA_FILES[split]) as file:
        parquet.write_table(table, file)


def next_token_labels(rows: np.ndarray) -> np.ndarray:
    """Move the labels in int32 [..., 2, sequence] (ids, labels) one position to the left.

    Each position then has the label that it must predict (see the module's docstring).
    """
    shifted = np.full_like(rows, IGNORE_INDEX)
    shifted[..., 0, :] = rows[..., 0, :]
    shifted[..., 1, :-1] = rows[..., 1, 1:]
    return shifted


def train_batches(
    rows: np.ndarray,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    step: int = 0,
) -> Iterator[np.ndarray]:
    """Yield this rank's micro-batches from `step` on, without end.

    `rows`: the result of `read_rows`.

    Each is int32 [micro_batch_size, 2, sequence], in the order of `shuffled_micro_batches`.
    """
    micro_batches = shuffled_micro_batches(
        len(rows), seed, global_batch_size, micro_batch_size, rank, world_size, step
    )
    for numbers in micro_batches:
        yield next_token_labels(rows[numbers])
