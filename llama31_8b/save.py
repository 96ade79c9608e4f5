"""`--save`: after the clock, the trained model as a Hugging Face checkpoint in `model/` of the run's directory.

Written are the module's parameters, which every rank has whole: the weights that the last evaluation computed with, bf16 on a GPU,
fp32 on a CPU. The fp32 masters, of which each rank has a part, are not saved. Only rank 0 writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError, StorageError
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.llama import Llama

FOLDER, PARTIAL = "model", "model.partial"  # a folder gets the first name when it is complete
FILE_BYTES = 4_000_000_000  # a file ends with the tensor that reaches its share: 5.05 GB at most, with the embedding of the 8B


def require_absent(run_dir: Path) -> None:
    """Raises ConfigError if there is something where the model is going to be."""
    for folder in (run_dir / FOLDER, run_dir / PARTIAL):
        if folder.exists():
            raise ConfigError(
                f"{folder} exists",
                "a saved model is never overwritten",
                "name a new run directory, or remove this one",
            )


def save_model(model: Llama, run_dir: Path, on_tensor: Callable[[], object]) -> Path:
    """Write the model; returns its folder. `on_tensor` is called before each tensor. Raises StorageError; no part of the model is left then."""
    partial, total = run_dir / PARTIAL, sum(parameter.nbytes for parameter in model.parameters())
    try:
        write_checkpoint(
            model, partial, files=-(-total // FILE_BYTES), layout=ORDINARY, on_tensor=on_tensor
        )
        return partial.rename(run_dir / FOLDER)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            what = f"the trained model was not saved in {run_dir / FOLDER}: {error.strerror}"
            raise StorageError(
                what,
                f"it needs {total / 1e9:.1f} GB; the disk is full or read-only",
                "free space before the next run",
            ) from error
        raise
