"""One step of open_llama on conversations, on one rank or one of several."""

import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common import config as configs
from common.data.indexed_dataset_header import mask_path
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.data.prefetch import Prefetcher
from common.model.checkpoint_loader import load_base
from common.model.lora import adapter_parameters
from common.sharding.context_parallel import context_group
from common.training.assembly import Batching
from common.training.finetuning import assemble_lora
from common.training.loop import evaluate, rank_micro_batches, train_step
from common.training.pretraining import assemble_full
from open_llama.rules import Config, rules_of
from open_llama.train import load_masters, open_data

LENGTH, VOCAB, BATCH = 24, 61, 4
# (tokens, those that count) of each document. The last two have none within the length.
DOCUMENTS = [(9, [8]), (25, range(5, 25)), (40, range(20, 40)), (12, [3, 4, 9]), (30, [27, 28])]
DOCUMENTS += [(7, [])]
RUN = {
    "gpu": "CPU",
    "one_document_per_sequence": True,
    "sequence_length": LENGTH,
    "global_batch_size": BATCH,
    "max_samples": 64,
    "eval_samples": 3,
    "eval_interval_samples": 64,
    "opt_base_learning_rate": 1e-3,
    "schedule": "constant",
    "opt_learning_rate_warmup_steps": 0,
    "weight_decay": 0.0,
    "gradient_clip_norm": 1e9,
}


def write_documents(folder: Path) -> None:
    """Write DOCUMENTS as the token files of both splits, with masks."""
    random = np.random.default_rng(0)
    for split in ("train", "validation"):
        writer = IndexedDatasetWriter(folder / split, VOCAB)
        masks = []
        for length, counted in DOCUMENTS:
            writer.add(random.integers(VOCAB, size=length))
            masks.append(np.isin(np.arange(length), list(counted)).astype(np.uint8))
        writer.finish()
        mask_path(folder / split).write_bytes(np.concatenate(masks).tobytes())


def one_step(processes, folder: Path) -> dict:
    """Return this rank's part of the loss, the gradients of the adapters, their norm, and the
    evaluation before the step.

    `folder`: has the weights, the data and the keys of the config in run.json.
    """
    table = RUN | {"model": str(folder), "weights": str(folder)}
    table |= json.loads((folder / "run.json").read_text())
    config = configs.from_table(table, Config, "test")
    size = config.context_parallel
    if size > 1:
        group = context_group(processes.rank, processes.world_size, size, 60.0)
        processes = replace(processes, context=group)
    rules = rules_of(config)
    run = Namespace(config=config, data_dir=folder, seed=1)

    def load(model, base):
        load_base(model, folder, frozen=base)

    if config.lora_rank:
        assembly, _ = assemble_lora(config, rules, processes, 1, load)
        adapters = adapter_parameters(assembly.model)
        with torch.no_grad():  # B is 0, which would leave A without gradients
            for name, parameter in adapters.items():
                parameter.copy_(torch.load(folder / "adapters.pt")[name])
    else:
        assembly = assemble_full(config, rules, processes, partial(load_masters, folder))
        adapters = {}
    arrays, validation, counted = open_data(run, rules, processes, 0)
    eval_batches = rank_micro_batches(validation, processes, config.eval_micro_batch_size)
    evaluation = evaluate(assembly.model, eval_batches, processes, per_token=True)
    batching = Batching(BATCH, config.gradient_accumulation_steps, counted)
    gradients = []
    rule = assembly.optimizer.rule
    update = rule.update
    rule.update = lambda found, *rest: (
        gradients.extend(each.clone() for each in found),
        update(found, *rest),
    )
    loss, norm = train_step(
        assembly, Prefetcher(arrays, processes.device), batching, 1e-3, processes
    )
    result = {"loss": loss, "norm": norm, "evaluation": torch.tensor(evaluation)}
    return result | dict(zip(adapters, gradients, strict=False))
