"""Files of GEMM tuning as torch's TunableOp writes and reads them: recorded GEMMs, and the solution chosen for each.

Recorded: `OP,PARAMETERS` a line. Tuned: first `Validator,NAME,VERSION` lines, then `OP,PARAMETERS,SOLUTION[,MILLISECONDS]`. A solution is
an index into the lists of one version of hipBLASLt or rocBLAS, so a file is worth nothing with another version: TunableOp then
ignores it with a warning among many. We refuse it. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, StorageError

Key = tuple[str, str]  # operation with its types and layouts, and parameters with its sizes


@dataclass(frozen=True)
class Tuned:
    validators: dict[str, str]
    solutions: dict[Key, tuple[str, str]]  # solution, and its milliseconds as text, "" if not given


def read_tuned(path: Path) -> Tuned:
    """Raises ConfigError for a missing file, one without validators or solutions, and lines that TunableOp would skip in silence."""
    validators: dict[str, str] = {}
    solutions: dict[Key, tuple[str, str]] = {}
    for number, line in enumerate(_lines(path), start=1):
        parts = line.split(",")
        if parts[0] == "Validator" and len(parts) == 3:
            validators[parts[1]] = parts[2]
        elif _is_gemm(parts) and len(parts) >= 3:
            solutions[parts[0], parts[1]] = (parts[2], parts[3] if len(parts) > 3 else "")
        else:
            raise ConfigError(
                f"{path} line {number} is no line of a tuned file", f"it says: {line[:80]}", "tune again, see docs/gemm_tuning.md"
            )
    if not validators or not solutions:
        lacks = "versions that it was tuned with" if not validators else "solutions"
        raise ConfigError(f"{path} has no {lacks}", "it was cut off, or is not a tuned file", "tune again, see docs/gemm_tuning.md")
    return Tuned(validators, solutions)


def write_tuned(path: Path, tuned: Tuned) -> None:
    """All of it or nothing, in an order that makes two files comparable. Raises StorageError."""
    lines = [f"Validator,{name},{version}" for name, version in sorted(tuned.validators.items())]
    lines += [",".join((*key, *filter(None, value))) for key, value in sorted(tuned.solutions.items())]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("\n".join(lines) + "\n")
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"{path}: cannot write: {error.strerror}", "the disk is full or not ours", "name another file with --out"
        ) from None


def read_recorded(folder: Path) -> list[Key]:
    """The GEMMs of all recorded files in `folder`, each once, in a fixed order. Raises ConfigError if there are none."""
    found: set[Key] = set()
    for path in sorted(folder.glob("untuned*.csv")):
        for line in _lines(path):
            parts = line.split(",")
            if _is_gemm(parts):
                found.add((parts[0], parts[1]))
    if not found:
        raise ConfigError(
            f"{folder}: no recorded GEMMs", "there is no untuned*.csv with a GEMM in it", "record first: gemms record --out DIR"
        )
    return sorted(found)


def require_same_versions(tuned: Tuned, here: dict[str, str], path: Path) -> None:
    """Raises ConfigError that names every version which differs."""
    names = sorted(tuned.validators.keys() | here.keys())
    differ = [
        f"{name} was {tuned.validators.get(name, 'not there')} and is {here.get(name, 'not there')}"
        for name in names
        if tuned.validators.get(name) != here.get(name)
    ]
    if differ:
        raise ConfigError(
            f"{path} was tuned with other versions: {'; '.join(differ)}",
            "its solutions are numbers in the lists of those libraries, and would be ignored or be other kernels",
            'tune again with what is here (docs/gemm_tuning.md), use the old container, or set gemm_tuning_file = ""',
        )


def _is_gemm(parts: list[str]) -> bool:
    return len(parts) >= 2 and parts[0].startswith(("Gemm", "ScaledGemm"))


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read", str(error), "name a file that gemms tune has written") from None
