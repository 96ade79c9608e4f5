"""Training text of the miniature model: the documentation inside Python's standard library.

It needs no download. There are three kinds of documents:

- the signature and docstring of a module, class or function
- a block of comment lines
- a topic of `pydoc_data`, the language reference that `help()` shows; some distributions omit it

Together the documents are 3 MB of English and Python. They are the same in every run with one
Python version. Another version has slightly different texts, and so slightly different losses.

Standard library only, except the functions that train or load a tokenizer.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import io
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.atomic_write import write_whole
from common.errors import ConfigError, DataError, RunError, first_line
from common.packages import pip_install
from common.paths import open_regular

# Folders that are separate packages on Debian, contain tests instead of prose, or are not part of
# Python (site-packages).
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "distutils",
    "tkinter",
    "turtledemo",
    "pydoc_data",
}
MIN_CHARACTERS = 60  # per document; shorter docstrings and comments are skipped
MIN_CORPUS_CHARACTERS = 1_000_000
VALIDATION_CHARACTERS = 150_000  # about 45,000 tokens; the miniature evaluates on the first 8,193
LONGEST_LINE = 4192  # bytes, the default of SentencePiece's max_sentence_length
COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)
COMMENT_MARK = re.compile(r"^[ \t]*#+!?:? ?", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """A text of the corpus and where it comes from."""

    source: str  # module or topic; each is in either training or validation, never in both
    text: str


def documents(stdlib: Path | None = None) -> list[Document]:
    """Return the documents of the standard library without duplicates, ordered by SHA-256.

    Raises DataError if fewer than a million characters are found, as on a Python without its
    library sources.
    """
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    by_text: dict[str, Document] = {}
    for document in (*module_documents(root), *_topic_documents()):
        # A text that occurs twice must not be in both training and validation.
        by_text.setdefault(document.text, document)
    characters = sum(map(len, by_text))
    if characters < MIN_CORPUS_CHARACTERS:
        raise DataError(
            f"{root}: expected at least {MIN_CORPUS_CHARACTERS} characters of documentation, "
            f"got {characters}",
            "this Python has no sources of its standard library "
            "(a minimal or compiled-only install)",
            "use a full Python, e.g. Debian's python3 instead of python3-minimal",
        )
    return sorted(
        by_text.values(), key=lambda document: hashlib.sha256(document.text.encode()).digest()
    )


def split(
    corpus: list[Document], validation_characters: int = VALIDATION_CHARACTERS
) -> tuple[list[str], list[str]]:
    """Return (training texts, validation texts), each in the order of `corpus`."""
    held_out = held_out_sources(corpus, validation_characters)
    train = [document.text for document in corpus if document.source not in held_out]
    return train, [document.text for document in corpus if document.source in held_out]


def held_out_sources(
    corpus: list[Document], validation_characters: int = VALIDATION_CHARACTERS
) -> set[str]:
    """Return the names of the modules and topics that are held out for validation.

    Whole modules are held out, in the order of their names' SHA-256, until there are enough
    characters. Texts of one file resemble each other, so splitting a module would put nearly the
    same text into both sets.
    """
    sizes: dict[str, int] = {}
    for document in corpus:
        sizes[document.source] = sizes.get(document.source, 0) + len(document.text)
    held_out: set[str] = set()
    characters = 0
    for source in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if characters >= validation_characters:
            break
        # Otherwise one large module could be most of the validation set.
        if sizes[source] <= validation_characters // 10:
            held_out.add(source)
            characters += sizes[source]
    return held_out


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a BPE vocabulary of exactly `vocab_size` pieces on `texts` and write it to `path`.

    The same texts always give the same file, byte for byte. Ids 0, 1, 2 are unk, bos, eos, as in
    Llama 2. 256 byte pieces follow, so every text can be encoded and decoding restores it exactly
    (no normalization, no dummy prefix). Line ends become the byte piece <0x0A>.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_non_empty_lines(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        num_threads=1,
        minloglevel=2,
    )
    write_whole(path, model.getvalue())


def _non_empty_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts, cut into pieces of at most LONGEST_LINE, before spaces if it has.

    SentencePiece would leave out a longer line without a message.
    """
    for text in texts:
        for line in filter(None, text.splitlines()):
            data = line.encode()
            begin = 0
            while len(data) - begin > LONGEST_LINE:
                end = data.rfind(b" ", begin + 1, begin + LONGEST_LINE + 1)
                if end < 0:
                    end = begin + LONGEST_LINE
                    while data[end] & 0xC0 == 0x80:  # inside a character
                        end -= 1
                yield data[begin:end].decode()
                begin = end
            yield data[begin:].decode()


def load_sentencepiece(path: Path) -> Any:
    """Return the tokenizer at `path`, a `sentencepiece.SentencePieceProcessor`.

    Raises DataError if the file is missing or is not a SentencePiece model.
    """
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    try:
        with open_regular(path) as file:
            model.LoadFromSerializedProto(file.read())
        return model
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{path}: expected a SentencePiece model: {error}",
            "the file is missing or has another format; Llama 3's tokenizer.model, for example, is "
            "a tiktoken list of base64 lines, which this package does not read",
            "use a SentencePiece model, or the tokenizer.json next to Llama 3's tokenizer.model",
        ) from error


@contextmanager
def damage_named(what: Callable[[BaseException], str], why: str, do: str) -> Iterator[None]:
    """Raise DataError for any error of a library that reads a tokenizer.

    `what`: returns the first line of the DataError. Errors of this project pass unchanged.
    """
    try:
        yield
    except (RunError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # damaged rules raise anything, and a panic is no Exception
        raise DataError(what(error), why, do) from error


def load_tokenizer_json(path: Path) -> Any:
    """Return the tokenizer at `path`, a `tokenizers.Tokenizer` without truncation and padding.

    Raises ConfigError without the package tokenizers, DataError if the file is not a tokenizer's.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        why = "the package tokenizers, which reads it, cannot be imported"
        raise ConfigError(f"{path}: {error}", why, pip_install("tokenizers")) from error
    with damage_named(
        lambda error: f"{path}: expected a tokenizer.json: {first_line(error)}",
        "it is missing, damaged, or another file of that name",
        "fetch the model's tokenizer.json again",
    ):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # truncation and padding may be stored in the file
    tokenizer.no_padding()
    return tokenizer


def module_documents(root: Path) -> Iterator[Document]:
    """Yield the docstrings and comment blocks of all modules below `root`."""
    for name, source, tree in modules(root):
        for text in (*_docstrings(tree, name), *_comments(source)):
            if len(text) >= MIN_CHARACTERS:
                yield Document(name, text)


def modules(root: Path | None = None) -> Iterator[tuple[str, str, ast.Module]]:
    """Yield (dotted name, source text, syntax tree) of each module below `root`, sorted by path.

    `root`: defaults to the standard library.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT.intersection(parts):
            continue
        try:
            with tokenize.open(path) as file:  # honors the encoding declaration (PEP 263)
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # a template, or an intentionally invalid sample
        yield ".".join(parts), source, tree


def _docstrings(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield `module.Class.method(arguments)`, an empty line and the docstring, as `help()` does."""
    stack: list[tuple[ast.AST, str]] = [(tree, module)]
    while stack:
        node, name = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= MIN_CHARACTERS:
                arguments = ""
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    arguments = f"({ast.unparse(node.args)})"
                yield f"{name}{arguments}\n\n{text}\n"
        for child in ast.iter_child_nodes(node):
            child_name = name
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                child_name = f"{name}.{child.name}"
            stack.append((child, child_name))


def _comments(source: str) -> Iterator[str]:
    for block in COMMENT_BLOCK.finditer(source):
        yield COMMENT_MARK.sub("", block.group())


def _topic_documents() -> Iterator[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return  # Debian's minimal Python omits the topics. The other documents suffice.
    for name, text in sorted(topics.items()):
        yield Document(f"pydoc_data.{name}", text)
