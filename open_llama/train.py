"""Run of `open_llama` on one rank (arguments: common/training/timed_run.py).

It trains all weights or, with the config's `lora_rank`, adapters on a frozen base. At the end it
writes RUN_DIR/model in Hugging Face's format, or RUN_DIR/adapter in peft's format.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from common.data.indexed_dataset import Index
from common.model import saved_model
from common.model.checkpoint_loader import load_weights
from common.model.llama import Llama
from common.sharding.processes import Processes
from common.sharding.zero import ZeroOptimizer
from common.training import timed_run
from common.training.continuation import data_record
from common.training.finetuning import finetune
from common.training.pretraining import pretrain
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import warmup_constant, warmup_cosine, warmup_linear
from open_llama.base_config import copy_generation_config, kept_entries
from open_llama.data import (
    counted_tokens,
    epochs_text,
    padding_share,
    sequences_in,
    training_batches,
    validation_pairs,
)
from open_llama.rules import BENCHMARK, Config, Rules, in_repository, rules_of
from open_llama.tokenizer import copy_tokenizer, require_same_tokenizer, tokenizer_files


def run_rank(run: Run, reports: Reports) -> None:
    """Do a run on one rank, from the first line of the log to the last."""
    config = run.config
    assert isinstance(config, Config)
    rules = rules_of(config)
    saved_model.require_absent(run.run_dir)
    entries = kept_entries(config, run.data_dir)  # now: the base may be gone at the end
    processes = timed_run.start(run, reports, rules)
    index = Index.read(run.data_dir / rules.train_data)
    tokenizer = data_record(run.data_dir, tokenizer_files(run.data_dir))
    timed_run.log_submission(run, reports.log, rules, sequences_in(config, index))
    reports.progress.show(epochs_text(config, index))
    lr_at = learning_rate(config)
    open_tokens = partial(open_data, run, rules, processes)
    padding = padding_share(config, index)

    def add_tokenizer(folder: Path) -> None:
        require_same_tokenizer(tokenizer, run.data_dir, folder)
        copy_tokenizer(run.data_dir, folder)

    if config.lora_rank:
        finetune(run, reports, rules, processes, lr_at, open_tokens, padding, add_tokenizer)
        return
    fill = partial(load_masters, in_repository(config.weights)) if config.weights else None

    def save(model: Llama) -> None:
        folder = saved_model.save_model(model, run.run_dir, reports.saving, entries)
        copy_generation_config(config, folder)
        add_tokenizer(folder)

    pretrain(run, reports, rules, processes, lr_at, open_tokens, fill, save, padding)


def load_masters(folder: Path, model: Llama, optimizer: ZeroOptimizer) -> None:
    """Set all fp32 masters from the checkpoint in `folder`."""
    load_weights(model, folder, optimizer.set_weight)


def learning_rate(config: Config) -> Callable[[int], float]:
    """Return lr_at(step), with steps counted from 0: linear warm-up, then the config's schedule."""
    base = config.opt_base_learning_rate
    warmup = config.opt_learning_rate_warmup_steps
    steps = config.steps
    end = base * config.end_learning_rate_ratio
    if config.schedule == "cosine":
        return warmup_cosine(base, end, warmup, steps)
    if config.schedule == "linear":
        return warmup_linear(base, end, warmup, steps)
    return warmup_constant(base, warmup)


def open_data(
    run: Run, rules: Rules, processes: Processes, step: int
) -> tuple[Iterator[np.ndarray], np.ndarray, Iterator[int] | None]:
    """Open the token files (see `timed_run.OpenData`)."""
    config = run.config
    assert isinstance(config, Config)
    batches = training_batches(config, rules, run.data_dir, run.seed, processes.data_rank, step)
    counted = None
    if rules.counts_answers(run.data_dir):
        counted = counted_tokens(config, rules, run.data_dir, run.seed, step)
    return batches, validation_pairs(config, rules, run.data_dir), counted


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, run_rank)
