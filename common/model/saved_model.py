"""Save the trained model of a run as a Hugging Face checkpoint, after run_stop (`--save`).

The checkpoint is the folder `model/` in the run directory. It holds the parameters of the module,
which every rank has whole, in the precision of the run, as in the last evaluation. The sharded fp32
masters are not saved. Only rank 0 writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import ConfigError, StorageError
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import rename_complete, write_checkpoint
from common.model.llama import Llama
from common.terminal import data_size

MODEL_FOLDER = "model"
PARTIAL_FOLDER = "model.partial"  # name of the folder until it is complete
# Bytes per file. Files end with a whole tensor, so a file of the 8B may reach 5.05 GB.
FILE_BYTES = 4_000_000_000


def require_absent(run_dir: Path) -> None:
    """Raise ConfigError if the run directory already has a saved model, or a part of one."""
    for folder in (run_dir / MODEL_FOLDER, run_dir / PARTIAL_FOLDER):
        if folder.exists():
            raise ConfigError(
                f"{folder} exists",
                "a saved model is never overwritten",
                "name a new run directory, or remove this one",
            )


def save_model(
    model: Llama,
    run_dir: Path,
    on_tensor: Callable[[], object],
    entries: Mapping[str, object] | None = None,
) -> Path:
    """Write the model and return its folder. `on_tensor`: called before each tensor is written.

    `entries`: see `write_checkpoint`.

    Raises StorageError. After a failure, no part of the model is left.
    """
    partial = run_dir / PARTIAL_FOLDER
    total = sum(parameter.nbytes for parameter in model.parameters())
    try:
        write_checkpoint(
            model,
            partial,
            files=-(-total // FILE_BYTES),
            layout=ORDINARY,
            entries=entries,
            on_tensor=on_tensor,
        )
        rename_complete(partial, run_dir / MODEL_FOLDER)
        return run_dir / MODEL_FOLDER
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(
                f"the trained model was not saved in {run_dir / MODEL_FOLDER}: "
                f"{error.strerror or error}",
                f"it needs {data_size(total)} of free space on a writable disk",
                "free space, or check the disk, before the next run",
            ) from error
        raise
