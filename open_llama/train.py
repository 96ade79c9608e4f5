"""Run of `open_llama`: build the objects and pass them to the loop.

torchrun starts one process per GPU:

    python -m open_llama.train --run-dir RUN_DIR --data-dir DATADIR --config-name NAME --seed N
        --device cuda|cpu [--checkpoint WHEN] [--continue RUN]

The process reads RUN_DIR/config.toml, which the launcher wrote. It runs the self-test, builds the
objects, warms up on synthetic tokens, starts the clock and opens the data. At the end it writes
RUN_DIR/model in Hugging Face's format, or with LoRA RUN_DIR/adapter in peft's format.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.data.indexed_dataset import Index
from common.data.prefetch import Prefetcher
from common.errors import DataError, listed
from common.kernels.attention import attention_backends
from common.model import saved_model
from common.model.checkpoint_loader import load_base, load_weights
from common.model.initialization import init_weights
from common.model.llama import Llama
from common.model.lora import AdapterSettings
from common.self_test.run import run_self_test
from common.sharding.frozen_base import FrozenBase
from common.sharding.processes import Processes
from common.sharding.zero import ZeroOptimizer
from common.training import full_training, timed_run
from common.training.assembly import Assembly
from common.training.build import DTYPES
from common.training.continuation import data_record
from common.training.full_training import assemble_full
from common.training.loop import rank_micro_batches
from common.training.lora_training import (
    assemble_lora,
    base_fingerprints,
    load_random,
    save_adapter,
)
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import warmup_constant, warmup_cosine, warmup_linear
from open_llama.base_config import copy_generation_config, kept_entries
from open_llama.data import (
    epochs_text,
    padding_share,
    sequences_in,
    training_batches,
    validation_pairs,
)
from open_llama.rules import BENCHMARK, Config, Rules, in_repository, rules_of
from open_llama.tokenizer import copy_tokenizer, tokenizer_files


def high_priority_compute(config: Config) -> bool:
    """Return whether compute kernels run on a high-priority stream (see full_training.py)."""
    return not config.lora_rank and full_training.high_priority_compute(config)


def adapter_settings(config: Config) -> AdapterSettings:
    """Return the settings of the adapters that the config sets."""
    return AdapterSettings(config.lora_rank, config.lora_alpha, config.lora_dropout)


def assemble(
    config: Config, rules: Rules, processes: Processes, seed: int
) -> tuple[Assembly, FrozenBase | None]:
    """Return (model and optimizer, frozen base). The base is None unless the config sets LoRA."""
    if not config.lora_rank:
        fill = partial(fill_masters, config, rules, seed)
        return assemble_full(config, rules, processes, fill), None
    folder = in_repository(config.weights)

    def load(model: Llama, base: FrozenBase) -> None:
        load_base(model, folder, frozen=base)

    return assemble_lora(config, rules, adapter_settings(config), processes, seed, load)


def fill_masters(
    config: Config, rules: Rules, seed: int, model: Llama, optimizer: ZeroOptimizer
) -> None:
    """Set all fp32 masters from the checkpoint that the config names, or to random values."""
    if config.weights:
        load_weights(model, in_repository(config.weights), optimizer.set_weight)
    else:
        layers = rules.shape.num_layers
        init_weights(model, layers, seed, config.init_std, optimizer.set_weight)


def assemble_random(config: Config, rules: Rules, processes: Processes, seed: int) -> Assembly:
    """Assemble with random weights, for the speed measurements of `throughput`."""
    if config.lora_rank:
        settings = adapter_settings(config)
        return assemble_lora(config, rules, settings, processes, seed, load_random)[0]

    def fill_random(model: Llama, optimizer: ZeroOptimizer) -> None:
        init_weights(model, rules.shape.num_layers, seed, config.init_std, optimizer.set_weight)

    return assemble_full(config, rules, processes, fill_random)


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


def run_rank(run: Run, reports: Reports) -> None:
    """Do a run on one rank, from the first line of the log to the last."""
    config = run.config
    assert isinstance(config, Config)
    rules = rules_of(config)
    saved_model.require_absent(run.run_dir)
    entries = kept_entries(config, run.data_dir)  # now: the base may be gone at the end
    processes = timed_run.start(run, reports, high_priority_compute(config))
    index = Index.read(run.data_dir / rules.train_data)
    tokenizer = data_record(run.data_dir, tokenizer_files(run.data_dir))
    timed_run.log_submission(run, reports.log, rules, sequences_in(config, index))
    reports.progress.show(epochs_text(config, index))
    # For dropout and stochastic rounding, which must differ between the ranks.
    torch.manual_seed(run.seed + processes.rank)
    with attention_backends(processes.device.type, DTYPES[config.precision]):
        run_self_test(config, rules, processes, reports)
        assembly, base = assemble(config, rules, processes, run.seed)
        before = base_fingerprints(assembly.model, base) if base else []
        reports.phase_done("init")

        def save() -> None:
            if base:
                settings = adapter_settings(config)
                folder = in_repository(config.weights)
                save_adapter(run, reports, assembly.model, settings, base, before, folder)
            elif run.rank == 0:
                on_tensor = partial(reports.heartbeat.write, reports.step, "save")
                folder = saved_model.save_model(assembly.model, run.run_dir, on_tensor, entries)
                copy_generation_config(config, folder)
                require_same_tokenizer(tokenizer, run.data_dir, folder)
                copy_tokenizer(run.data_dir, folder)

        open_tokens = partial(open_data, run, rules, processes)
        lr_at = learning_rate(config)
        padding = padding_share(config, index)
        timed_run.train(run, reports, assembly, rules, lr_at, processes, open_tokens, save, padding)


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


def open_data(
    run: Run, rules: Rules, processes: Processes, step: int
) -> tuple[Prefetcher, list[Tensor]]:
    """Open the token files and return (training, evaluation) micro-batches of this rank.

    The training micro-batches begin at `step` and are read ahead. Both kinds are on the device.
    Call it after the clock has started.
    """
    config = run.config
    assert isinstance(config, Config)
    batches = training_batches(config, rules, run.data_dir, run.seed, processes.rank, step)
    validation = validation_pairs(config, rules, run.data_dir)
    eval_batches = rank_micro_batches(validation, processes, config.eval_micro_batch_size)
    return Prefetcher(batches, processes.device), eval_batches


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, Config, run_rank)
