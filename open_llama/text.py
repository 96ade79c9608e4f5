"""`prepare text` and `prepare chat`: convert text to token files for training and validation.

common/data/text_parts.py tokenizes, text_tokenizer.py trains a tokenizer on the inputs, and chat.py
renders conversations.

A document is for validation if the SHA-256 of its text, as a fraction of its range, is below the
validation fraction. So equal documents are always in the same split.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic_write import copy_whole
from common.data.indexed_dataset_header import mask_path
from common.data.manifest import Manifest, PairFacts, sha256_of
from common.data.preparation import (
    Recipe,
    build_once,
    input_states,
    locked,
    require_data_dir,
    say,
)
from common.data.text_documents import Key
from common.data.text_inputs import input_files, kind_of
from common.data.text_parts import SPLITS, Encode, Work, write_token_files
from common.data.verification import verify
from common.errors import ConfigError, StorageError
from common.terminal import plural
from open_llama.chat import Rendered, load_template, mask_of, render_record
from open_llama.text_tokenizer import train_tokenizer
from open_llama.tokenizer import (
    CHAT_SOURCE,
    COMPANIONS,
    NAMES,
    RECORD,
    SENTENCEPIECE,
    files_of_tokenizer,
    load_tokenizer,
    tokenizer_file,
)

SOURCE = "open_llama prepare text"
PARTS = ".parts"  # folder of the tokenized parts in DATADIR
TOKEN_FILES = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))
MASK_FILES = tuple(mask_path(Path(split)).name for split in SPLITS)


@dataclass(frozen=True)
class Settings:
    """The options that, with the inputs, decide the tokens."""

    tokenizer: str  # path of the tokenizer file
    eos: str
    key: str | None  # JSON key or column that holds the text; None: a record is a conversation
    validation_fraction: float


def prepare_text(
    inputs: list[Path],
    data_dir: Path,
    settings: Settings,
    processes: int,
    vocab_size: int = 0,
) -> None:
    """Tokenize `inputs` into train and validation files in `data_dir`, unless they are complete.

    Conversations get mask files, too.

    `vocab_size`: if not 0, first train a SentencePiece tokenizer of this many pieces on the inputs.
    `settings` then names no tokenizer.

    Raises ConfigError for inputs, a tokenizer or options that cannot be used, DataError for inputs
    that are damaged or change, an empty split or token files that changed, StorageError if
    `data_dir` holds other token files.
    """
    files = input_files(inputs)
    if settings.key is None:
        files = _without_plain_text(files)
    states = input_states(files)
    if data_dir.exists() and not data_dir.is_dir():
        why = "--data-dir is the folder of the token files"
        raise ConfigError(f"{data_dir} is not a folder", why, "name another folder")
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir / ".tokenizer.lock"):
        tokenizer = place_tokenizer(files, data_dir, settings, vocab_size)
    settings = replace(settings, tokenizer=str(tokenizer))
    about = identity(states, settings, vocab_size)
    loaded = load_tokenizer(tokenizer, settings.eos)
    chat = settings.key is None
    key: Key = partial(render_record, tokenizer=tokenizer) if settings.key is None else settings.key

    def build(folder: Path) -> dict[str, PairFacts]:
        if vocab_size and loaded.vocab_size != vocab_size:
            what = f"{tokenizer} has {loaded.vocab_size:,} pieces, not {vocab_size:,}"
            why = "an earlier try made it, and nothing is overwritten"
            raise StorageError(what, why, "remove it, or name another --data-dir")
        work = Work(
            tokenizer,
            partial(_chat_encoder if chat else _document_encoder, eos=settings.eos),
            loaded.vocab_size,
            key,
            settings.validation_fraction,
            masked=chat,
        )
        prefixes = {split: folder / split for split in SPLITS}
        return write_token_files(files, work, prefixes, folder / PARTS, about, processes)

    recipe = Recipe(
        title="token files",
        source=CHAT_SOURCE if chat else SOURCE,
        vocab_size=loaded.vocab_size,
        files=(*TOKEN_FILES, *MASK_FILES) if chat else TOKEN_FILES,
        manifest=RECORD,
        about=about | loaded.token_ids,
        rebuilds=False,
    )
    build_once(data_dir, recipe, build)
    shutil.rmtree(data_dir / PARTS, ignore_errors=True)
    for split, pair in Manifest.read(data_dir / RECORD).pairs.items():
        say(f"{data_dir / split}: {pair.documents:,} documents, {pair.tokens:,} tokens")
    say(f"{tokenizer}: a vocabulary of {loaded.vocab_size:,} tokens")


def _without_plain_text(files: list[Path]) -> list[Path]:
    """Return the files that can hold conversations. Raises ConfigError if there are none."""
    kept = [path for path in files if kind_of(path) != "text"]
    if not kept:
        why = "conversations are JSON lines, JSON arrays or tables"
        raise ConfigError(f"{files[0]}: plain text", why, "convert it")
    if left_out := len(files) - len(kept):
        say(f"note: {plural(left_out, 'file')} of plain text left out: no conversations")
    return kept


def _document_encoder(path: Path, eos: str) -> Encode:
    """Return a function from texts to documents with an end-of-text, [] for blank texts."""
    tokenizer = load_tokenizer(path, eos)

    def encode(texts: list[str]) -> list[list[int]]:
        return [
            [*ids, tokenizer.eos] if text.strip() else []
            for text, ids in zip(texts, tokenizer.encode(texts), strict=True)
        ]

    return encode


def _chat_encoder(path: Path, eos: str) -> Encode:
    """Return a function from rendered conversations to their ids and masks."""
    encode_chat = load_tokenizer(path, eos, control_tokens=True).encode_chat
    assert encode_chat is not None, "a chat template has a tokenizer.json"

    def encode(texts: list[str]) -> list[np.ndarray]:
        documents = []
        for text in texts:
            assert isinstance(text, Rendered)
            ids, offsets = encode_chat(text)
            documents.append(np.array([ids, mask_of(text, offsets)]))
        return documents

    return encode


def verify_text(data_dir: Path, full: bool) -> None:
    """Compare the token files in `data_dir` with their record.

    `full`: also check every id and the SHA-256 of every file.

    Raises DataError if anything differs.
    """
    require_data_dir(data_dir)
    verify(data_dir, Manifest.read(data_dir / RECORD), data_dir / RECORD, full)


def place_tokenizer(files: list[Path], data_dir: Path, settings: Settings, vocab_size: int) -> Path:
    """Copy the tokenizer to `data_dir`, or train one there. Return its file.

    A trained tokenizer that is there already is kept, with a note unless the data are complete.

    Raises StorageError if another tokenizer is there.
    """
    if vocab_size:
        target = data_dir / SENTENCEPIECE
        assert settings.key is not None, "conversations come with a tokenizer"
        if not target.exists():
            train_tokenizer(files, settings.key, vocab_size, target)
        elif not (data_dir / RECORD).is_file():
            say(f"note: no tokenizer is trained, because {target} exists; remove it to train one")
        return target
    source = tokenizer_file(Path(settings.tokenizer))
    load_tokenizer(source, settings.eos)  # before anything is copied
    if settings.key is None:
        load_template(source)
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
            copy_whole(path, data_dir / name)
    return data_dir / next(iter(own))


def identity(states: list[list[str | int]], settings: Settings, vocab_size: int) -> dict[str, Any]:
    """Return the identity of a preparation: its options, and its inputs' names, sizes and times."""
    tokenizer = sha256_of(Path(settings.tokenizer))
    options = asdict(settings) | {"tokenizer": tokenizer, "train_tokenizer": vocab_size}
    return {"inputs": states, **options}
