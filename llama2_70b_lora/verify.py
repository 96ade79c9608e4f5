"""Check GovReport and base weights against the rules. torch is imported only for the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.data.manifest import Manifest, facts_of
from common.data.preparation import require_data_dir, say
from common.errors import DataError, WeightsError
from common.terminal import Progress
from llama2_70b_lora.data import OWN_FILES, read_rows
from llama2_70b_lora.rules import Rules


def verify_data(data_dir: Path, rules: Rules) -> None:
    """Check counts, every id and label, and that no sequence is in both splits.

    Raises DataError.
    """
    require_data_dir(data_dir)
    train = read_rows(data_dir, "train", rules)
    validation = read_rows(data_dir, "validation", rules)
    row_of = {ids.tobytes(): row for row, ids in enumerate(train[:, 0])}
    for row, ids in enumerate(validation[:, 0]):
        same = row_of.get(ids.tobytes())
        if same is not None:
            raise DataError(
                f"{data_dir}: row {row} of the validation data is row {same} of the training data",
                "the validation loss would measure memorization; one file may be a copy",
                OWN_FILES,
            )
    say(
        f"{data_dir}: {len(train)} and {len(validation)} sequences of {rules.sequence_length},"
        " all ids and labels are valid"
    )


@contextmanager
def _weights_help() -> Iterator[None]:
    """Add the command that helps to a WeightsError that is raised inside the block."""
    try:
        yield
    except WeightsError as error:
        error.do += "; see ./run_and_time.sh llama2_70b_lora prepare --help"
        raise


@_weights_help()
def verify_weights(weights: Path, manifest_path: Path | None, full: bool, rules: Rules) -> None:
    """Check names, shapes, dtypes and file sizes by the headers.

    `manifest_path`: check the sizes in this manifest too.
    `full`: also check the SHA-256 of every file, if there is a manifest.

    Raises WeightsError.
    """
    # Imported here, because checks of the data do not need torch.
    import torch

    from common.model.checkpoint_reader import check_hashes, check_sizes, open_checkpoint

    checkpoint = open_checkpoint(weights, rules.shape)
    total = sum(stored.bytes for stored in checkpoint.tensors.values())
    say(
        f"{weights}: {checkpoint.layout} layout, {len(checkpoint.tensors)} tensors,"
        f" {total:,} bytes in {len(checkpoint.files)} files"
    )
    if manifest_path is None:
        say("not checked: SHA-256 of the weights (needs --manifest)")
    elif full:
        check_hashes(checkpoint, manifest_path, torch.device("cpu"))
    else:
        check_sizes(checkpoint, manifest_path)
        say("not checked: SHA-256 of the weights (needs --full)")


@_weights_help()
def write_manifest(weights: Path, output: Path, rules: Rules) -> None:
    """Write sizes and SHA-256 of a checkpoint's files to `output`, for later checks.

    Use it on a download that you trust. Raises WeightsError.
    """
    # Imported here, because checks of the data do not need torch.
    from common.model.checkpoint_reader import open_checkpoint

    checkpoint = open_checkpoint(weights, rules.shape)
    total = sum(path.stat().st_size for path in checkpoint.files)
    files = {}
    with Progress("SHA-256", total, "B") as progress:
        for path in checkpoint.files:
            files[path.name] = facts_of(path, progress.advance)
    Manifest("base weights as found in a copy", rules.shape.vocab_size, files).write(output)
    say(f"wrote {output}: sizes and SHA-256 of {len(files)} files")
