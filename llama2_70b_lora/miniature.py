"""Build the miniature: a base, trained here for a minute, and the data of miniature_task.py.

The base is a Llama of 1.3 million parameters, trained on the documentation inside Python's own standard library with the corpus, optimizer
and step of the 8B's miniature.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.data import corpus
from common.data.manifest import Manifest, sha256_of
from common.data.preparation import Bar, Recipe, build_once, manifest_of, say
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_names import CONFIG, INDEX
from common.model.checkpoint_writer import save_base
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.llama import Llama
from common.sharding.adamw import AdamWSettings
from common.sharding.processes import start_processes
from common.sharding.replicated import ReplicatedOptimizer
from common.training.loop import Assembly, Batching, next_token_pairs, train_step
from common.training.schedules import warmup_cosine
from llama2_70b_lora.convert import LOCK, write_rows
from llama2_70b_lora.data import SIDECAR, GovReport, tokens_path, validation_pairs
from llama2_70b_lora.miniature_task import library_texts, packed_task, train_tokenizer
from llama2_70b_lora.rules import MINIATURE, Rules
from llama2_70b_lora.verify import SPLITS, RowSource

RECIPE = 1  # raise when texts, packing or the base's training change: existing files are then built again
TOKENIZER, BASE_MANIFEST = "tokenizer.model", "manifest.json"
BASE_SHARDS = 3
DATA_MANIFEST = "miniature-govreport.json"  # not the name of the 8B miniature's, which may be in the same folder

# 655,360 tokens of documentation, 0.7 of a pass: under a minute on two cores. With 410,000 tokens attention has learned too little for
# adapters to change: they gained 0.1 nats instead of 0.3. Sequences of 64 instead of 128 made the base 0.08 nats better.
BASE_STEPS = 320
BASE_BATCH = 32
BASE_SEQUENCE = 64
BASE_LEARNING_RATE = 4e-3
BASE_WARMUP_STEPS = 20
BASE_SEED = 1
INIT_STD = 0.02


def build(data_dir: Path) -> None:
    """The base in `data_dir`/base and the data in `data_dir`; nothing where they are complete.

    Two steps, so that the base is not trained again after an interruption of the second, or damage to its files.
    """
    base = data_dir / "base"
    build_once(base, _base_recipe(), _build_base)
    build_once(data_dir, _data_recipe(base), _build_data)


def _source(what: str) -> str:
    return f"{what} of the standard library of Python {platform.python_version()}, recipe {RECIPE}"


def _base_recipe() -> Recipe:
    shards = [f"model-{number:05d}-of-{BASE_SHARDS:05d}.safetensors" for number in range(1, BASE_SHARDS + 1)]
    files = (TOKENIZER, *shards, INDEX, CONFIG)
    return Recipe("miniature base", _source("documentation"), MINIATURE.shape.vocab_size, files, BASE_MANIFEST, ".base.lock")


def _build_base(folder: Path) -> Manifest:
    texts = library_texts()
    tokenizer = train_tokenizer(texts, folder / TOKENIZER)
    model = train_base(texts.documentation, tokenizer)
    save_base(model, folder, shards=BASE_SHARDS, dtype=torch.bfloat16)  # as MLCommons' checkpoint
    return manifest_of(folder, _base_recipe())


def _data_recipe(base: Path) -> Recipe:
    files = (SIDECAR, *(tokens_path(Path(), split).name for split in SPLITS))
    source = f"{_source('documented code')}, tokenizer {sha256_of(base / TOKENIZER)}"
    return Recipe("miniature data", source, MINIATURE.shape.vocab_size, files, DATA_MANIFEST, LOCK)


def _build_data(data_dir: Path) -> Manifest:
    base = data_dir / "base"
    recipe = _data_recipe(base)
    packed = packed_task(corpus.load_sentencepiece(base / TOKENIZER), library_texts())
    rows: dict[str, RowSource] = {split: ((f"{split} row {i}", row) for i, row in enumerate(array)) for split, array in packed.items()}
    write_rows(data_dir, recipe.source, rows, MINIATURE)
    model = fused_llama(MINIATURE.shape, MINIATURE.sequence_length)
    load_base(model, base, base / BASE_MANIFEST)
    loss = evaluation_loss(model, validation_pairs(GovReport.read(data_dir)))
    say(f"evaluation loss of the base alone: {loss:.4f}; the target for the adapters is {MINIATURE.target_loss}")
    return manifest_of(data_dir, recipe)


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
    """Endless int32 [batch, 2, sequence]: the texts, each between bos and eos, concatenated, cut, and in random order."""
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
    """The benchmark's metric on int32 [rows, 2, sequence]: the mean over the rows of a row's mean loss over the tokens that count."""
    losses = []
    for batch in torch.from_numpy(pairs).split(16):
        loss_sum, count = model(*batch.unbind(1))
        losses.append((loss_sum / count).double())
    return float(torch.cat(losses).mean())
