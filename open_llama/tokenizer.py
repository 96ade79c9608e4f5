"""Tokenizers of any model: a Hugging Face tokenizer.json, or a SentencePiece model.

A document is stored as beginning-of-text (if the tokenizer has one), its tokens, and end-of-text.
Its files have fixed names in DATADIR, so that training can copy them to the saved model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from common.atomic_write import copy_whole
from common.data import corpus
from common.data.indexed_dataset_header import mask_path
from common.errors import ConfigError, DataError, first_line, listed
from common.model.families import TOKENS
from common.paths import open_regular
from common.training.continuation import data_record

# File in DATADIR: identity of the preparation that made the files beside it, and the ids of TOKENS.
RECORD = "text.json"
CHAT_SOURCE = "open_llama prepare chat"  # in RECORD
# Names in DATADIR and beside a model. A folder with both has two forms of the same tokenizer.
TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
NAMES = (TOKENIZER_JSON, SENTENCEPIECE)
# Other Hugging Face files of the same tokenizer, of both kinds.
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE)
LARGEST_VOCABULARY = 1 << 31  # tokens, of token files
SPACE = "\u2581"  # a space, in the pieces of SentencePiece
# Characters that SentencePiece encodes together. A text of a million characters at once took
# three times as long: its queue of merges is larger than a cache.
ENCODED_TOGETHER = 1 << 12
SINGLE_SPACE = re.compile("(?<=[!-~]) (?=[!-~])")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of one of the two kinds."""

    # From texts to lists of ids, with beginning-of-text and without end-of-text.
    encode: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]  # from ids to text
    vocab_size: int  # the largest id + 1
    bos: int | None  # id of beginning-of-text; None if documents begin without one
    eos: int  # id of end-of-text
    # From a rendered conversation to ids, and [begin, end) of each in characters. None:
    # SentencePiece.
    encode_chat: Callable[[str], tuple[list[int], list[tuple[int, int]]]] | None = None

    @property
    def token_ids(self) -> dict[str, int | None]:
        """The ids of TOKENS, by their keys in a model's config.json."""
        return dict(zip(TOKENS, (self.bos, self.eos), strict=True))


def load_tokenizer(path: Path, eos: str = "", control_tokens: bool = False) -> Tokenizer:
    """Read the tokenizer file `path`, or the one in the folder `path`, and the files beside it.

    `eos`: the end-of-text token (default: the one that the files name).
    `control_tokens`: whether a special token that is spelled in a text, such as <s>, is that token.
    By default it is text like any other. SentencePiece always reads it as text.

    Raises DataError if a file is not of a tokenizer, or if SentencePiece lacks tokens that the
    files beside it add, and ConfigError if the end-of-text token is unknown.
    """
    path = tokenizer_file(path)
    with corpus.damage_named(
        lambda error: f"{path}: cannot be used: {type(error).__name__}: {first_line(error)[:200]}",
        "its rules are damaged or contradict each other",
        "use the model's own tokenizer",
    ):
        if path.suffix == ".json":
            return _tokenizer_json(path, eos, control_tokens)
        return _sentencepiece(path, eos)


def as_tokenizer_json(path: Path) -> str:
    """Return what to do if the SentencePiece model `path` cannot be used."""
    return (
        "save the tokenizer as tokenizer.json: in Python, "
        f"transformers.AutoTokenizer.from_pretrained({str(path.parent)!r})"
        '.save_pretrained("NEW_FOLDER"), and name NEW_FOLDER'
    )


def tokenizer_file(path: Path) -> Path:
    """Return `path`, or the tokenizer file in the folder `path`. Raises DataError without one."""
    if not path.is_file() and not path.is_dir():
        raise DataError(
            f"{path}: {'not a regular file' if path.exists() else 'no such file'}",
            "a tokenizer is a tokenizer.json or a SentencePiece model, or a folder with one",
            "check the path",
        )
    if not path.is_dir():
        return path
    found = [path / name for name in NAMES if (path / name).is_file()]
    if not found:
        raise DataError(
            f"{path}: no tokenizer",
            f"it holds neither {' nor '.join(NAMES)}",
            "copy the model's tokenizer there",
        )
    return found[0]


def files_of_tokenizer(path: Path) -> dict[str, Path]:
    """Return the tokenizer file `path` and its COMPANIONS, by their names in DATADIR."""
    files = {TOKENIZER_JSON if path.suffix == ".json" else SENTENCEPIECE: path}
    for name in COMPANIONS:
        if path.with_name(name).is_file():
            files[name] = path.with_name(name)
    return files


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer in the folder `source`, if there is one, to the folder `target`.

    Return whether there is one.
    """
    names = tokenizer_files(source)
    for name in names:
        copy_whole(source / name, target / name)
    return bool(names)


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of the tokenizer in `folder`, () if there is none."""
    if not any((folder / name).is_file() for name in NAMES):
        return ()
    return tuple(files_of_tokenizer(tokenizer_file(folder)))


def require_same_tokenizer(before: dict[str, list], data_dir: Path, model: Path) -> None:
    """Raise DataError if the tokenizer in `data_dir` is not the one that the run began with.

    `before`: record of its files. `model`: folder of the saved model, for the error.
    """
    now = data_record(data_dir, tokenizer_files(data_dir))
    if now != before:
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        raise DataError(
            f"the tokenizer in {data_dir} changed during the run: {listed(changed)}",
            f"the data were made with the earlier one, so {model} was saved without a tokenizer",
            f"copy the tokenizer of the data to {model}",
        )


def recorded_token_ids(data_dir: Path) -> dict[str, int]:
    """Return the ids of TOKENS that a preparation recorded in `data_dir`, {} if it did not."""
    record = _record(data_dir)
    return {key: record[key] for key in TOKENS if type(record.get(key)) is int}


def are_masked(prefixes: Iterable[Path]) -> bool:
    """Return whether the loss counts answers only: token files have a mask, or had one."""
    return any(
        mask_path(prefix).exists() or _record(prefix.parent).get("source") == CHAT_SOURCE
        for prefix in prefixes
    )


def _record(data_dir: Path) -> dict[str, Any]:
    try:
        record = json.loads((data_dir / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # not written by `prepare text`
        return {}
    return record if isinstance(record, dict) else {}


def _sentencepiece(path: Path, eos: str) -> Tokenizer:
    model = corpus.load_sentencepiece(path)
    config = token_settings(path)
    tokens = _added_tokens(path, config)
    for key in ("bos_token", "eos_token"):
        if token := named_token(config, key):
            tokens.setdefault(token, model.piece_to_id(token))
    for token, number in tokens.items():
        if not 0 <= number < model.vocab_size() or model.id_to_piece(number) != token:
            raise DataError(
                f"{path}: lacks the token {token!r} of the files beside it",
                "they add it or give it another id, and SentencePiece would split it into pieces",
                as_tokenizer_json(path),
            )
    eos = eos or named_token(config, "eos_token")
    end = model.piece_to_id(eos) if eos else model.eos_id()
    if end < 0 or (eos and end == model.unk_id()):
        raise _no_end(path, eos)
    prefix = model.encode("a", out_type=str)[0].startswith(SPACE)
    if config.get("add_prefix_space") not in (None, prefix):
        raise DataError(
            f"{path}: {'puts a' if prefix else 'puts no'} space before a text, but"
            f" add_prefix_space is {config['add_prefix_space']} in {CONFIG}",
            "other programs follow that file, and would give the model other ids",
            "correct the entry or remove it",
        )
    first = named_token(config, "bos_token")
    bos = model.piece_to_id(first) if first else model.bos_id()
    start = [bos] if bos >= 0 and config.get("add_bos_token", True) else []

    words = _keeps_words_apart(model, prefix)

    def encode(texts: list[str]) -> list[list[int]]:
        encoded = []
        for text in texts:
            sections = _sections(text, prefix) if words else [text]
            encoded.append(list(chain(start, *model.encode(sections))))
        return encoded

    return Tokenizer(encode, model.decode, model.vocab_size(), start[0] if start else None, end)


def _keeps_words_apart(model: Any, prefix: bool) -> bool:
    """Return whether the ids of a word do not depend on the words before and after it.

    They do not in BPE if a space is only at the beginning of pieces. `prefix`: whether `model` puts
    a space before a text.
    """
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    parts = [model.encode(text, out_type=str) for text in ("a", "b" if prefix else " b", "a b")]
    return (
        # Scores of BPE are ranks. A unigram model adds up its scores over a text.
        all(model.get_score(number).is_integer() for number in range(model.vocab_size()))
        and not any(SPACE in piece.lstrip(SPACE) for piece in pieces)
        and SPACE in pieces  # unknown characters in a row would be one id
        and parts[0] + parts[1] == parts[2]
    )


def _sections(text: str, prefix: bool) -> list[str]:
    """Cut a text at single spaces into sections of about ENCODED_TOGETHER characters.

    `prefix`: whether the tokenizer puts a space before each section.
    """
    sections = []
    begin = 0
    while space := SINGLE_SPACE.search(text, begin + ENCODED_TOGETHER):
        sections.append(text[begin : space.start()])
        begin = space.end() if prefix else space.start()
    return [*sections, text[begin:]]


def _tokenizer_json(path: Path, eos: str, control_tokens: bool) -> Tokenizer:
    tokenizer = corpus.load_tokenizer_json(path)
    tokenizer.encode_special_tokens = not control_tokens
    end = tokenizer.token_to_id(eos or named_token(token_settings(path), "eos_token"))
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
    if size > LARGEST_VOCABULARY:
        raise ValueError(f"token id {size - 1}, although token files have 32 bits for an id")

    def encode_chat(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    return Tokenizer(encode, tokenizer.decode, size, bos, end, encode_chat)


def token_settings(path: Path) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json beside `path`, {} if there is no such file.

    As in transformers, entries of special_tokens_map.json win, unless tokenizer_config.json lists
    the added tokens. Raises DataError.
    """
    config = _json_object(path.with_name(CONFIG))
    if "added_tokens_decoder" in config:
        return config
    return config | _json_object(path.with_name(SPECIAL_TOKENS))


def _added_tokens(path: Path, config: dict[str, Any]) -> dict[str, int]:
    """Return the added tokens with their ids that the files beside `path` list. Raises DataError.

    `config`: the result of `token_settings`.
    """
    listed = config.get("added_tokens_decoder")
    try:
        if listed is None:
            tokens = _json_object(path.with_name(ADDED_TOKENS))
            return {token: int(number) for token, number in tokens.items()}
        return {token["content"]: int(number) for number, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{path.parent}: unknown form of the added tokens: {type(error).__name__}: {error}"
        why = f"{CONFIG} or {ADDED_TOKENS} is damaged"
        raise DataError(what, why, "fetch the tokenizer again") from error


def named_token(config: dict[str, Any], key: str) -> str:
    """Return the token under `key`, or ""."""
    named = config.get(key)
    content = named.get("content") if isinstance(named, dict) else named
    return content if isinstance(content, str) else ""


def _json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no such file. Raises DataError."""
    if not path.exists():
        return {}
    try:
        with open_regular(path) as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError(repr(content))
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path}: expected a JSON object, got {error!s:.200}"
        why = "it belongs to the tokenizer, and is damaged or another file of that name"
        raise DataError(what, why, "fetch it again") from error
    return content


def _no_end(path: Path, eos: str) -> ConfigError:
    what = f"{path}: no token {eos!r}" if eos else f"{path}: unknown end-of-text token"
    why = "each document ends with it"
    if not eos:
        why += f", and neither {CONFIG} nor {SPECIAL_TOKENS} beside the file names a known token"
    return ConfigError(what, why, "name it with --eos, e.g. --eos '</s>'")
