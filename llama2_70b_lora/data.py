"""From MLCommons' parquet files to micro-batches: the packed sequences of GovReport, in random order, each once per epoch.

    train-00000-of-00001.parquet         columns `input_ids` and `labels`: lists of integers, a row for each sequence
    validation-00000-of-00001.parquet    the same

Labels are in Hugging Face's convention: `labels[i]` is `input_ids[i]`, or -100 where token i does not count. Hugging Face's model shifts
inside its loss: logits at position i are compared with labels[i + 1]. Our loss compares position i with position i, so the shift happens
here, once: what the model gets is (ids, labels moved left by one, -100 at the end). The label at position 0 is used by neither.

Off by one: AMD's and NVIDIA's submissions turned labels into a mask (label != -100) and apply mask[i] to the loss at *input* position
i, whose target is token i + 1. The first token of each answer is then not counted, and the one after its end is. The reference is
Hugging Face's rule and so is ours: a mask belongs to the token that is predicted.

Order: epoch e is the e-th permutation of the rows drawn from one `numpy.random.RandomState(seed)`; epochs follow each other without a
gap, so a batch may hold the end of one and the beginning of the next. The legacy generator, because its stream is frozen. A random
order is needed, not only allowed: in file order the loss stays above the target (0.937 against 0.922 shuffled, as AMD measured).

Rules: tokens may not be read before the clock starts. The rules fix the counts, so a run opens no file earlier. It then reads each file
whole: 256 MB as int32 on each rank, and 0.7 GB while it reads. No torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.errors import DataError
from llama2_70b_lora.rules import DATA_FILES, Rules

COLUMNS = ("input_ids", "labels")
IGNORE_INDEX = -100  # Hugging Face's, and that of common/kernels/cross_entropy.py
OWN_FILES = "use MLCommons' own files: see prepare fetch"


def read_rows(folder: Path, split: str, rules: Rules) -> np.ndarray:
    """The rows of "train" or "validation" in file order: int32 [rows, 2, sequence], ids and unshifted labels.

    In a timed run: only after run_start. Raises DataError where they are not what the rules and `check_rows` want.
    """
    import pyarrow  # here, so that what needs no data runs without it
    from pyarrow import compute, parquet, types

    path = Path(folder) / DATA_FILES[split]
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read(COLUMNS)
        rows = np.empty((len(table), 2, rules.sequence_length), np.int32)
        for number, name in enumerate(COLUMNS):
            lengths = compute.list_value_length(table.column(name)).to_numpy()
            if (wrong := lengths != rules.sequence_length).any():
                row = int(wrong.argmax())
                what = f"{path}: row {row}: expected {rules.sequence_length} {name}, got {lengths[row]}"
                raise DataError(what, "all sequences of the benchmark have this length", OWN_FILES)
            values = compute.list_flatten(table.column(name))
            if not types.is_integer(values.type) or values.null_count:
                what = f"{path}: {name} has values of type {values.type}, {values.null_count} of them missing"
                raise DataError(what, "every row must be a list of integers", OWN_FILES)
            rows[:, number] = (
                values.cast(pyarrow.int32()).to_numpy().reshape(-1, rules.sequence_length)
            )
    except (
        pyarrow.ArrowException,
        KeyError,
        OSError,
    ) as error:  # damage inside a file can be any of them
        first_line, _, _ = str(error).partition("\n")
        what = f"{path}: cannot be read as GovReport: {first_line}"
        raise DataError(
            what,
            "the file is missing, damaged or of another kind",
            "check DATADIR, or see prepare fetch",
        ) from error
    check_rows(rows, split, rules, str(path))
    return rows


def check_rows(rows: np.ndarray, split: str, rules: Rules, source: str) -> None:
    """Raise DataError unless int32 [rows, 2, sequence] are ids and unshifted labels of a split. `source`: their file, for the message.

    There must be as many as the rules say, and in each a label that counts: the mean loss of the others would be 0/0.
    """
    expected = rules.train_samples if split == "train" else rules.eval_samples
    if len(rows) != expected:
        what = f"{source}: expected {expected} sequences, got {len(rows)}"
        raise DataError(what, "the file is incomplete, or not the benchmark's", OWN_FILES)
    ids, labels = rows[:, 0], rows[:, 1]
    counts = labels != IGNORE_INDEX
    last = rules.shape.vocab_size - 1
    for expects, found, wrong in (
        (f"a token id from 0 to {last}", ids, (ids < 0) | (ids > last)),
        (
            f"the token id of the same position or {IGNORE_INDEX} as label",
            labels,
            counts & (labels != ids),
        ),
    ):
        if wrong.any():
            row, position = np.unravel_index(wrong.argmax(), wrong.shape)
            what = f"{source}: row {row}, position {position}: expected {expects}, got {found[row, position]}"
            raise DataError(
                what,
                "it was tokenized with another vocabulary, labels were shifted, or it is damaged",
                OWN_FILES,
            )
    masked = np.flatnonzero(
        ~counts[:, 1:].any(axis=1)
    )  # the first label never counts: nothing predicts it
    if len(masked):
        what = f"{source}: all labels are masked in {len(masked)} sequences, the first is row {masked[0]}"
        raise DataError(what, "the mean loss of such a sequence is 0/0", OWN_FILES)


def write_rows(folder: Path, split: str, rows: np.ndarray) -> None:
    """Write int32 [rows, 2, sequence] as MLCommons' file of this split, under a temporary name first."""
    import pyarrow
    from pyarrow import parquet

    path = Path(folder) / DATA_FILES[split]
    partial = path.with_name(path.name + ".partial")
    parquet.write_table(
        pyarrow.table({name: list(rows[:, number]) for number, name in enumerate(COLUMNS)}), partial
    )
    partial.replace(path)


def next_token_labels(rows: np.ndarray) -> np.ndarray:
    """int32 [..., 2, sequence] of ids and Hugging Face labels -> of ids and what each position must predict (see above)."""
    shifted = np.full_like(rows, IGNORE_INDEX)
    shifted[..., 0, :] = rows[..., 0, :]
    shifted[..., 1, :-1] = rows[..., 1, 1:]
    return shifted


def row_order(rows: int, seed: int) -> Iterator[int]:
    """Row numbers without end: one permutation of all rows after the other."""
    random = np.random.RandomState(seed)
    while True:
        yield from random.permutation(rows).tolist()


def train_batches(
    rows: np.ndarray,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    step: int = 0,
) -> Iterator[np.ndarray]:
    """This rank's micro-batches from `step` on, without end, int32 [micro_batch_size, 2, sequence]; `global/(micro*world)` of them make a step.

    `rows`: of `read_rows`. Step s holds the samples s*GBS .. + GBS - 1 of the order, whatever the number of processes: each rank takes a
    contiguous share of them and cuts it into micro-batches.
    """
    share = global_batch_size // world_size
    order = itertools.islice(row_order(len(rows), seed), step * global_batch_size, None)
    while True:
        mine = list(itertools.islice(order, global_batch_size))[rank * share : (rank + 1) * share]
        for start in range(0, share, micro_batch_size):
            yield next_token_labels(rows[mine[start : start + micro_batch_size]])
