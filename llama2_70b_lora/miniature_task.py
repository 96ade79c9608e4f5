"""Task of the miniature: a small version of GovReport, made from Python's standard library.

The source of a function or class without its docstring is the report. The first paragraph of the
docstring is the summary. The base has read such sentences, but neither code before them nor the
prompt around it, so the adapters have something to learn. Modules held out for validation are in
neither training set.

Packing and labels follow the reference (mlcommons/training, llama2_70b_lora/scripts/utils.py):
prompt template, answer, eos. Examples longer than a sequence are left out. The others are
concatenated and cut into sequences across documents. Training counts every token. Validation masks
each document's prompt and its last token.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from common.data import corpus
from llama2_70b_lora.data import IGNORE_INDEX

PROMPT = "### Document the following source:\n{source}\n### Docstring:\n"
MIN_ANSWER = 20  # characters; shorter docstrings contain nothing to learn
MAX_LINES = 60  # lines of source without its docstring; a sequence has some 700 characters

Pair = tuple[str, str]  # source, answer


@dataclass(frozen=True)
class LibraryTexts:
    """Texts of the standard library. No module is in both training and validation."""

    documentation: list[str]  # training texts of the base
    train: list[Pair]
    validation: list[Pair]


@cache  # takes 7 s, and both steps of `prepare miniature` use it
def library_texts() -> LibraryTexts:
    """Return the texts of the running Python. Raises DataError if it has too few."""
    documents = corpus.documents()
    documentation, _ = corpus.split(documents)
    train, validation = documented_code(corpus.held_out_sources(documents))
    return LibraryTexts(documentation, train, validation)


def documented_code(held_out: set[str]) -> tuple[list[Pair], list[Pair]]:
    """Return the (source, answer) pairs for training and for validation.

    Each source occurs once. The pairs are ordered by the SHA-256 of their sources. A source is a
    function or class of the standard library as `ast.unparse` writes it, without its docstring and
    without comments.
    """
    answers: dict[str, tuple[str, bool]] = {}
    for module, _, tree in corpus.modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            answer = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
            if len(answer) >= MIN_ANSWER and _lines(node) - _lines(node.body[0]) <= MAX_LINES:
                node.body = node.body[1:] or [ast.Pass()]  # the docstring is the first statement
                # If the same source occurs twice, only the first counts.
                answers.setdefault(ast.unparse(node), (answer, module in held_out))
    order = sorted(answers, key=lambda source: hashlib.sha256(source.encode()).digest())
    train: list[Pair] = []
    validation: list[Pair] = []
    for source in order:
        answer, is_held_out = answers[source]
        split = validation if is_held_out else train
        split.append((source, answer))
    return train, validation


def _lines(node: ast.stmt) -> int:
    """Return the number of lines of a statement, minus one."""
    return (node.end_lineno or node.lineno) - node.lineno


def pack(pairs: list[Pair], tokenizer: Any, sequence_length: int, mask_prompts: bool) -> np.ndarray:
    """Pack the pairs into sequences, int32 [rows, 2, sequence]: ids and unshifted labels.

    The labels follow Hugging Face's convention (data.py).

    `mask_prompts`: the loss does not count prompts and the last token of a document.
    """
    bos = [tokenizer.bos_id()]
    eos = [tokenizer.eos_id()]
    prompts = tokenizer.encode([PROMPT.format(source=source) for source, _ in pairs])
    answers = tokenizer.encode([answer for _, answer in pairs])
    ids: list[int] = []
    labels: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        document = bos + prompt + answer + eos
        if len(document) > sequence_length:
            continue
        ids += document
        if mask_prompts:
            labels += [IGNORE_INDEX] * len(bos + prompt)
            labels += answer
            labels += [IGNORE_INDEX]
        else:
            labels += document
    rows = len(ids) // sequence_length
    packed = np.array([ids[: rows * sequence_length], labels[: rows * sequence_length]], np.int32)
    packed = packed.reshape(2, rows, sequence_length).transpose(1, 0, 2)
    # A row with only a prompt has no loss.
    return packed[(packed[:, 1, 1:] != IGNORE_INDEX).any(axis=1)]
