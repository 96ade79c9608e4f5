"""Training of a tokenizer on the inputs of `prepare text`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from common.data import corpus
from common.data.preparation import say
from common.data.text_inputs import (
    Source,
    documents,
    draw_of,
    kind_of,
    no_documents,
    sources_of,
)
from common.errors import ConfigError, write_text
from common.terminal import Progress

VOCABULARY_CHARACTERS = 5_000_000  # most characters that a tokenizer is trained on
# Up to 2,000 characters of them that end before a space or line end, if there is one.
PIECE = re.compile(r".{1,2000}(?!\S)|.{1,2000}", re.DOTALL)
VOCABULARY_BYTES = 1 << 30  # of the inputs that can be divided, read for a tokenizer
PLACE_BYTES = 1 << 16  # read together, of JSON lines and plain text
# tokenizer_config.json beside a trained tokenizer. Without it, transformers chooses a class by the
# kind of the model. Qwen3's class does not read SentencePiece: ids and text would be wrong.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,  # as in training
    "add_prefix_space": False,  # llama.cpp puts a space before a text without this entry
}


def train_tokenizer(files: list[Path], key: str, vocab_size: int, target: Path) -> None:
    """Train a SentencePiece tokenizer on text spread over the inputs, and write it to `target`.

    tokenizer_config.json beside it is for transformers.
    """
    say(f"training a tokenizer of {vocab_size:,} pieces")
    texts = vocabulary_texts(files, key)
    if not texts:
        raise no_documents()
    config = json.dumps(TOKENIZER_CONFIG, indent=1) + "\n"
    write_text(target.with_name("tokenizer_config.json"), config)
    try:
        corpus.train_sentencepiece(texts, vocab_size, target)
    except RuntimeError as error:
        raise _no_tokenizer(vocab_size, str(error)) from error


def vocabulary_texts(files: list[Path], key: str) -> list[str]:
    """Return at most VOCABULARY_CHARACTERS of the inputs' text, spread evenly over all of it.

    Text beyond that is cut into pieces, and those with the lowest hashes are taken, so that no
    order of the documents leaves a kind of them out.
    """
    found: list[tuple[int, str]] = []  # hash and piece
    characters = 0
    places = list(_places(files))
    with Progress("reading text for the tokenizer", len(places), "places") as progress:
        for place in places:
            for text in filter(str.strip, documents(place, key)):
                pieces = [(draw_of(piece), piece) for piece in PIECE.findall(text)]
                found += pieces
                characters += len(text)
                if characters > 2 * VOCABULARY_CHARACTERS:  # now and then, because it sorts
                    found = _lowest(found)
                    characters = sum(len(piece) for _, piece in found)
            progress.advance(1)
    if characters > VOCABULARY_CHARACTERS:
        found = _lowest(found)
    return [piece for _, piece in found]


def _lowest(pieces: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return VOCABULARY_CHARACTERS of pieces with the lowest hashes, in their order."""
    pieces = sorted(pieces)
    ends = accumulate(len(piece) for _, piece in pieces)
    return pieces[: sum(end <= VOCABULARY_CHARACTERS for end in ends)]


def _places(files: list[Path]) -> Iterator[Source]:
    """Yield the sources to read for a tokenizer, spread evenly over the inputs.

    About VOCABULARY_BYTES of JSON lines, plain text and Parquet are read. Other files are read
    whole.
    """
    stride = math.ceil(max(1, sum(path.stat().st_size for path in files)) / VOCABULARY_BYTES)
    for path in files:
        sources = list(sources_of(path))
        if kind_of(path) != "table" and len(sources) > 1:
            sources = [
                Source(str(path), begin, min(begin + PLACE_BYTES, sources[-1].end))
                for begin in range(0, sources[-1].end, PLACE_BYTES)
            ]
        yield from sources[::stride]


def _no_tokenizer(vocab_size: int, error: str) -> ConfigError:
    """Return the error for a training that SentencePiece refused with the message `error`."""
    what = f"no tokenizer of {vocab_size} pieces"
    if most := re.search(r"too high .*<= (\d+)", error):
        why = f"the text gives at most {most[1]}: it has too few different words"
        return ConfigError(what, why, f"set --train-tokenizer to {most[1]} or less, or add text")
    if least := re.search(r"required_chars\. \d+ vs (\d+)", error):
        why = f"its single characters and bytes alone are {least[1]}"
        return ConfigError(what, why, f"set --train-tokenizer to {least[1]} or more")
    why = "SentencePiece refused the number or the text"
    return ConfigError(f"{what}: {error}", why, "change --train-tokenizer, or the text")
