"""`prepare text`: convert text to Megatron's token files, in parallel.

The inputs are cut into parts of PART_BYTES. Worker processes tokenize parts and write each as a
file of its own in DATADIR/.parts. At the end the parts are joined in the order of the inputs, so
the result does not depend on the number of processes. An interrupted preparation continues
with the missing parts. text_inputs.py reads the inputs, text_tokenizer.py trains a tokenizer on
them, and text_parts.py writes and joins the parts.

A document is for validation if the SHA-256 of its text, as a fraction of its range, is below the
validation fraction. So equal documents are always in the same split.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.data.manifest import sha256_of
from common.data.preparation import locked, say
from common.errors import ConfigError, StorageError, listed, write_text
from open_llama.text_inputs import divide, input_files
from open_llama.text_parts import Settings, join, parts_folder, tokenize
from open_llama.text_tokenizer import train_tokenizer
from open_llama.tokenizer import (
    COMPANIONS,
    NAMES,
    RECORD,
    SENTENCEPIECE,
    TOKENS,
    files_of_tokenizer,
    load_tokenizer,
    tokenizer_file,
)


def prepare_text(
    inputs: list[Path],
    data_dir: Path,
    settings: Settings,
    processes: int,
    vocab_size: int = 0,
) -> None:
    """Tokenize `inputs` into train and validation files in `data_dir`.

    `vocab_size`: if not 0, first train a SentencePiece tokenizer of this many pieces on the inputs.
    `settings` then names no tokenizer.

    Raises ConfigError for inputs, a tokenizer or options that cannot be used, DataError for damaged
    inputs or an empty split, StorageError if `data_dir` holds other token files.
    """
    files = input_files(inputs)
    if data_dir.exists() and not data_dir.is_dir():
        why = "--data-dir is the folder of the token files"
        raise ConfigError(f"{data_dir} is not a folder", why, "name another folder")
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir / f".{RECORD}.lock"):
        tokenizer = place_tokenizer(files, data_dir, settings, vocab_size)
        settings = replace(settings, tokenizer=str(tokenizer))
        record = identity(files, settings) | {"train_tokenizer": vocab_size}
        if (data_dir / RECORD).is_file():
            _require_equal(data_dir, record)
            say(f"{data_dir}: complete")
            return
        loaded = load_tokenizer(tokenizer, settings.eos)
        size = loaded.vocab_size
        if vocab_size and size != vocab_size:
            what = f"{tokenizer} has {size:,} pieces, not {vocab_size:,}"
            why = "an earlier try made it, and nothing is overwritten"
            raise StorageError(what, why, "remove it, or name another --data-dir")
        parts = parts_folder(data_dir, record)
        tokenize(divide(files), parts, settings, processes)
        indices = join(parts, data_dir, size)
        record |= loaded.token_ids
        write_text(data_dir / RECORD, json.dumps(record, indent=1) + "\n")
        shutil.rmtree(parts)
    for split, index in indices.items():
        say(f"{data_dir / split}: {index.num_documents:,} documents, {index.num_tokens:,} tokens")
    say(f"{tokenizer}: a vocabulary of {size:,} tokens")


def place_tokenizer(files: list[Path], data_dir: Path, settings: Settings, vocab_size: int) -> Path:
    """Copy the tokenizer to `data_dir`, or train one there. Return its file.

    A trained tokenizer that is there already is kept, with a note unless the data are complete.

    Raises StorageError if another tokenizer is there.
    """
    if vocab_size:
        target = data_dir / SENTENCEPIECE
        if not target.exists():
            train_tokenizer(files, settings.key, vocab_size, target)
        elif not (data_dir / RECORD).is_file():
            say(f"note: no tokenizer is trained, because {target} exists; remove it to train one")
        return target
    source = tokenizer_file(Path(settings.tokenizer))
    load_tokenizer(source, settings.eos)  # before anything is copied
    own = files_of_tokenizer(source)
    for name in (*NAMES, *COMPANIONS):
        copy = data_dir / name
        if copy.exists() and (name not in own or sha256_of(copy) != sha256_of(own[name])):
            why = "nothing is overwritten"
            do = "remove it, or name another --data-dir"
            if (data_dir / RECORD).is_file():
                why = "the token files there were made with that one"
                do = "name another --data-dir"
            raise StorageError(f"{copy} is of another tokenizer", why, do)
    for name, path in own.items():
        if not (data_dir / name).exists():
            shutil.copyfile(path, data_dir / name)
    return data_dir / next(iter(own))


def identity(files: list[Path], settings: Settings) -> dict[str, Any]:
    """Return the identity of a preparation: its options, and its inputs' names, sizes and times."""
    inputs = []
    for path in files:
        state = path.stat()
        inputs.append([str(path), state.st_size, state.st_mtime_ns])
    tokenizer = sha256_of(Path(settings.tokenizer))
    return {"inputs": inputs, **asdict(settings), "tokenizer": tokenizer}


def _require_equal(data_dir: Path, record: dict[str, Any]) -> None:
    """Raise StorageError unless the files in `data_dir` are those of the preparation `record`.

    The ids of TOKENS are not compared: they follow from the tokenizer and the options, and earlier
    versions did not write them.
    """
    path = data_dir / RECORD
    do = "name another --data-dir"
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        what = f"{path} exists and is no record of a preparation"
        raise StorageError(what, "nothing is overwritten", do)
    found = {key: value for key, value in found.items() if key not in TOKENS}
    changed = [key for key in record | found if found.get(key) != record.get(key)]
    if changed:
        what = f"{data_dir} holds token files of other inputs or options"
        why = f"its {RECORD} has other {listed(changed)}, and nothing is overwritten"
        raise StorageError(what, why, do)
