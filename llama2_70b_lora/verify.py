"""Check rows of GovReport, converted data and base weights against the rules. torch is imported for the weights only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from common.data.manifest import FileFacts, Manifest, facts_of, sha256_of
from common.data.preparation import Bar, say
from common.errors import DataError, RunError
from llama2_70b_lora.data import DTYPE, IGNORE_INDEX, SIDECAR, GovReport, all_masked, check_tokens, tokens_path
from llama2_70b_lora.rules import Rules

SPLITS = ("train", "validation")
NAMED_ROWS = 8  # row numbers in an error message
OWN_FILES = "use MLCommons' own files"

RowSource = Iterable[tuple[str, np.ndarray]]  # (name of a row for messages, integers [2, sequence]: ids and unshifted labels)


def checked_rows(rows: RowSource, split: str, expected: int, rules: Rules, seen: dict[bytes, str]) -> Iterator[np.ndarray]:
    """The rows of a split, each after its check. Raises DataError.

    Checked: length, ids, labels (the id at the same position, or -100), that the sequence is in no other split, according to `seen`, which
    is filled; and at the end that every row has a label that counts, and that there are `expected` rows.
    """
    masked: list[str] = []
    count, bar = 0, Bar(f"checking {split}", expected, "sequences")
    for name, row in rows:
        _check_row(row, name, rules)
        other = seen.setdefault(hashlib.sha256(row[0].astype(DTYPE).tobytes()).digest(), split)
        if other != split:
            why = "the validation loss would measure memorization; one file may be a copy of the other"
            raise DataError(f"{name}: the same sequence is in {other}", why, OWN_FILES)
        if all_masked(row):
            masked.append(name)
        yield row
        count += 1
        bar.at(count)
    bar.finish()
    if masked:
        more = f" and {len(masked) - NAMED_ROWS} more" if len(masked) > NAMED_ROWS else ""
        what = f"all labels are masked in {len(masked)} {split} sequences: {'; '.join(masked[:NAMED_ROWS])}{more}"
        raise DataError(what, "the mean loss of such a sequence is 0/0", f"{OWN_FILES}: they have no such sequence")
    if count != expected:
        raise DataError(f"{split}: expected {expected} sequences, got {count}", "the file is incomplete, or not the benchmark's", OWN_FILES)


def _check_row(row: np.ndarray, name: str, rules: Rules) -> None:
    ids, labels = row
    if len(ids) != rules.sequence_length:
        what = f"{name}: expected {rules.sequence_length} tokens, got {len(ids)}"
        raise DataError(what, "all sequences of the benchmark have this length", OWN_FILES)
    check_tokens(row, rules.shape.vocab_size, name)
    wrong = (labels != IGNORE_INDEX) & (labels != ids)
    if wrong.any():
        at = int(wrong.argmax())
        what = f"{name}: position {at}: expected the label {ids[at]} or {IGNORE_INDEX}, got {labels[at]}"
        raise DataError(what, "labels must not be shifted: each is the token at its own position", OWN_FILES)


def verify(data_dir: Path, weights: Path | None, manifest: Path | None, full: bool, rules: Rules) -> None:
    """Check converted data, and weights where given. Raises the first DataError or WeightsError after all checks have run.

    Data: counts, sizes, SHA-256, every id and label, and that no sequence is in both splits. Weights: names, shapes, dtypes and file sizes
    by their headers; with a manifest its sizes too, and with `full` the SHA-256 of every file.
    """
    failures: list[RunError] = []
    checks = [lambda: verify_data(data_dir, rules)]
    if weights is not None:
        checks.append(lambda: verify_weights(weights, manifest, full, rules))
    for check in checks:
        try:
            check()
        except RunError as error:
            say(f"BAD  {error.what}")
            failures.append(error)
    if failures:
        raise failures[0]
    say("everything checked is correct")


def verify_data(data_dir: Path, rules: Rules) -> None:
    found = GovReport.read(data_dir)
    found.check(rules.sequence_length, rules.shape.vocab_size, rules.train_samples, rules.eval_samples)
    seen: dict[bytes, str] = {}
    for split in SPLITS:
        path = tokens_path(data_dir, split)
        with found.open_rows(split) as rows:
            named = ((f"{path}: row {i}", rows.stored(i)) for i in range(len(rows)))
            for _ in checked_rows(named, split, len(rows), rules, seen):
                pass
        if (digest := sha256_of(path)) != getattr(found, split).sha256:
            what = f"{path}: SHA-256: expected {getattr(found, split).sha256}, got {digest}"
            raise DataError(what, f"the file differs from the one in {SIDECAR}", "convert the data again")
    say(f"{data_dir}: {found.train.rows} and {found.validation.rows} sequences of {found.sequence_length}, all ids and labels checked")


def verify_weights(weights: Path, manifest_path: Path | None, full: bool, rules: Rules) -> None:
    import torch

    from common.model.checkpoint_reader import check_hashes, check_sizes, open_checkpoint

    checkpoint = open_checkpoint(weights, rules.shape)
    total = sum(stored.bytes for stored in checkpoint.tensors.values())
    say(f"{weights}: {checkpoint.layout} layout, {len(checkpoint.tensors)} tensors, {total:,} bytes in {len(checkpoint.files)} files")
    if manifest_path is None:
        say("not checked: SHA-256 of the weights, for which --manifest is needed: a changed byte would not be found")
    elif full:
        check_hashes(checkpoint, manifest_path, torch.device("cpu"))
    else:
        check_sizes(checkpoint, manifest_path)
        say("not checked: SHA-256 of the weights, for which --full is needed")


def write_manifest(weights: Path, output: Path, rules: Rules) -> None:
    """Write sizes and SHA-256 of a checkpoint's files to `output`, for later checks: of a download that you trust."""
    from common.model.checkpoint_reader import open_checkpoint

    checkpoint = open_checkpoint(weights, rules.shape)
    bar, done = Bar("sha256", sum(path.stat().st_size for path in checkpoint.files)), 0
    files: dict[str, FileFacts] = {}
    for path in checkpoint.files:
        files[path.name] = facts_of(path)
        done += path.stat().st_size
        bar.at(done)
    bar.finish()
    Manifest("base weights as found in a copy", rules.shape.vocab_size, files).write(output)
    say(f"wrote {output}: sizes and SHA-256 of {len(files)} files")
