"""From flat token files to micro-batches: the packed sequences of GovReport, in random order, each once per epoch.

    govreport.json              counts, sequence length, vocabulary size, and each file's SHA-256: metadata, readable at any time
    govreport-train.bin         int32 little endian [rows, 2, sequence]: a row is its token ids, then its labels
    govreport-validation.bin    the same

`prepare convert` makes them of MLCommons' parquet files and keeps the labels as they are there, in Hugging Face's convention:
`labels[i]` is `ids[i]`, or -100 where token i does not count. Hugging Face's model shifts inside its loss: logits at position i are
compared with labels[i + 1]. Our loss compares position i with position i, so the shift happens here, once: what the model gets is
(ids, labels moved left by one, -100 at the end). The label at position 0 is used by neither.

Off by one: AMD's and NVIDIA's submissions turned labels into a mask (label != -100) and apply mask[i] to the loss at *input* position
i, whose target is token i + 1. The first token of each answer is then not counted, and the one after its end is. The reference is
Hugging Face's rule and so is ours: a mask belongs to the token that is predicted.

Order: epoch e is the e-th permutation of the rows drawn from one `numpy.random.RandomState(seed)`; epochs follow each other without a
gap, so a batch may hold the end of one and the beginning of the next. The legacy generator, because its stream is frozen. A random
order is needed, not only allowed: in file order the loss stays above the target (0.937 against 0.922 shuffled, as AMD measured).

Rules: counts may be read before the clock starts, tokens may not. So `GovReport.read` touches the sidecar alone. No torch here: converting
the data needs none.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from common.config import share_of_rank
from common.data.manifest import write_whole
from common.errors import DataError, StorageError

SIDECAR = "govreport.json"
FORMAT = 1  # of sidecar and token files
DTYPE = np.dtype("<i4")
IGNORE_INDEX = -100  # Hugging Face's, and that of common/kernels/cross_entropy.py
REBUILD = "convert the data again: python -m llama2_70b_lora.prepare convert"


@dataclass(frozen=True)
class Split:
    rows: int
    sha256: str  # of the token file


@dataclass(frozen=True)
class GovReport:
    """What the sidecar says of a data folder."""

    folder: Path
    source: str  # what it was converted from
    sequence_length: int
    vocab_size: int
    train: Split
    validation: Split

    @classmethod
    def read(cls, folder: Path) -> GovReport:
        """Read and check `govreport.json`; opens no token file. Raises DataError."""
        path = Path(folder) / SIDECAR
        try:
            table = json.loads(path.read_text())
            train, validation = (Split(**table.pop(name)) for name in ("train", "validation"))
            layout = (table.pop("format"), table.pop("dtype"))
            found = cls(Path(folder), train=train, validation=validation, **table)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be opened: {error.strerror}", "no converted data there", "check DATADIR, or " + REBUILD
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not a sidecar of GovReport: {error!r}", "the file is damaged or of another kind", REBUILD) from error
        if layout != (FORMAT, DTYPE.str):
            raise DataError(f"{path}: expected format {FORMAT} of {DTYPE.str}, got {layout}", "another version wrote it", REBUILD)
        numbers = (found.sequence_length, found.vocab_size, found.train.rows, found.validation.rows)
        if not all(type(number) is int and number > 0 for number in numbers) or found.sequence_length < 2:
            raise DataError(f"{path}: {numbers} cannot be lengths and counts", "the file is damaged", REBUILD)
        return found

    def write(self) -> None:
        """All of it or nothing, under a temporary name first."""
        table = {"format": FORMAT, "dtype": DTYPE.str, **asdict(self)}
        del table["folder"]
        write_whole(self.folder / SIDECAR, json.dumps(table, indent=2).encode() + b"\n")

    def check(self, sequence_length: int, vocab_size: int, train_samples: int, eval_samples: int) -> None:
        """Raise DataError unless the data are those of the rules."""
        found = (self.sequence_length, self.vocab_size, self.train.rows, self.validation.rows)
        names = ("sequence length", "vocabulary size", "train sequences", "validation sequences")
        for name, got, expected in zip(names, found, (sequence_length, vocab_size, train_samples, eval_samples), strict=True):
            if got != expected:
                what = f"{self.folder / SIDECAR}: {name}: expected {expected}, got {got}"
                raise DataError(what, "these are other data than the benchmark's", "check DATADIR, or " + REBUILD)

    def open_rows(self, split: str) -> Rows:
        """Open the token file of "train" or "validation". In a timed run: only after run_start."""
        return Rows(self, split)


class Rows(AbstractContextManager):
    """An open token file: `rows[i]` is int32 [2, sequence], the token ids and the label of each position, -100 where none counts.

    Read with `pread`, not through a memory map: a failing disk then raises instead of killing the process with SIGBUS. What is
    read is checked: ids and labels must be tokens, and a row must have a label that counts, or its mean loss would be 0/0.
    """

    def __init__(self, govreport: GovReport, split: str):
        self.path = tokens_path(govreport.folder, split)
        self.sequence_length, self.vocab_size = govreport.sequence_length, govreport.vocab_size
        self._count = getattr(govreport, split).rows
        self._row_bytes = 2 * govreport.sequence_length * DTYPE.itemsize
        expected = self._count * self._row_bytes
        try:
            self._file = self.path.open("rb", buffering=0)
            got = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be opened: {error.strerror}", f"{SIDECAR} is there", "check DATADIR, or " + REBUILD
            ) from error
        if got != expected:
            what = f"{self.path}: expected {expected} bytes ({self._count} rows), got {got}"
            raise DataError(what, "the file is cut off or damaged", REBUILD)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> np.ndarray:
        """Row `i` in file order. Raises DataError on what is no token, StorageError if the disk fails."""
        stored = self.stored(i)
        check_row(stored, self.vocab_size, f"{self.path}: row {i}")
        return next_token_labels(stored)

    def stored(self, i: int) -> np.ndarray:
        """Row `i` as it is in the file, int32 [2, sequence], unchecked and unshifted."""
        if not 0 <= i < self._count:
            raise IndexError(f"row {i} of {self._count}")
        try:
            raw = os.pread(self._file.fileno(), self._row_bytes, i * self._row_bytes)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}", f"reading row {i} failed", "check the disk or the mount") from error
        if len(raw) != self._row_bytes:
            raise DataError(f"{self.path}: ends in row {i}", "the file became shorter while it was open", REBUILD)
        return np.frombuffer(raw, DTYPE).reshape(2, self.sequence_length)

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def next_token_labels(stored: np.ndarray) -> np.ndarray:
    """[..., 2, sequence] of ids and Hugging Face labels -> int32 of ids and what each position must predict (see above)."""
    shifted = np.full(stored.shape, IGNORE_INDEX, np.int32)
    shifted[..., 0, :] = stored[..., 0, :]
    shifted[..., 1, :-1] = stored[..., 1, 1:]
    return shifted


def check_row(stored: np.ndarray, vocab_size: int, where: str) -> None:
    """Raise DataError unless `stored` [2, sequence] holds token ids, labels that are tokens or -100, and one that counts."""
    check_tokens(stored, vocab_size, where)
    if all_masked(stored):
        raise DataError(f"{where}: all labels are masked", "the mean loss of such a sequence is 0/0", "find out where the data come from")


def check_tokens(stored: np.ndarray, vocab_size: int, where: str) -> None:
    """Raise DataError unless `stored` [2, sequence] holds token ids, and labels that are tokens or -100."""
    ids, labels = stored
    for what, values, also in (("token id", ids, ""), ("label", labels[labels != IGNORE_INDEX], f" or {IGNORE_INDEX}")):
        wrong = (values < 0) | (values >= vocab_size)
        if wrong.any():
            text = f"{where}: expected a {what} from 0 to {vocab_size - 1}{also}, got {int(values[wrong][0])}"
            raise DataError(text, "it was tokenized with another vocabulary, or is damaged", REBUILD)


def all_masked(stored: np.ndarray) -> bool:
    """No label counts. The first one never does: nothing predicts it."""
    return bool((stored[1, 1:] == IGNORE_INDEX).all())


def row_order(rows: int, seed: int) -> Iterator[int]:
    """Row numbers without end: one permutation of all rows after the other."""
    random = np.random.RandomState(seed)
    while True:
        yield from random.permutation(rows).tolist()


def train_batches(
    rows: Rows, seed: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int, start_sample: int = 0
) -> Iterator[np.ndarray]:
    """This rank's micro-batches without end, int32 [micro_batch_size, 2, sequence]; `global/(micro*world)` of them make a step.

    Step s holds the samples start_sample + s*GBS .. + GBS - 1 of the order, whatever the number of processes: each rank takes a
    contiguous share of them and cuts it into micro-batches. Raises ConfigError if the ranks cannot get whole micro-batches.
    """
    share = share_of_rank(global_batch_size, micro_batch_size, world_size)
    order = itertools.islice(row_order(len(rows), seed), start_sample, None)
    while True:
        mine = list(itertools.islice(order, global_batch_size))[rank * share : (rank + 1) * share]
        for start in range(0, share, micro_batch_size):
            yield np.stack([rows[i] for i in mine[start : start + micro_batch_size]])


def validation_pairs(govreport: GovReport) -> np.ndarray:
    """All validation sequences in file order, int32 [rows, 2, sequence]. Opens the token file: only after run_start."""
    with govreport.open_rows("validation") as rows:
        return np.stack([rows[i] for i in range(len(rows))])


def tokens_path(folder: Path, split: str) -> Path:
    return Path(folder) / f"govreport-{split}.bin"
