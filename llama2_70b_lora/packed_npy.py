"""Read AMD's and NVIDIA's packed GovReport, whose `.npy` files are pickles, without executing them.

A file is an array of Python objects, one dict per sequence: input_ids, loss_mask (0 or 1),
seq_start_id. numpy stores object arrays as a pickle, and a pickle can call any function by name
(CVE-2019-6446). This reader accepts only the four names that numpy's arrays need. It replaces each
with `Stored`, which keeps arguments and state as plain data. Numbers come from `numpy.frombuffer`
with a type of NUMBERS, so numpy's own unpickling code never reads the file. Only `prepare
convert-npy` uses this reader. A run reads no pickle.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from common.errors import DataError, StorageError
from llama2_70b_lora.data import IGNORE_INDEX, check_rows, write_rows
from llama2_70b_lora.rules import DATA_FILES, Rules

# Types of numbers: byte order, then kind and size.
CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
NUMBERS = {order + code for order in "<>|" for code in CODES}
# (module, name) that a pickle may contain.
ALLOWED = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),  # numpy 2
    ("numpy._core.multiarray", "scalar"),
}
ROW_LIMIT = 1_000_000  # limit of values in one row; three lists of 8,192 numbers need fewer
# A file is refused if loading it takes longer than LOAD_S plus its size / LOAD_BYTES_PER_S. The
# time for nested pairs doubles with each level.
LOAD_S = 60.0
LOAD_BYTES_PER_S = 10e6


class Refused(Exception):
    """The error for a pickle with anything but dicts, lists, numbers or arrays of numbers."""


class Stored:
    """Stand-in for every name in the pickle. It keeps call arguments and state as data."""

    state: Any = None

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler with a restricted `find_class`, the only way for a pickle to reach code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise Refused(f"{module}.{name}")
        return Stored


def _numbers(dtype: Any, data: Any) -> np.ndarray:
    """Return a flat array of `data`.

    `dtype`: a Stored numpy.dtype, whose state holds the byte order.

    Raises Refused unless `data` is bytes and the type is in NUMBERS.
    """
    code = (dtype.state[1] if dtype.state else "|") + dtype.arguments[0]
    if code not in NUMBERS or not isinstance(data, bytes):
        raise Refused(f"an array of {code!r}")
    return np.frombuffer(data, code)


class RowConverter:
    """Converter of one row of the pickle to numbers, lists, dicts and numpy arrays."""

    def __init__(self) -> None:
        self.count = 0  # values converted so far

    def convert(self, value: Any) -> Any:
        """Return `value` with pickled arrays in it as lists and flat numpy arrays.

        Raises Refused for anything but numbers, lists and dicts. Also raises Refused for more than
        ROW_LIMIT values, because a few lists that share each other can expand to any number.
        """
        self.count += 1
        if self.count > ROW_LIMIT:
            raise Refused(f"more than {ROW_LIMIT:,} values in a row")
        if isinstance(value, dict):
            return {key: self.convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.convert(item) for item in value]
        if isinstance(value, tuple):
            raise Refused("a tuple")
        if not isinstance(value, Stored):
            return value
        if value.state is None:  # numpy's `scalar`: a dtype and the bytes of one number
            return _numbers(*value.arguments)[0].item()
        _, shape, dtype, fortran, data = value.state
        if dtype.arguments[0] == "O8" and isinstance(data, list) and shape == (len(data),):
            return self.convert(data)
        return _numbers(dtype, data).reshape(shape, order="F" if fortran else "C")


def read_packed(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the dicts of a packed file. Their values are numbers, lists and arrays.

    Raises DataError, and executes nothing.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file", "--npy-dir should hold it", "check the path")
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file",
            "a pipe or a device may never end",
            "name AMD's train.npy or validation.npy",
        )
    try:
        _try_to_load(path)
        with path.open("rb") as file:
            dtype = _dtype_of(file)
            content = _Unpickler(file).load() if dtype == np.dtype("O") else None
        rows = content
        if isinstance(content, Stored) and content.state:
            rows = content.state[4]  # the values of the array
        if not isinstance(rows, list):
            rows = [None]  # refused below
        for row in rows:
            converted = RowConverter().convert(row)
            if not isinstance(converted, dict):
                raise DataError(
                    f"{path}: expected an array of dicts, got an array of {dtype}",
                    "it is not a packed GovReport",
                    "check that it is AMD's train.npy or validation.npy",
                )
            yield converted
    except Refused as error:
        what = f"{path}: its pickle contains {error}: refused, nothing was executed"
        raise DataError(
            what,
            "a packed file needs only dicts, lists and numbers",
            "do not trust the source of this file",
        ) from None
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        what = f"{path}: not a packed array: {type(error).__name__}: {error}"
        raise DataError(
            what,
            "the file is incomplete, damaged or in another format",
            "check the path, or fetch it again",
        ) from error


def _dtype_of(file: BinaryIO) -> np.dtype:
    """Read the header, a Python literal that the pickle follows, and return the array's dtype."""
    read_header = npy.read_array_header_2_0
    if npy.read_magic(file) == (1, 0):
        read_header = npy.read_array_header_1_0
    _, _, dtype = read_header(file)
    return dtype


def _try_to_load(path: Path) -> None:
    """Raise Refused if the pickle cannot be read in time.

    Another process tries it, because hashing nested pairs cannot be interrupted.
    """
    limit_s = LOAD_S + path.stat().st_size / LOAD_BYTES_PER_S
    child = os.fork()
    if child == 0:
        try:
            with path.open("rb") as file:
                if _dtype_of(file) == np.dtype("O"):
                    _Unpickler(file).load()
        finally:
            os._exit(0)  # the parent reports what is wrong with it
    end = time.monotonic() + limit_s
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise Refused(f"data that cannot be read in {limit_s:.0f} s")
        time.sleep(0.01)


def as_row(packed: dict[str, Any], where: str, sequence_length: int) -> np.ndarray:
    """Convert one dict to int32 [2, sequence]: ids, and labels with -100 where loss_mask is 0.

    `where`: file and row, for errors.

    Raises DataError.
    """
    parts = []
    for key in ("input_ids", "loss_mask"):
        try:
            row = np.asarray(packed.get(key))
        except ValueError:  # lists of different lengths
            row = np.array(None)
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
