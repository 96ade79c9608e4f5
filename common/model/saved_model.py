"""`--save`: write the trained model after the clock, as a Hugging Face checkpoint in `model/` of
the run's directory.

The checkpoint holds the module's parameters, which every rank has whole. These are the weights of
the last evaluation, bf16 on a GPU, fp32 on a CPU. The fp32 masters, of which each rank has a part,
are not saved. Only rank 0 writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError, StorageError
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.llama import Llama
from common.terminal import data_size

FOLDER = "model"
PARTIAL = "model.partial"  # name of the folder until it is complete
# A file ends with the tensor that reaches its share: at most 5.05 GB, with the embedding of the 8B.
FILE_BYTES = 4_000_000_000


def require_absent(run_dir: Path) -> None:
    """Raise ConfigError if the folder of the model exists."""
    for folder in (run_dir / FOLDER, run_dir / PARTIAL):
        if folder.exists():
            raise ConfigError(
                f"{folder} exists",
                "a saved model is never overwritten",
                "name a new run directory, or remove this one",
            )


def save_model(model: Llama, run_dir: Path, on_tensor: Callable[[], object]) -> Path:
    """Write the model and return its folder. `on_tensor`: called before each tensor.

    Raises StorageError. After any failure no part of the model is left.
    """
    partial = run_dir / PARTIAL
    total = sum(parameter.nbytes for parameter in model.parameters())
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
                f"it needs {data_size(total)}; the disk is full or read-only",
                "free space before the next run",
            ) from error
        raise
