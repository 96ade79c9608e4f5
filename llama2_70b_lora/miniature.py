"""The miniature's base and its fine-tuning task, both of the text inside Python's own standard library.

The base is a Llama of 1.3 million parameters, trained here for a minute on documentation, with the 8B miniature's corpus,
vocabulary, optimizer and step. The task is GovReport's in small: a function's or class's source, without its docstring, is the
report, and the first paragraph of its docstring the summary. The base has read such sentences but never code in front of
them, nor the prompt around it: the adapters have something to learn. Modules held out for validation are in neither training set.

Packing and labels are those of the reference (mlcommons/training, llama2_70b_lora/scripts/utils.py): prompt template, answer, eos;
longer than a sequence: left out; the rest concatenated and cut into sequences, across documents. Training counts every token;
validation masks each document's prompt and its last token.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor

from common.data import corpus
from common.data.preparation import Bar
from common.errors import DataError
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.llama import Llama
from common.sharding.adamw import AdamWSettings
from common.sharding.processes import start_processes
from common.sharding.replicated import ReplicatedOptimizer
from common.training.build import Assembly
from common.training.loop import Batching, next_token_pairs, train_step
from common.training.schedules import warmup_cosine
from llama2_70b_lora.data import IGNORE_INDEX, all_masked
from llama2_70b_lora.rules import MINIATURE, Rules

# 655,360 tokens of documentation, 0.7 of a pass: under a minute on two cores. Fewer leave a base whose attention has nothing to
# adapt yet: after 410,000, adapters gained 0.1 nats, after these 0.3. Sequences of 64 instead of 128 made the base 0.08 better.
BASE_STEPS = 320
BASE_BATCH = 32
BASE_SEQUENCE = 64
BASE_LEARNING_RATE = 4e-3
BASE_WARMUP_STEPS = 20
BASE_SEED = 1
INIT_STD = 0.02

PROMPT = "### Document the following source:\n{source}\n### Docstring:\n"
MIN_ANSWER = 20  # characters: shorter docstrings say nothing to learn
MAX_LINES = 60  # of source without its docstring; a sequence holds some 700 characters
VOCABULARY_SOURCES = 1500  # of those to train with, for a vocabulary that knows code: 0.1 nats and fewer pairs left out

Pair = tuple[str, str]  # source, answer


@dataclass(frozen=True)
class LibraryTexts:
    """What the standard library gives: no module is in both of training and validation."""

    documentation: list[str]  # to train the base on
    train: list[Pair]
    validation: list[Pair]


@cache  # both steps of `prepare miniature` want it: 7 s
def library_texts() -> LibraryTexts:
    documents = corpus.documents()
    documentation, _ = corpus.split(documents)
    return LibraryTexts(documentation, *documented_code(corpus.held_out_sources(documents)))


def train_tokenizer(texts: LibraryTexts, path: Path, rules: Rules = MINIATURE) -> Any:
    """A SentencePiece vocabulary of documentation and code at `path`, loaded."""
    sources = [source for source, _ in texts.train[:VOCABULARY_SOURCES]]
    corpus.train_sentencepiece([*texts.documentation, *sources], rules.shape.vocab_size, path)
    return corpus.load_sentencepiece(path)


# ---- the base


def train_base(texts: list[str], tokenizer: Any, rules: Rules = MINIATURE) -> Llama:
    """A Llama of the rules' shape, fp32 on the CPU, trained on `texts`. The same weights for the same machine and thread count."""
    model = fused_llama(rules.shape, rules.sequence_length)
    init_weights(model, rules.shape.num_layers, BASE_SEED, INIT_STD, copy_weight)
    alone = not torch.distributed.is_initialized()
    processes = start_processes("cpu", 60.0)
    settings = AdamWSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    assembly = Assembly(model, ReplicatedOptimizer(model.parameters(), processes, settings, "reference"), fp8=None)
    lr_at = warmup_cosine(BASE_LEARNING_RATE, BASE_LEARNING_RATE / 20, BASE_WARMUP_STEPS, BASE_STEPS)
    batches = base_batches(texts, tokenizer)
    bar = Bar("training the base", BASE_STEPS, "steps")
    for step in range(BASE_STEPS):
        train_step(assembly, batches, Batching(BASE_BATCH, 1), lr_at(step), processes)
        bar.at(step + 1)
    bar.finish()
    if alone:
        torch.distributed.destroy_process_group()
    return model


def base_batches(texts: list[str], tokenizer: Any) -> Iterator[Tensor]:
    """Endless int32 [batch, 2, sequence], in random order: all texts, each between bos and eos, one after the other."""
    bos, eos = tokenizer.bos_id(), tokenizer.eos_id()
    stream = np.fromiter((id_ for ids in tokenizer.encode(texts) for id_ in (bos, *ids, eos)), np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(stream, BASE_SEQUENCE + 1)[::BASE_SEQUENCE]
    random = np.random.RandomState(BASE_SEED)
    while True:
        order = random.permutation(len(windows))
        for start in range(0, len(order) - BASE_BATCH + 1, BASE_BATCH):
            yield torch.from_numpy(next_token_pairs(windows[order[start : start + BASE_BATCH]]))


@torch.no_grad()
def evaluation_loss(model: Llama, pairs: np.ndarray) -> float:
    """The benchmark's metric on int32 [rows, 2, sequence]: mean over the rows of each one's mean over the tokens that count."""
    losses = []
    for batch in torch.from_numpy(pairs).split(16):
        loss_sum, count = model(*batch.unbind(1))
        losses.append((loss_sum / count).double())
    return float(torch.cat(losses).mean())


# ---- the task


def documented_code(held_out: set[str]) -> tuple[list[Pair], list[Pair]]:
    """(source, answer) pairs to train and to validate with, each once, in an order fixed by the texts (their SHA-256).

    Source: a function or class of the standard library as `ast.unparse` writes it, without its docstring and without comments.
    """
    found: dict[str, tuple[str, bool]] = {}
    for module, _, tree in corpus.modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            answer = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
            if len(answer) >= MIN_ANSWER and _lines(node) - _lines(node.body[0]) <= MAX_LINES:
                node.body = node.body[1:] or [ast.Pass()]  # the docstring is the first statement
                found.setdefault(ast.unparse(node), (answer, module in held_out))  # in two places: only the first counts
    order = sorted(found, key=lambda source: hashlib.sha256(source.encode()).digest())
    train, validation = ([(source, found[source][0]) for source in order if found[source][1] is held] for held in (False, True))
    return train, validation


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def pack(pairs: list[Pair], tokenizer: Any, sequence_length: int, mask_prompts: bool) -> np.ndarray:
    """The pairs packed into sequences, int32 [rows, 2, sequence]: ids, and labels in Hugging Face's convention."""
    bos, eos = [tokenizer.bos_id()], [tokenizer.eos_id()]
    prompts = tokenizer.encode([PROMPT.format(source=source) for source, _ in pairs])
    answers = tokenizer.encode([answer for _, answer in pairs])
    ids: list[int] = []
    labels: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(bos + prompt + answer + eos) > sequence_length:
            continue
        ids += bos + prompt + answer + eos
        masked = [IGNORE_INDEX] * len(bos + prompt) + answer + [IGNORE_INDEX]
        labels += masked if mask_prompts else bos + prompt + answer + eos
    rows = len(ids) // sequence_length
    packed = np.array([ids[: rows * sequence_length], labels[: rows * sequence_length]], np.int32)
    packed = packed.reshape(2, rows, sequence_length).transpose(1, 0, 2)
    return packed[[not all_masked(row) for row in packed]]  # one that holds nothing but a prompt has no loss


def write_parquet(folder: Path, tokenizer: Any, texts: LibraryTexts, rules: Rules = MINIATURE) -> None:
    """The task in GovReport's layout: train- and validation-00000-of-00001.parquet, columns input_ids and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs, rows in (("train", texts.train, rules.train_samples), ("validation", texts.validation, rules.eval_samples)):
        packed = pack(pairs, tokenizer, rules.sequence_length, mask_prompts=split == "validation")
        if len(packed) < rows:
            raise DataError(
                f"only {len(packed)} {split} sequences of the {rows} that the miniature needs",
                "this Python's standard library has too little documented code",
                "use a full Python, e.g. Debian's python3 instead of python3-minimal",
            )
        columns = {name: list(packed[:rows, i]) for i, name in enumerate(("input_ids", "labels"))}
        path = folder / f"{split}-00000-of-00001.parquet"
        temporary = path.with_name(path.name + ".partial")
        parquet.write_table(pyarrow.table(columns), temporary)
        temporary.replace(path)
