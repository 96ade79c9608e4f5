"""Build the miniature: a base, trained in a minute, and the data of miniature_task.py.

The base is a Llama of 1.3 million parameters. It is trained on the documentation in Python's
standard library, with the corpus, optimizer and step of the 8B's miniature.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.data import corpus
from common.data.manifest import PairFacts, sha256_of
from common.data.preparation import Recipe, build_once
from common.errors import StorageError
from common.model.checkpoint_names import FUSED, SINGLE, parts_of
from common.model.checkpoint_writer import write_file
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.linear_layers import LinearLayers
from common.model.llama import Llama
from common.sharding.adamw import AdamW, AdamWSettings
from common.sharding.processes import start_processes
from common.sharding.replicated import ReplicatedOptimizer
from common.terminal import Progress
from common.training.assembly import Assembly, Batching
from common.training.loop import next_token_pairs, train_step
from common.training.schedules import warmup_cosine
from llama2_70b_lora.data import check_rows, write_rows
from llama2_70b_lora.miniature_task import library_texts, pack
from llama2_70b_lora.rules import DATA_FILES, MINIATURE, Rules

# Raise it when texts, packing or the base's training change: existing files are then rebuilt.
RECIPE = 1
TOKENIZER = "tokenizer.model"
BASE_MANIFEST = Path(MINIATURE.manifests[0]).name
DATA_MANIFEST = Path(MINIATURE.manifests[1]).name

# 655,360 tokens of documentation, 0.7 of a pass: under a minute on two cores. With 410,000 tokens
# attention has learned too little for adapters to change: they gained 0.1 nats instead of 0.3.
# Sequences of 64 instead of 128 made the base 0.08 nats better.
BASE_STEPS = 320
BASE_BATCH = 32
BASE_SEQUENCE = 64
BASE_LEARNING_RATE = 4e-3
BASE_WARMUP_STEPS = 20
BASE_SEED = 1
INIT_STD = 0.02
# Number of training sources in the vocabulary's text. Without code in it, the loss is 0.1 nats
# worse and more pairs are too long.
VOCABULARY_SOURCES = 1500


def build(data_dir: Path) -> None:
    """Build the base in `data_dir`/base and the data in `data_dir`, unless they are complete.

    There are two recipes, so that the base is not trained again if the build of the data is
    interrupted, or if the data are damaged.
    """
    base = data_dir / "base"
    library = f"of the standard library of Python {platform.python_version()}"
    size = MINIATURE.shape.vocab_size
    source = f"documentation {library}, recipe {RECIPE}"
    base_recipe = Recipe(
        title="miniature base",
        source=source,
        vocab_size=size,
        files=(TOKENIZER, SINGLE),
        manifest=BASE_MANIFEST,
    )
    build_once(base, base_recipe, _build_base)
    source = f"documented code {library}, recipe {RECIPE}, tokenizer {sha256_of(base / TOKENIZER)}"
    data_recipe = Recipe(
        title="miniature data",
        source=source,
        vocab_size=size,
        files=tuple(DATA_FILES.values()),
        manifest=DATA_MANIFEST,
    )
    build_once(data_dir, data_recipe, _build_data)


def _build_base(folder: Path) -> dict[str, PairFacts]:
    """Train the tokenizer and the base. Raises StorageError if `folder` has other weights."""
    others = [path for path in folder.glob("*.safetensors") if path.name != SINGLE]
    if others:
        raise StorageError(
            f"{folder}: contains other weights: {others[0].name}",
            "this command did not write them, or an earlier version did",
            "remove them, or choose another folder",
        )
    texts = library_texts()
    sources = [source for source, _ in texts.train[:VOCABULARY_SOURCES]]
    corpus.train_sentencepiece(
        [*texts.documentation, *sources], MINIATURE.shape.vocab_size, folder / TOKENIZER
    )
    model = train_base(texts.documentation, corpus.load_sentencepiece(folder / TOKENIZER))
    tensors: dict[str, Tensor] = {}
    # In bf16 and with fused projections, as in MLCommons' checkpoint.
    for name, parts in parts_of(model.shape, FUSED).items():
        rows = model.get_parameter(name).detach().bfloat16().split([part.rows for part in parts])
        for part, values in zip(parts, rows, strict=True):
            tensors[part.name] = values
    write_file(folder / SINGLE, tensors)
    return {}


def _build_data(data_dir: Path) -> dict[str, PairFacts]:
    tokenizer = corpus.load_sentencepiece(data_dir / "base" / TOKENIZER)
    texts = library_texts()
    for split, pairs, count in (
        ("train", texts.train, MINIATURE.train_samples),
        ("validation", texts.validation, MINIATURE.eval_samples),
    ):
        mask_prompts = split == "validation"
        rows = pack(pairs, tokenizer, MINIATURE.sequence_length, mask_prompts)[:count]
        check_rows(rows, split, MINIATURE, f"the {split} rows made of this Python's library")
        write_rows(data_dir, split, rows)
    return {}


def train_base(texts: list[str], tokenizer: Any, rules: Rules = MINIATURE) -> Llama:
    """Return a Llama of the rules' shape, fp32 on the CPU, trained on `texts`.

    The weights are the same for the same machine and thread count.
    """
    model = fused_llama(rules.shape, rules.sequence_length)
    init_weights(model, rules.shape.num_layers, BASE_SEED, INIT_STD, copy_weight)
    alone = not torch.distributed.is_initialized()
    processes = start_processes("cpu", 60.0)
    settings = AdamWSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    make_rule = partial(AdamW, settings, "reference", torch.float32)
    assembly = Assembly(
        model, ReplicatedOptimizer(model.parameters(), processes, make_rule), LinearLayers()
    )
    lr_at = warmup_cosine(
        BASE_LEARNING_RATE, BASE_LEARNING_RATE / 20, BASE_WARMUP_STEPS, BASE_STEPS
    )
    batches = base_batches(texts, tokenizer)
    batching = Batching(BASE_BATCH, 1)
    with Progress("training the base", BASE_STEPS, "steps") as progress:
        for step in range(BASE_STEPS):
            train_step(assembly, batches, batching, lr_at(step), processes)
            progress.advance(1)
    if alone:
        torch.distributed.destroy_process_group()
    return model


def base_batches(texts: list[str], tokenizer: Any) -> Iterator[Tensor]:
    """Yield int32 [batch, 2, sequence] without end.

    The texts, each between bos and eos, are concatenated, cut into sequences and put in random
    order.
    """
    bos = tokenizer.bos_id()
    eos = tokenizer.eos_id()
    ids: list[int] = []
    for ids_of_text in tokenizer.encode(texts):
        ids += [bos, *ids_of_text, eos]
    stream = np.array(ids, np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(stream, BASE_SEQUENCE + 1)[::BASE_SEQUENCE]
    random = np.random.RandomState(BASE_SEED)
    while True:
        order = random.permutation(len(windows))
        for start in range(0, len(order) - BASE_BATCH + 1, BASE_BATCH):
            yield torch.from_numpy(next_token_pairs(windows[order[start : start + BASE_BATCH]]))
