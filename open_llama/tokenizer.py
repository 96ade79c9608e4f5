"""Tokenizers of any model: a Hugging Face tokenizer.json, or a SentencePiece model.

A document is stored as beginning-of-text (if the tokenizer has one), its tokens, and end-of-text.
The tokenizer's file has a fixed name in DATADIR, so that training can copy it to the saved model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.data import corpus
from common.errors import ConfigError, DataError

# File in DATADIR: identity of the preparation that made the files beside it, and the ids of TOKENS.
RECORD = "text.json"
TOKENS = ("bos_token_id", "eos_token_id")  # keys of a model's config.json
# File name in DATADIR and beside a model -> other Hugging Face files of the same tokenizer.
COMPANIONS = {
    "tokenizer.json": ("tokenizer_config.json", "special_tokens_map.json"),
    "tokenizer.model": ("tokenizer_config.json",),
}


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of one of the two kinds."""

    # From texts to lists of ids, with beginning-of-text and without end-of-text.
    encode: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]  # from ids to text
    vocab_size: int  # the largest id + 1
    bos: int | None  # id of beginning-of-text; None if documents begin without one
    eos: int  # id of end-of-text

    @property
    def token_ids(self) -> dict[str, int | None]:
        """The ids of TOKENS, by their keys in a model's config.json."""
        return dict(zip(TOKENS, (self.bos, self.eos), strict=True))


def load_tokenizer(path: Path, eos: str = "") -> Tokenizer:
    """Read the tokenizer file `path`, or the one in the folder `path`.

    `eos`: the end-of-text token (default: the one that the files name).

    Raises DataError if the file is not a tokenizer, and ConfigError if the end-of-text token is
    unknown.
    """
    path = tokenizer_file(path)
    if path.suffix == ".json":
        return _tokenizer_json(path, eos)
    return _sentencepiece(path, eos)


def tokenizer_file(path: Path) -> Path:
    """Return `path`, or the tokenizer file in the folder `path`. Raises DataError without one."""
    if not path.exists():
        raise DataError(
            f"{path}: no such file",
            "a tokenizer is a tokenizer.json or a SentencePiece model, or a folder with one",
            "check the path",
        )
    if not path.is_dir():
        return path
    found = [path / name for name in COMPANIONS if (path / name).is_file()]
    if not found:
        raise DataError(
            f"{path}: no tokenizer",
            f"it holds neither {' nor '.join(COMPANIONS)}",
            "copy the model's tokenizer there",
        )
    return found[0]


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer in the folder `source`, if there is one, to the folder `target`.

    Return whether there is one.
    """
    names = tokenizer_files(source)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return bool(names)


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of the tokenizer in `folder`, () if there is none."""
    for name, companions in COMPANIONS.items():
        if (folder / name).is_file():
            return tuple(each for each in (name, *companions) if (folder / each).is_file())
    return ()


def recorded_token_ids(data_dir: Path) -> dict[str, int]:
    """Return the ids of TOKENS that `prepare text` recorded in `data_dir`, {} if it did not."""
    try:
        record = json.loads((data_dir / RECORD).read_text())
    except (OSError, ValueError):  # other token files, which no `prepare text` wrote
        return {}
    if not isinstance(record, dict):
        return {}
    return {key: record[key] for key in TOKENS if type(record.get(key)) is int}


def _sentencepiece(path: Path, eos: str) -> Tokenizer:
    model = corpus.load_sentencepiece(path)
    end = model.piece_to_id(eos) if eos else model.eos_id()
    if end < 0 or (eos and end == model.unk_id()):
        raise _no_end(path, eos)
    bos = model.bos_id() if model.bos_id() >= 0 else None
    start = [] if bos is None else [bos]

    def encode(texts: list[str]) -> list[list[int]]:
        return [start + ids for ids in model.encode(texts)]

    return Tokenizer(encode, model.decode, model.vocab_size(), bos, end)


def _tokenizer_json(path: Path, eos: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as TokenizerJson
    except ImportError as error:
        why = "the package tokenizers, which reads it, cannot be imported"
        raise ConfigError(f"{path}: {error}", why, "pip install tokenizers") from error
    try:
        tokenizer = TokenizerJson.from_file(str(path))
    except Exception as error:  # the package raises no narrower class
        raise DataError(
            f"{path}: expected a tokenizer.json: {error}",
            "it is missing, damaged, or another file of that name",
            "fetch the model's tokenizer.json again",
        ) from error
    tokenizer.no_truncation()  # truncation and padding may be stored in the file
    tokenizer.no_padding()
    end = tokenizer.token_to_id(eos or _named_end(path))
    if end is None:
        raise _no_end(path, eos)

    def encode(texts: list[str]) -> list[list[int]]:
        # One by one: a batch would start threads, and each worker of `prepare text` has one core.
        ids_of_texts = []
        for text in texts:
            ids = tokenizer.encode(text).ids
            if ids and ids[-1] == end:
                ids = ids[:-1]
            ids_of_texts.append(ids)
        return ids_of_texts

    (empty,) = encode([""])
    bos = empty[0] if empty else None
    # Not get_vocab_size(), which is smaller if ids are left out.
    size = max(tokenizer.get_vocab().values()) + 1
    return Tokenizer(encode, tokenizer.decode, size, bos, end)


def _named_end(path: Path) -> str:
    """Return the end-of-text token that tokenizer_config.json beside `path` names, or ""."""
    try:
        about: Any = json.loads(path.with_name("tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return ""
    named = about.get("eos_token") if isinstance(about, dict) else None
    content = named.get("content") if isinstance(named, dict) else named
    return content if isinstance(content, str) else ""


def _no_end(path: Path, eos: str) -> ConfigError:
    what = f"{path}: no token {eos!r}" if eos else f"{path}: unknown end-of-text token"
    why = "each document ends with it"
    if not eos:
        why += ", and no tokenizer_config.json beside the file names it"
    return ConfigError(what, why, "name it with --eos, e.g. --eos '</s>'")
