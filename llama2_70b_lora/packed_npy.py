"""AMD's and NVIDIA's packed GovReport: a `.npy` file that is a pickle, read without executing anything in it.

The file is an array of Python objects, one dict per sequence: input_ids, loss_mask (0 or 1), seq_start_id. numpy stores object arrays as a
pickle, and a pickle can call any function by name (CVE-2019-6446). This reader accepts only the four names that numpy's arrays need, and
replaces them with classes and functions of its own: they store shape, dtype and bytes, and build the array with `numpy.frombuffer`
from a list of number types. numpy's own unpickling code never sees the file.

Only `prepare convert-npy` uses it, to convert such a file to flat int32 once; a run reads no pickle.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from common.errors import DataError

NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
OBJECT = "O8"
NUMPY_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray"}  # numpy 1 and 2


class Refused(Exception):
    """The pickle contains something that is no dict, list, number or array of numbers."""


class _Dtype:
    """Replaces numpy.dtype: stores the type's code; the byte order comes with the state."""

    def __init__(self, code: object, *flags: object):
        if not isinstance(code, str) or code not in {*NUMBERS, OBJECT}:
            raise Refused(f"an array of {code!r}")
        self.code, self.order = code, "|"

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "=") or state[2:5] != (None, None, None):
            raise Refused("an array of structured or unknown type")
        self.order = state[1]

    def numpy(self) -> np.dtype:
        return np.dtype(f"{self.order}{self.code}")


class _Array:
    """Replaces numpy.ndarray, which a pickle creates empty and then gives its state."""

    value: Any = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise Refused("an array in an unknown form")
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise Refused("an array in an unknown form")
        count = math.prod(shape)
        if dtype.code == OBJECT:
            if not isinstance(data, list) or len(data) != count or len(shape) != 1:
                raise Refused("an array of objects that is no plain list")
            self.value = data
            return
        numbers = dtype.numpy()
        if not isinstance(data, bytes) or len(data) != count * numbers.itemsize:
            raise Refused("an array whose bytes do not fit its shape")
        self.value = np.frombuffer(data, numbers).reshape(shape, order="F" if fortran else "C")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    """Replaces numpy's function of this name, which every pickled array calls first."""
    if kind is not _NDARRAY:
        raise Refused("an array of another class")
    return _Array()


def _scalar(dtype: object, data: object) -> int | float:
    """Replaces numpy's function of this name: one number."""
    if not isinstance(dtype, _Dtype) or dtype.code == OBJECT or not isinstance(data, bytes) or len(data) != dtype.numpy().itemsize:
        raise Refused("a number in an unknown form")
    return np.frombuffer(data, dtype.numpy())[0].item()


_NDARRAY = object()


class _Unpickler(pickle.Unpickler):
    """A pickle reaches code only through `find_class`, which returns the replacements above or refuses."""

    def find_class(self, module: str, name: str) -> Any:
        replacements: dict[str, Any] = {}
        if module == "numpy":
            replacements = {"dtype": _Dtype, "ndarray": _NDARRAY}
        elif module in NUMPY_MODULES:
            replacements = {"_reconstruct": _reconstruct, "scalar": _scalar}
        if name not in replacements:
            raise Refused(f"{module}.{name}")
        return replacements[name]


def read_packed(path: Path) -> list[dict[str, Any]]:
    """The dicts of a packed file; their values are numbers, lists and arrays. Raises DataError, and executes nothing."""
    try:
        with path.open("rb") as file:
            _skip_header(file, path)
            content = _Unpickler(file).load()
    except Refused as error:
        what = f"{path}: its pickle contains {error}: refused, nothing was executed"
        raise DataError(what, "a packed file needs only dicts, lists and numbers", "do not trust the source of this file") from None
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", "it is to be converted", "check the path") from error
    except Exception as error:  # a damaged pickle can fail in any way
        what = f"{path}: not a packed array: {type(error).__name__}: {error}"
        raise DataError(what, "the file is incomplete, damaged or of another kind", "fetch it again") from error
    rows = content.value if isinstance(content, _Array) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected an array of dicts, got something else", "it is no packed GovReport", "check the path")
    return rows


def _skip_header(file: IO[bytes], path: Path) -> None:
    """Read numpy's header, which is a Python literal and no pickle: the file must be an array of objects."""
    try:
        version = npy.read_magic(file)
        _, _, dtype = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
    except ValueError as error:
        raise DataError(f"{path}: no .npy file: {error}", "it is damaged or of another kind", "check the path") from error
    if dtype != np.dtype("O"):
        what = f"{path}: its header says {dtype}, not objects"
        raise DataError(what, "packed files are arrays of objects", "check that it is AMD's train.npy or validation.npy")


def as_row(packed: dict[str, Any], where: str) -> np.ndarray:
    """One dict -> int64 [2, sequence]: ids, and labels with -100 where loss_mask is 0. Raises DataError."""
    parts = []
    for key in ("input_ids", "loss_mask"):
        value = packed.get(key)
        value = value.value if isinstance(value, _Array) else value
        plain = isinstance(value, np.ndarray) or (isinstance(value, list) and all(isinstance(x, int | float) for x in value))
        row = np.asarray(value) if plain else None
        if row is None or row.ndim != 1 or row.dtype.kind not in "iufb" or not np.array_equal(row, row.astype(np.int64)):
            raise DataError(f"{where}: {key} is no list of whole numbers", "it is no packed GovReport, or damaged", "fetch it again")
        parts.append(row.astype(np.int64))
    ids, mask = parts
    if ids.shape != mask.shape or not np.isin(mask, (0, 1)).all():
        what = f"{where}: {len(ids)} input_ids and {len(mask)} loss_mask, values {np.unique(mask)[:4].tolist()}"
        raise DataError(what, "there must be a 0 or a 1 for each id", "fetch it again")
    return np.stack((ids, np.where(mask == 1, ids, -100)))
