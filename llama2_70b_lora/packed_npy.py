"""AMD's and NVIDIA's packed GovReport: a `.npy` file that is a pickle, read without letting it execute anything.

The file holds an array of Python objects, one dict per sequence: input_ids, loss_mask (0 or 1), seq_start_id. numpy stores object
arrays as a pickle, and a pickle may call any function that it names (CVE-2019-6446). Here it may name four things only, what
numpy's own arrays need, and gets harmless stand-ins of ours for them: they note shape, dtype and bytes, and build the array
through `numpy.frombuffer` from a table of number types. Not even numpy's own unpickling code sees the file.

Only `prepare convert-npy` imports this, to turn such a file into flat int32 once; nothing at run time reads a pickle.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.errors import DataError

NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
OBJECT = "O8"
NUMPY_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray"}  # numpy 1 and 2


class Refused(Exception):
    """The pickle wants something that is no dict, list, number or array of numbers."""


class _Dtype:
    """Stands for numpy.dtype: keeps the type's code; the byte order comes with the state."""

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
    """Stands for numpy.ndarray: an empty one is made first and then gets its state."""

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
    """Stands for numpy's function of this name, which every pickled array calls first."""
    if kind is not _NDARRAY:
        raise Refused("an array of a class of its own")
    return _Array()


def _scalar(dtype: object, data: object) -> int | float:
    """Stands for numpy's function of this name: one number."""
    if not isinstance(dtype, _Dtype) or dtype.code == OBJECT or not isinstance(data, bytes) or len(data) != dtype.numpy().itemsize:
        raise Refused("a number in an unknown form")
    return np.frombuffer(data, dtype.numpy())[0].item()


_NDARRAY = object()


class _Unpickler(pickle.Unpickler):
    """`find_class` is the only way from a pickle to code: it leads to the stand-ins above, or nowhere."""

    def find_class(self, module: str, name: str) -> Any:
        stand_ins: dict[str, Any] = {}
        if module == "numpy":
            stand_ins = {"dtype": _Dtype, "ndarray": _NDARRAY}
        elif module in NUMPY_MODULES:
            stand_ins = {"_reconstruct": _reconstruct, "scalar": _scalar}
        if name not in stand_ins:
            raise Refused(f"{module}.{name}")
        return stand_ins[name]


def read_packed(path: Path) -> list[dict[str, Any]]:
    """The dicts of a packed file; their values are numbers, lists and arrays. Raises DataError, and executes nothing."""
    try:
        with path.open("rb") as file:
            _skip_header(file, path)
            content = _Unpickler(file).load()
    except Refused as error:
        what = f"{path}: its pickle asks for {error}: refused, nothing was executed"
        raise DataError(what, "a packed file needs dicts, lists and numbers only", "do not trust the place it came from") from None
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", "it was named for conversion", "check the name") from error
    except Exception as error:  # a damaged pickle can fail in any way
        what = f"{path}: not a packed array: {type(error).__name__}: {error}"
        raise DataError(what, "the file is cut off, damaged or of another kind", "fetch it again") from error
    rows = content.value if isinstance(content, _Array) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected an array of dicts, got something else", "it is no packed GovReport", "check the name")
    return rows


def _skip_header(file: IO[bytes], path: Path) -> None:
    """Past numpy's header: magic, version, length, and a literal that is searched for the object dtype but not evaluated."""
    magic, version = file.read(6), file.read(2)
    layouts: dict[bytes, Callable[[], int]] = {
        b"\x01\x00": lambda: struct.unpack("<H", file.read(2))[0],
        b"\x02\x00": lambda: struct.unpack("<I", file.read(4))[0],
        b"\x03\x00": lambda: struct.unpack("<I", file.read(4))[0],
    }
    if magic != b"\x93NUMPY" or version not in layouts:
        raise DataError(f"{path}: no .npy file: it begins with {magic + version!r}", "it is of another kind", "check the name")
    header = file.read(layouts[version]())
    if b"'|O'" not in header:
        what = f"{path}: its header says {header[:80]!r}"
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
