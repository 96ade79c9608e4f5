"""`prepare convert`: convert text to Megatron's token files.

The tokenizer is a SentencePiece model or Llama 3.1's tokenizer.json.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common.data import corpus
from common.data.indexed_dataset_header import index_path, tokens_path
from common.data.manifest import PairFacts, sha256_of
from common.data.preparation import input_states, locked, say
from common.data.text_inputs import input_files
from common.data.text_parts import Encode, Work, write_token_files
from common.errors import DataError, StorageError
from llama31_8b.rules import CLOSED


def convert(
    inputs: list[Path], tokenizer: Path, prefix: Path, key: str, processes: int
) -> PairFacts:
    """Tokenize `inputs` into `<prefix>.bin/.idx`, one sequence per document.

    No document gets a bos or an eos, because the reference's `utils/preprocess.sh` calls NeMo's
    preprocessor without `--append-eod`. Documents without tokens are left out, as in Megatron's
    preprocessor. In plain text files, blank lines separate documents. A conversion that was killed
    continues.

    Raises ConfigError, DataError, StorageError.
    """
    files = input_files(inputs)
    _, vocab_size = _load_tokenizer(tokenizer)
    work = Work(tokenizer.absolute(), encoder, vocab_size, key, blank_lines=True)
    identity = {"inputs": input_states(files), "tokenizer": sha256_of(tokenizer), "key": key}
    prefix.parent.mkdir(parents=True, exist_ok=True)
    parts = prefix.with_name(f".{prefix.name}.parts")
    with locked(prefix.with_name(f".{prefix.name}.lock")):
        # A conversion renames the .bin first, then the .idx.
        if index_path(prefix).exists() or (tokens_path(prefix).exists() and not parts.exists()):
            raise StorageError(
                f"{prefix}.bin/.idx: exists already",
                "nothing is overwritten",
                "remove it, or choose another --output-prefix",
            )
        pairs = write_token_files(files, work, {"train": prefix}, parts, identity, processes)
        shutil.rmtree(parts)
    pair = pairs["train"]
    say(f"{prefix}: {pair.documents:,} documents, {pair.tokens:,} tokens as {pair.dtype}")
    return pair


def encoder(path: Path) -> Encode:
    """Return the function from documents to their token ids of the tokenizer at `path`."""
    return _load_tokenizer(path)[0]


def _load_tokenizer(path: Path) -> tuple[Encode, int]:
    """Return a function from documents to their token ids, and the vocabulary size.

    A `.json` file must have the vocabulary size of Llama 3.1.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file", "it was given as --tokenizer", "check the name")
    if path.suffix != ".json":
        model = corpus.load_sentencepiece(path)
        return model.encode, model.vocab_size()
    tokenizer = corpus.load_tokenizer_json(path)
    size = tokenizer.get_vocab_size()
    expected = CLOSED.shape.vocab_size
    if size != expected:
        raise DataError(
            f"{path}: expected a vocabulary of {expected:,} tokens, got {size:,}",
            "the file belongs to another model: its ids mean other words",
            "use Llama 3.1's tokenizer.json",
        )

    def encode(texts: list[str]) -> list[list[int]]:
        # One by one: a batch would start threads, and each worker has one core.
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    return encode, size
