"""Save the trained model of a run as a Hugging Face checkpoint, after run_stop (`--save`).

The checkpoint is the folder `model/` in the run directory. It holds the parameters of the module,
which every rank has whole, in the precision of the run, as in the last evaluation. The sharded fp32
masters are not saved. Only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from common.atomic_write import new_folder
from common.errors import StorageError
from common.model.checkpoint_names import MODEL_FOLDER, ORDINARY
from common.model.checkpoint_writer import require_new, write_checkpoint
from common.model.llama import Llama
from common.terminal import data_size

# Bytes per file. Files end with a whole tensor, so a file of the 8B may reach 5.05 GB.
FILE_BYTES = 4_000_000_000


def require_absent(run_dir: Path) -> None:
    """Raise ConfigError if the run directory already has a saved model."""
    require_new(run_dir / MODEL_FOLDER)


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
    folder = run_dir / MODEL_FOLDER
    total = sum(parameter.nbytes for parameter in model.parameters())
    try:
        with new_folder(folder) as new:
            write_checkpoint(
                model,
                new,
                files=-(-total // FILE_BYTES),
                layout=ORDINARY,
                entries=entries,
                on_tensor=on_tensor,
            )
    except OSError as error:
        raise StorageError(
            f"the trained model was not saved in {folder}: {error.strerror or error}",
            f"it needs {data_size(total)} of free space on a writable disk",
            "free space, or check the disk, before the next run",
        ) from error
    return folder
