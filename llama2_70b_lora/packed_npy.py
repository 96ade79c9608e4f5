"""Read AMD's and NVIDIA's packed GovReport, whose `.npy` files are pickles, without executing them.

A file is an array of Python objects, one dict per sequence: input_ids, loss_mask (0 or 1),
seq_start_id. numpy stores object arrays as a pickle, and a pickle can call any function by name
(CVE-2019-6446). This reader accepts only the four names that numpy's arrays need, and loads each as
a stand-in from this file. numpy's own code is not safe here: given a type with a field of objects,
it reads numbers of the file as pointers. Only `prepare convert-npy` uses this reader. A run reads
no pickle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from common.command_line import raise_if_interrupted
from common.errors import DataError, Interrupted, StorageError
from llama2_70b_lora.data import IGNORE_INDEX, check_rows, write_rows
from llama2_70b_lora.rules import DATA_FILES, Rules

OBJECTS = "O8"
# Types of a stored array: kind and size.
CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", OBJECTS)
# A file is refused if loading it takes longer than LOAD_S plus its size / LOAD_BYTES_PER_S. The
# time for nested pairs doubles with each level.
LOAD_S = 60.0
LOAD_BYTES_PER_S = 10e6


class Refused(Exception):
    """The error for a pickle with anything but dicts, lists, numbers or arrays of numbers."""


class StoredType:
    """Stand-in for numpy.dtype. Raises Refused unless the type is one of CODES."""

    def __init__(self, code: str, *flags: object):
        if code not in CODES:
            raise Refused(f"an array of {code!r}")
        self.code = code
        self.order = "|"

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]
        if self.order not in ("<", ">", "|"):
            raise Refused(f"a byte order {self.order!r}")

    def numbers(self, data: object) -> np.ndarray:
        """Return a flat array of the numbers in `data`, which must be bytes."""
        if self.code == OBJECTS or not isinstance(data, bytes):
            raise Refused(f"an array of {self.code} from a {type(data).__name__}")
        return np.frombuffer(data, self.order + self.code)


class StoredArray:
    """Stand-in for numpy.ndarray. `values`: list of the objects, or array of the numbers."""

    values: list | np.ndarray

    def __init__(self, *arguments: object):
        pass  # the content follows as the state

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        if dtype.code == OBJECTS and isinstance(data, list) and shape == (len(data),):
            self.values = data
        else:
            self.values = dtype.numbers(data).reshape(shape, order="F" if fortran else "C")


def stored_number(dtype: StoredType, data: bytes) -> bool | int | float:
    """Stand-in for numpy's `scalar`: return the number in `data`."""
    return dtype.numbers(data)[0].item()


ALLOWED: dict[tuple[str, str], Callable] = {
    ("numpy", "dtype"): StoredType,
    ("numpy", "ndarray"): StoredArray,
    ("numpy.core.multiarray", "_reconstruct"): StoredArray,  # numpy 1
    ("numpy.core.multiarray", "scalar"): stored_number,
    ("numpy._core.multiarray", "_reconstruct"): StoredArray,  # numpy 2
    ("numpy._core.multiarray", "scalar"): stored_number,
}


class _Unpickler(pickle.Unpickler):
    """Unpickler with a restricted `find_class`, the only way for a pickle to reach code."""

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in ALLOWED:
            raise Refused(f"{module}.{name}")
        return ALLOWED[module, name]


def read_packed(path: Path) -> list[dict[str, Any]]:
    """Return the dicts of a packed file. Raises DataError, and executes nothing."""
    if not path.exists():
        raise DataError(f"{path}: no such file", "--npy-dir should hold it", "check the path")
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file",
            "a pipe or a device may never end",
            "name AMD's train.npy or validation.npy",
        )
    try:
        _require_loadable(path)
        dtype, rows = _load(path)
    except Refused as error:
        raise DataError(
            f"{path}: its pickle contains {error}: refused, nothing was executed",
            "a packed file needs only dicts, lists and numbers",
            "do not trust the source of this file",
        ) from None
    except Interrupted:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(
            f"{path}: not a packed array: {type(error).__name__}: {error}",
            "the file is incomplete, damaged or in another format",
            "check the path, or fetch it again",
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{path}: expected an array of dicts, got an array of {dtype}",
            "it is not a packed GovReport",
            "check that it is AMD's train.npy or validation.npy",
        )
    return rows


def _load(path: Path) -> tuple[np.dtype, Any]:
    """Return the type of the array in a file, and its values if they are objects.

    The pickle follows the header, a Python literal.
    """
    with path.open("rb") as file:
        read_header = npy.read_array_header_2_0
        if npy.read_magic(file) == (1, 0):
            read_header = npy.read_array_header_1_0
        _, _, dtype = read_header(file)
        content = _Unpickler(file).load() if dtype == np.dtype("O") else None
    return dtype, content.values if isinstance(content, StoredArray) else content


def _require_loadable(path: Path) -> None:
    """Raise Refused if the pickle cannot be loaded in time.

    Another process tries it, because hashing nested pairs cannot be interrupted.
    """

    def try_it() -> None:
        with contextlib.suppress(Exception):  # the caller meets it again, and reports it
            _load(path)

    limit_s = LOAD_S + path.stat().st_size / LOAD_BYTES_PER_S
    process = multiprocessing.get_context("fork").Process(target=try_it, daemon=True)
    process.start()
    raise_if_interrupted()  # Python drops what a signal handler raises in the hooks of a fork
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise Refused(f"data that cannot be read in {limit_s:.0f} s")
    if process.exitcode != 0:
        raise Refused("data that ends a process")


def as_row(packed: dict[str, Any], where: str, sequence_length: int) -> np.ndarray:
    """Convert one dict to int32 [2, sequence]: ids, and labels with -100 where loss_mask is 0.

    `where`: file and row, for errors.

    Raises DataError.
    """
    parts = []
    for key in ("input_ids", "loss_mask"):
        row = _numbers(packed.get(key))
        if (
            row.shape != (sequence_length,)
            or row.dtype.kind not in "iufb"
            or not np.array_equal(row, row.astype(np.int32))
        ):
            raise DataError(
                f"{where}: {key} is not a list of {sequence_length} integers",
                "it is not a packed GovReport, or it is damaged",
                "fetch it again",
            )
        parts.append(row.astype(np.int32))
    ids, mask = parts
    if not np.isin(mask, (0, 1)).all():
        raise DataError(
            f"{where}: loss_mask has the values {np.unique(mask)[:4].tolist()}",
            "each must be 0 or 1",
            "fetch it again",
        )
    return np.stack((ids, np.where(mask == 1, ids, IGNORE_INDEX)))


def _numbers(value: object) -> np.ndarray:
    """Return the array or list of numbers `value` as an array; an empty one for anything else.

    Lists in a list are not followed: a few that share each other expand to any number of values.
    """
    if isinstance(value, StoredArray):
        value = value.values
    is_flat = isinstance(value, list) and all(type(item) in (bool, int, float) for item in value)
    return np.asarray(value) if is_flat or isinstance(value, np.ndarray) else np.empty(0)


def convert_npy(npy_dir: Path, data_dir: Path, rules: Rules) -> None:
    """Write AMD's train.npy and validation.npy as MLCommons' parquet files.

    Raises DataError, and StorageError if such files exist.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    # Both are converted before one is written: half of a data set would block the next try.
    converted = {}
    for split, name in DATA_FILES.items():
        if (data_dir / name).exists():
            raise StorageError(
                f"{data_dir / name}: exists already",
                "nothing is overwritten",
                "choose another --data-dir",
            )
        source = npy_dir / f"{split}.npy"
        converted[split] = np.array(
            [
                as_row(packed, f"{source}: row {i}", rules.sequence_length)
                for i, packed in enumerate(read_packed(source))
            ]
        )
        check_rows(converted[split], split, rules, str(source))
    for split, rows in converted.items():
        write_rows(data_dir, split, rows)
