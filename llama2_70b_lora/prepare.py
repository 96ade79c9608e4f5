"""Data and base of `llama2_70b_lora`: convert MLCommons' files, verify them, say how to get them, build the miniature's.

    python -m llama2_70b_lora.prepare miniature --data-dir D
    python -m llama2_70b_lora.prepare convert --parquet-dir P --data-dir D        MLCommons' parquet files to flat int32
    python -m llama2_70b_lora.prepare convert-npy --npy-dir P --data-dir D        AMD's packed train.npy and validation.npy
    python -m llama2_70b_lora.prepare verify --data-dir D [--weights W [--manifest M.json]] [--full]
    python -m llama2_70b_lora.prepare write-manifest --weights W --output M.json
    python -m llama2_70b_lora.prepare fetch --data-dir D --weights W

Nothing here deletes or overwrites a file that it did not create. Text goes to stderr; the exit code is that of the failure's
family (common/errors.py). torch and pyarrow are imported where they are needed only: converting needs no torch, a run no pyarrow.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.data import corpus
from common.data.manifest import FileFacts, Manifest, facts_of, sha256_of
from common.data.preparation import Bar, Recipe, build_once, locked, manifest_of, require_free_space, run_to_exit_code, say
from common.errors import DataError, RunError, StorageError
from llama2_70b_lora.data import DTYPE, IGNORE_INDEX, SIDECAR, GovReport, Split, all_masked, check_tokens, tokens_path
from llama2_70b_lora.rules import CLOSED, MINIATURE, Rules

SPLITS = ("train", "validation")
LOCK = ".govreport.lock"
BATCH_ROWS = 64  # read from a parquet file at a time: 8 MiB
NAMED_ROWS = 8  # row numbers in an error message

MINIATURE_RECIPE = 1  # raise when texts, packing or the base's training change: existing files are then built again
BASE = "base"
TOKENIZER = "tokenizer.model"
BASE_SHARDS = 3
MANIFEST = "miniature-govreport.json"  # a name of its own: the 8B miniature may live in the same folder
BASE_MANIFEST = "manifest.json"

DATA_REPOSITORY = "regisss/scrolls_gov_report_preprocessed_mlperf_2"
DATA_REVISION = "21ff1233ee3e87bc780ab719c755170148aba1cb"
WEIGHTS_REPOSITORY = "regisss/llama2-70b-fused-qkv-mlperf"
WEIGHTS_REVISION = "647cb0c8858ddefd10231a20ddfa68e4eb5e850e"
DATA_BYTES = 1_000_000_000  # parquet and converted files together, rounded up: 4,074 rows of 64 KiB are 267 MB
WEIGHTS_BYTES = 138_000_000_000  # 68,976,648,192 parameters in bf16

RowSource = Iterable[tuple[str, np.ndarray]]  # (where a row comes from, integers [2, sequence]: ids and labels)


# ---- convert


def convert(parquet_dir: Path, data_dir: Path, rules: Rules = CLOSED) -> None:
    """MLCommons' parquet files to `govreport-*.bin` and `govreport.json` in `data_dir`; see data.py for the format.

    Every row is checked: length, ids, labels (the id at the same position, or -100), and that one of them counts; and the number of
    rows. The sidecar is written last: what a kill leaves behind is made anew by the next call. Raises DataError, StorageError.
    """
    inputs = {split: _find(parquet_dir, rf"{split}-\d+-of-\d+\.parquet", f"{split}-00000-of-00001.parquet") for split in SPLITS}
    _convert_once(data_dir, inputs, parquet_rows, rules)


def convert_npy(npy_dir: Path, data_dir: Path, rules: Rules = CLOSED) -> None:
    """The same from AMD's packed train.npy and validation.npy, which are pickles: read without executing anything in them."""
    inputs = {split: _find(npy_dir, rf"{split}\.npy", f"{split}.npy") for split in SPLITS}
    _convert_once(data_dir, inputs, packed_rows, rules)


def _find(folder: Path, pattern: str, example: str) -> list[Path]:
    """Files in `folder`, or in its `data/` as on the Hugging Face hub."""
    for place in (folder, folder / "data"):
        if found := sorted(path for path in place.glob("*") if re.fullmatch(pattern, path.name)):
            return found
    raise DataError(f"{folder}: there is no {example}", "the folder holds other files, or none", "check the name, or see prepare fetch")


def _convert_once(data_dir: Path, inputs: dict[str, list[Path]], read: Callable[[list[Path]], RowSource], rules: Rules) -> None:
    files = [file for split in SPLITS for file in inputs[split]]
    source = "; ".join(f"{file.name} sha256 {sha256_of(file)}" for file in files)
    with locked(data_dir / LOCK):
        if (data_dir / SIDECAR).exists():
            if GovReport.read(data_dir).source == source:
                verify_data(data_dir, rules)
                say(f"{data_dir}: was complete already")
                return
            why = "it was converted from other files, and nothing is overwritten"
            raise StorageError(f"{data_dir / SIDECAR}: exists already", why, "choose another --data-dir, or remove it yourself")
        write_rows(data_dir, source, {split: read(inputs[split]) for split in SPLITS}, rules)


def write_rows(data_dir: Path, source: str, rows: dict[str, RowSource], rules: Rules) -> GovReport:
    """Check and write both splits, under temporary names first, and the sidecar last."""
    expected = {"train": rules.train_samples, "validation": rules.eval_samples}
    partials = {split: tokens_path(data_dir, split).with_name(tokens_path(data_dir, split).name + ".partial") for split in SPLITS}
    seen: dict[bytes, str] = {}
    for split in SPLITS:
        _write_split(partials[split], rows[split], expected[split], split, rules, seen)
    (data_dir / SIDECAR).unlink(missing_ok=True)  # of an earlier miniature: it must not describe the new files
    for split in SPLITS:
        partials[split].replace(tokens_path(data_dir, split))
    splits = {split: Split(expected[split], sha256_of(tokens_path(data_dir, split))) for split in SPLITS}
    written = GovReport(data_dir, source, rules.sequence_length, rules.shape.vocab_size, splits["train"], splits["validation"])
    written.write()
    say(f"{data_dir}: {rules.train_samples} and {rules.eval_samples} sequences of {rules.sequence_length} to train and to validate")
    return written


def _write_split(path: Path, rows: RowSource, expected: int, split: str, rules: Rules, seen: dict[bytes, str]) -> None:
    masked: list[str] = []
    count, bar = 0, Bar(f"converting {split}", expected, "sequences")
    with path.open("wb") as file:
        for where, row in rows:
            _check_stored(row, where, rules)
            _check_apart(row, split, where, seen)
            if all_masked(row):
                masked.append(where)
            file.write(row.astype(DTYPE).tobytes())
            count += 1
            bar.at(count)
        file.flush()
        os.fsync(file.fileno())
    bar.finish()
    if masked:
        more = f" and {len(masked) - NAMED_ROWS} more" if len(masked) > NAMED_ROWS else ""
        what = f"all labels are masked in {len(masked)} {split} sequences: {'; '.join(masked[:NAMED_ROWS])}{more}"
        raise DataError(what, "the mean loss of such a sequence is 0/0", "take MLCommons' own files: there is none like it")
    if count != expected:
        what = f"{split}: expected {expected} sequences, got {count}"
        raise DataError(what, "the file is not the benchmark's, or not whole", "take MLCommons' own files")


def _check_stored(row: np.ndarray, where: str, rules: Rules) -> None:
    """That a row, integers of any width, is as long as the rules say, holds tokens, and labels that are not yet shifted."""
    ids, labels = row
    if len(ids) != rules.sequence_length:
        what = f"{where}: expected {rules.sequence_length} tokens, got {len(ids)}"
        raise DataError(what, "the benchmark's sequences are all of one length", "take MLCommons' own files")
    check_tokens(row, rules.shape.vocab_size, where)
    wrong = (labels != IGNORE_INDEX) & (labels != ids)
    if wrong.any():
        at = int(wrong.argmax())
        what = f"{where}: position {at}: expected the label {ids[at]} or {IGNORE_INDEX}, got {labels[at]}"
        raise DataError(what, "a label is the token at its own position: the model's loss shifts them", "take MLCommons' own files")


def _check_apart(row: np.ndarray, split: str, where: str, seen: dict[bytes, str]) -> None:
    """That a sequence is not in the other split as well; `seen` is filled."""
    other = seen.setdefault(hashlib.sha256(row[0].astype(DTYPE).tobytes()).digest(), split)
    if other != split:
        why = "validation would measure what was learned by heart; perhaps one file was copied over the other"
        raise DataError(f"{where}: the same sequence is in {other}", why, "take MLCommons' own files")


# ---- sources of rows


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:  # damage inside comes as either
        what = f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}"
        raise DataError(what, "the file is cut off or damaged", "fetch it again") from error


def parquet_rows(paths: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """int64 [2, sequence] of every row, in order. Raises DataError, also for rows of a list with holes or of unequal lengths."""
    from pyarrow import parquet

    for path in paths:
        with _parquet_errors(path), parquet.ParquetFile(path) as file:
            if missing := {"input_ids", "labels"} - set(file.schema_arrow.names):
                what = f"{path}: there is no column {' and no '.join(sorted(missing))}"
                raise DataError(what, "it is not the tokenized GovReport", "check the name")
            first = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=["input_ids", "labels"]):
                ids, labels = (_lists(batch.column(name), path, name) for name in ("input_ids", "labels"))
                for i, (row_ids, row_labels) in enumerate(zip(ids, labels, strict=True)):
                    where = f"{path}: row {first + i}"
                    if len(row_ids) != len(row_labels):
                        what = f"{where}: {len(row_ids)} input_ids and {len(row_labels)} labels"
                        raise DataError(what, "there must be one for each", "fetch it again")
                    yield where, np.stack((row_ids, row_labels))
                first += batch.num_rows


def _lists(column, path: Path, name: str) -> list[np.ndarray]:
    """A column of lists of integers, as int64 arrays."""
    from pyarrow import types

    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise DataError(f"{path}: column {name} is {kind}", "it must hold lists of integers", "check that it is the tokenized GovReport")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise DataError(f"{path}: column {name} has holes", "every row must be a list of integers", "fetch it again")
    flat = values.to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return [flat[begin:end] for begin, end in pairwise((0, *ends.tolist()))]


def packed_rows(paths: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of AMD's packed files. A file is read as a whole: about 1 GB of memory for the training set."""
    from llama2_70b_lora.packed_npy import as_row, read_packed

    for path in paths:
        for i, packed in enumerate(read_packed(path)):
            where = f"{path}: row {i}"
            yield where, as_row(packed, where)


# ---- verify


def verify(data_dir: Path, weights: Path | None, manifest: Path | None, full: bool, rules: Rules) -> None:
    """Compare converted data, and weights where named, with the rules and with themselves. Raises DataError, WeightsError.

    Data, always: counts, sizes, SHA-256, every id and label, and that no sequence is in both splits. Weights: names, shapes, dtypes
    and sizes by their headers; with a manifest sizes, and with `full` the SHA-256 of every file.
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
    say("nothing wrong found")


def verify_data(data_dir: Path, rules: Rules) -> None:
    found = GovReport.read(data_dir)
    found.check(rules.sequence_length, rules.shape.vocab_size, rules.train_samples, rules.eval_samples)
    seen: dict[bytes, str] = {}
    for split in SPLITS:
        path = tokens_path(data_dir, split)
        with found.open_rows(split) as rows:
            bar = Bar(f"checking {path.name}", len(rows), "sequences")
            for i in range(len(rows)):
                row, where = rows.stored(i), f"{path}: row {i}"
                _check_stored(row, where, rules)
                if all_masked(row):
                    raise DataError(f"{where}: all labels are masked", "the mean loss of such a sequence is 0/0", "convert them again")
                _check_apart(row, split, where, seen)
                bar.at(i + 1)
            bar.finish()
        if (digest := sha256_of(path)) != getattr(found, split).sha256:
            what = f"{path}: SHA-256: expected {getattr(found, split).sha256}, got {digest}"
            raise DataError(what, f"it differs from what {SIDECAR} recorded", "convert the data again")
    say(f"{data_dir}: {found.train.rows} and {found.validation.rows} sequences of {found.sequence_length}, all ids and labels looked at")


def verify_weights(weights: Path, manifest_path: Path | None, full: bool, rules: Rules) -> None:
    import torch

    from common.model.weights import check_hashes, check_sizes, open_checkpoint

    checkpoint = open_checkpoint(weights, rules.shape)
    total = sum(stored.bytes for stored in checkpoint.tensors.values())
    say(f"{weights}: {checkpoint.layout} layout, {len(checkpoint.tensors)} tensors, {total:,} bytes in {len(checkpoint.files)} files")
    if manifest_path is not None:
        check_sizes(checkpoint, manifest_path)
    if manifest_path is None:
        say("not checked: SHA-256 of the weights: no manifest was given, so a changed byte would pass")
    elif full:
        check_hashes(checkpoint, manifest_path, torch.device("cpu"))
    else:
        say("not checked: SHA-256 of the weights: ask with --full")


def write_manifest(weights: Path, output: Path, rules: Rules) -> None:
    """Record sizes and SHA-256 of a checkpoint's files, for later checks: after a download that you have reason to trust."""
    from common.model.weights import open_checkpoint

    checkpoint = open_checkpoint(weights, rules.shape)
    bar = Bar("sha256", sum(path.stat().st_size for path in checkpoint.files))
    files: dict[str, FileFacts] = {}
    done = 0
    for path in checkpoint.files:
        files[path.name] = facts_of(path)
        done += path.stat().st_size
        bar.at(done)
    bar.finish()
    Manifest("base weights as found in a copy", rules.shape.vocab_size, files).write(output)
    say(f"wrote {output}: sizes and SHA-256 of {len(files)} files as found here")


# ---- miniature


def miniature(data_dir: Path) -> None:
    """The miniature's base in `data_dir`/base and its data in `data_dir`; nothing where they are already whole.

    Two steps, so that a kill after the first, or damage in the second, does not train the base again.
    """
    # Before torch is loaded: OpenMP threads that wait without spinning. Beside one other busy process the base then trains in 75 s
    # instead of 300, on two free cores in 52 s instead of 40.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    base = data_dir / BASE
    build_once(base, _base_recipe(), _build_base)
    build_once(data_dir, _data_recipe(base), _build_data)


def _miniature_source(what: str) -> str:
    return f"{what} of the standard library of Python {platform.python_version()}, recipe {MINIATURE_RECIPE}"


def _base_recipe() -> Recipe:
    shards = [f"model-{number:05d}-of-{BASE_SHARDS:05d}.safetensors" for number in range(1, BASE_SHARDS + 1)]
    files = (TOKENIZER, *shards, "model.safetensors.index.json", "config.json")
    return Recipe("miniature base", _miniature_source("documentation"), MINIATURE.shape.vocab_size, files, BASE_MANIFEST, ".base.lock")


def _build_base(folder: Path) -> Manifest:
    import torch

    from common.model.weights import save_base
    from llama2_70b_lora.miniature import library_texts, train_base, train_tokenizer

    texts = library_texts()
    tokenizer = train_tokenizer(texts, folder / TOKENIZER)
    model = train_base(texts.documentation, tokenizer)
    save_base(model, folder, shards=BASE_SHARDS, dtype=torch.bfloat16)  # as MLCommons ships the real one
    return manifest_of(folder, _base_recipe())


def _data_recipe(base: Path) -> Recipe:
    tokens = (SIDECAR, *(tokens_path(Path(), split).name for split in SPLITS))
    files = (*tokens, *(f"parquet/{split}-00000-of-00001.parquet" for split in SPLITS))
    source = f"{_miniature_source('documented code')}, tokenizer {sha256_of(base / TOKENIZER)}"
    return Recipe("miniature data", source, MINIATURE.shape.vocab_size, files, MANIFEST, LOCK)


def _build_data(data_dir: Path) -> Manifest:
    from common.model.fused_block import fused_llama
    from common.model.weights import load_base
    from llama2_70b_lora.data import validation_pairs
    from llama2_70b_lora.miniature import evaluation_loss, library_texts, write_parquet

    base, parquet_dir = data_dir / BASE, data_dir / "parquet"
    write_parquet(parquet_dir, corpus.load_sentencepiece(base / TOKENIZER), library_texts())
    recipe = _data_recipe(base)
    write_rows(
        data_dir, recipe.source, {split: parquet_rows([parquet_dir / f"{split}-00000-of-00001.parquet"]) for split in SPLITS}, MINIATURE
    )
    model = fused_llama(MINIATURE.shape, MINIATURE.sequence_length)
    load_base(model, base, base / BASE_MANIFEST)
    loss = evaluation_loss(model, validation_pairs(GovReport.read(data_dir)))
    say(f"evaluation loss of the base alone: {loss:.4f}; the adapters must bring it to {MINIATURE.target_loss}")
    return manifest_of(data_dir, recipe)


# ---- fetch


def fetch(data_dir: Path, weights: Path) -> None:
    """Say how to get MLCommons' data and base weights, after checking the room. Downloads nothing. Raises PreflightError."""
    missing = [
        name for name, there in (("data", (data_dir / SIDECAR).exists()), ("weights", any(weights.glob("*.safetensors")))) if not there
    ]
    check = f"python -m llama2_70b_lora.prepare verify --data-dir {data_dir} --weights {weights}"
    if not missing:
        say(f"data and weights are there. Check them:\n  {check}")
        return
    if "data" in missing:
        require_free_space(data_dir, DATA_BYTES, "the tokenized GovReport")
    if "weights" in missing:
        require_free_space(weights, WEIGHTS_BYTES, "the weights of Llama 2 70B")
    say(
        f"""Nothing has been downloaded: the weights are Meta's, under a licence that you must accept yourself. Missing: {" and ".join(missing)}.

1. Licence. Llama 2 is under the Llama 2 Community License (https://ai.meta.com/llama/license). For a submission the starting weights
   must be MLCommons' copy with fused query, key and value projections; MLCommons gives it to its members after they agree to a
   notice. The way there is in the reference's README:
     https://github.com/mlcommons/training/tree/master/llama2_70b_lora
   there as `Llama2-70b-fused-qkv-mlperf` (weights) and `scrolls_gov_report_8k` (data). If access is refused, ask MLCommons: nothing
   here can get around it.
2. The author of the reference keeps the same on the Hugging Face hub; whether it is open to you, the hub says. At these revisions:
     hf download {DATA_REPOSITORY} --repo-type dataset \\
       --revision {DATA_REVISION} --local-dir {data_dir}/parquet
     hf download {WEIGHTS_REPOSITORY} \\
       --revision {WEIGHTS_REVISION} --include "*.safetensors" "*.json" --local-dir {weights}
   About {WEIGHTS_BYTES / 1e9:.0f} GB. The .py files there are left out: nothing here executes code that comes with weights. Ordinary
   Llama-2-70B weights with q_proj, k_proj and v_proj (safetensors) load as well, for work that is no submission.
3. Convert the data, and check all:
     python -m llama2_70b_lora.prepare convert --parquet-dir {data_dir}/parquet --data-dir {data_dir}
     {check}
   No SHA-256 of the weights is published. Record your own once, and give it to later checks, or of other copies:
     python -m llama2_70b_lora.prepare write-manifest --weights {weights} --output llama2_70b.json
     {check} --manifest llama2_70b.json --full

AMD's packed train.npy and validation.npy hold the same sequences; they are pickles, which convert-npy reads without executing them.
Training reads token ids only: the tokenizer is not needed."""
    )


# ---- command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llama2_70b_lora.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("miniature", help="build the CPU miniature's base and data")
    command.add_argument("--data-dir", type=Path, required=True)
    command = commands.add_parser("convert", help="MLCommons' parquet files to flat int32")
    command.add_argument("--parquet-dir", type=Path, required=True)
    command.add_argument("--data-dir", type=Path, required=True)
    command = commands.add_parser("convert-npy", help="AMD's packed .npy files to flat int32")
    command.add_argument("--npy-dir", type=Path, required=True)
    command.add_argument("--data-dir", type=Path, required=True)
    command = commands.add_parser("verify", help="check converted data and weights")
    command.add_argument("--data-dir", type=Path, required=True)
    command.add_argument("--weights", type=Path)
    command.add_argument("--manifest", type=Path, help="what write-manifest recorded of the weights")
    command.add_argument("--full", action="store_true", help="every byte of the weights too")
    command.add_argument("--miniature", action="store_true", help="compare with the miniature's rules")
    command = commands.add_parser("write-manifest", help="record sizes and SHA-256 of weights (reads every byte)")
    command.add_argument("--weights", type=Path, required=True)
    command.add_argument("--output", type=Path, required=True)
    command.add_argument("--miniature", action="store_true", help="weights of the miniature's size")
    command = commands.add_parser("fetch", help="how to get data and weights")
    command.add_argument("--data-dir", type=Path, required=True)
    command.add_argument("--weights", type=Path, help="default: base in the data folder")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    rules = MINIATURE if getattr(args, "miniature", False) else CLOSED
    work: dict[str, Callable[[], None]] = {
        "miniature": lambda: miniature(args.data_dir),
        "convert": lambda: convert(args.parquet_dir, args.data_dir, rules),
        "convert-npy": lambda: convert_npy(args.npy_dir, args.data_dir, rules),
        "verify": lambda: verify(args.data_dir, args.weights, args.manifest, args.full, rules),
        "write-manifest": lambda: write_manifest(args.weights, args.output, rules),
        "fetch": lambda: fetch(args.data_dir, args.weights or args.data_dir / BASE),
    }
    return run_to_exit_code(work[args.command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
