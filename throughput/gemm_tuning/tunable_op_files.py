"""Files of TunableOp: recorded GEMMs, and the tuned solution of each GEMM.

A line of a recorded file is `OP,PARAMETERS`. A tuned file has lines `Validator,NAME,VERSION`, then
lines `OP,PARAMETERS,SOLUTION[,MILLISECONDS]`. A solution is an index into a list of one version of
hipBLASLt or rocBLAS, so the file is valid only for the library versions that it names. Standard
library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError, write_text

PREFIX = "PYTORCH_TUNABLEOP_"
TUNE_AGAIN = "tune again, see docs/gemm_tuning.md"
Key = tuple[str, str]  # operation with dtypes and layouts, parameters with sizes and strides


def per_gpu(name: str | Path, gpus: int) -> list[Path]:
    """Return the paths of the files that torch reads for the file name `name`, one for each GPU.

    The GPU's index replaces %d, or is inserted before the last dot.
    """
    pattern = str(name) if "%d" in str(name) else "%d".join(os.path.splitext(name))
    return [Path(pattern.replace("%d", str(gpu), 1)) for gpu in range(gpus)]


def configured(env: Mapping[str, str], gpus: int) -> list[Path]:
    """Return the tuned files that a config's [env] names, one per GPU, or [] without TunableOp.

    Raises ConfigError if [env] enables TunableOp but names no file, or if the run itself would
    tune.
    """
    if env.get(PREFIX + "ENABLED") != "1":
        return []
    if env.get(PREFIX + "TUNING") != "0" or not env.get(PREFIX + "FILENAME"):
        do = f'set {PREFIX}TUNING = "0" and {PREFIX}FILENAME, see docs/gemm_tuning.md'
        raise ConfigError(
            "the config's [env] enables TunableOp, but names no file or tunes",
            "tuning would run inside the timed run",
            do,
        )
    return per_gpu(env[PREFIX + "FILENAME"], gpus)


def read_tuned(path: Path, here: Mapping[str, str]) -> dict[Key, str]:
    """Return the solutions in the tuned file at `path`.

    `here`: versions of this machine's libraries. Raises ConfigError if the file is missing, was
    tuned with other versions, lacks solutions, or has a line that torch would skip without an
    error.
    """
    versions: dict[str, str] = {}
    solutions: dict[Key, str] = {}
    for number, parts in enumerate(_rows(path), start=1):
        if parts[0] == "Validator" and len(parts) == 3:
            versions[parts[1]] = parts[2]
        elif _is_gemm(parts) and len(parts) >= 3:
            solutions[parts[0], parts[1]] = ",".join(parts[2:])
        else:
            raise ConfigError(
                f"{path} line {number} is invalid", f"it reads: {','.join(parts)[:80]}", TUNE_AGAIN
            )
    if not versions or not solutions:
        missing = "library versions" if not versions else "solutions"
        raise ConfigError(
            f"{path} has no {missing}", "it is truncated or not a tuned file", TUNE_AGAIN
        )
    _require_same_versions(path, versions, here)
    return solutions


def _require_same_versions(path: Path, tuned: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise ConfigError if a library's version differs. The error names all of them."""
    differences = [
        f"{name} was {tuned.get(name, 'absent')}, is {here.get(name, 'absent')}"
        for name in sorted(tuned.keys() | here.keys())
        if tuned.get(name) != here.get(name)
    ]
    if differences:
        raise ConfigError(
            f"{path} was tuned with other versions: {'; '.join(differences)}",
            "its solutions are indices into lists of those versions; "
            "torch ignores such a file with only a warning",
            "tune again (docs/gemm_tuning.md), use the old container, "
            f"or remove {PREFIX}* from the config's [env]",
        )


def write_tuned(path: Path, versions: Mapping[str, str], solutions: Mapping[Key, str]) -> None:
    """Write a tuned file atomically. Raises StorageError."""
    lines = [f"Validator,{name},{version}" for name, version in sorted(versions.items())]
    lines += [",".join((*key, solution)) for key, solution in sorted(solutions.items())]
    write_text(path, "\n".join(lines) + "\n")


def recorded_files(folder: Path) -> list[Path]:
    """Return the files in which TunableOp recorded GEMMs, one for each rank."""
    return sorted(folder.glob("untuned*.csv"))


def read_recorded(folder: Path) -> list[Key]:
    """Return the distinct GEMMs of all recorded files in `folder`, sorted.

    Raises ConfigError if there are none.
    """
    recorded: set[Key] = set()
    for path in recorded_files(folder):
        recorded |= {(row[0], row[1]) for row in _rows(path) if _is_gemm(row)}
    if not recorded:
        raise ConfigError(
            f"{folder}: no recorded GEMMs",
            "it has no untuned*.csv that contains a GEMM",
            "run `gemms record` first",
        )
    return sorted(recorded)


def _is_gemm(parts: list[str]) -> bool:
    return len(parts) >= 2 and parts[0].startswith(("Gemm", "ScaledGemm"))


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split(",") for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot read the tuned file",
            getattr(error, "strerror", None) or str(error),
            "name the file as in `gemms tune --out`, which writes one for each GPU: MI300X0.csv "
            "to MI300X7.csv for MI300X.csv",
        ) from error
