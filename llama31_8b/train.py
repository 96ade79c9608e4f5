"""Timed run of `llama31_8b`: build the objects and pass them to the loop.

torchrun starts one process per GPU:

    python -m llama31_8b.train --run-dir RUN_DIR --data-dir DATADIR --config-name NAME --seed N
        --device cuda|cpu [--checkpoint WHEN] [--continue RUN] [--save]

The process reads RUN_DIR/config.toml, which the launcher wrote. It runs the self-test, builds the
objects, warms up on synthetic tokens, starts the clock and opens the data. With --save, it writes
the model at the end (common/model/saved_model.py).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from common.data.gpt_dataset import TrainData, sequences_in, train_batches, validation_tokens
from common.data.prefetch import Prefetcher
from common.kernels.attention import attention_backends
from common.model.initialization import init_weights
from common.model.llama import Llama
from common.self_test.run import run_self_test
from common.sharding.processes import Processes
from common.sharding.zero import ZeroOptimizer
from common.training import timed_run
from common.training.assembly import Assembly
from common.training.build import DTYPES
from common.training.full_training import assemble_full, high_priority_compute
from common.training.loop import next_token_pairs, rank_micro_batches
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import warmup_cosine
from llama31_8b.rules import BENCHMARK, Config, Rules, rules_of


def assemble(config: Config, rules: Rules, processes: Processes, seed: int) -> Assembly:
    """Assemble model and optimizer. Every weight trains, from the random values of `seed`."""

    def fill_masters(model: Llama, optimizer: ZeroOptimizer) -> None:
        init_weights(model, rules.shape.num_layers, seed, rules.init_std, optimizer.set_weight)

    return assemble_full(config, rules, processes, fill_masters)


# `throughput` calls this name. Pre-training always starts from random weights.
assemble_random = assemble


def run_rank(run: Run, reports: Reports) -> None:
    """Do a timed run on one rank, from the first line of the log to the last."""
    config = run.config
    data_dir = run.data_dir
    seed = run.seed
    assert isinstance(config, Config)
    rules = rules_of(config)
    if run.save:
        from common.model import saved_model  # imported only by runs that need it

        saved_model.require_absent(run.run_dir)
    processes = timed_run.start(run, reports, high_priority_compute(config))
    # Reads document lengths from the .idx, which the rules allow before the clock starts. They do
    # not allow it for the tokens.
    train_samples = sequences_in(data_dir / rules.train_prefix, rules.sequence_length)
    timed_run.log_submission(run, reports.log, rules, train_samples)
    # For stochastic rounding in emulated formats: its errors cancel between ranks only if the
    # seeds differ.
    torch.manual_seed(seed + processes.rank)
    base = config.opt_base_learning_rate
    lr_at = warmup_cosine(
        base, rules.end_learning_rate(base), config.opt_learning_rate_warmup_steps, rules.max_steps
    )
    with attention_backends(processes.device.type, DTYPES[config.precision]):
        run_self_test(config, rules, processes, reports)
        assembly = assemble(config, rules, processes, seed)
        reports.phase_done("init")

        def save_model() -> None:
            if run.save and run.rank == 0:
                on_tensor = partial(reports.heartbeat.write, reports.step, "save")
                saved_model.save_model(assembly.model, run.run_dir, on_tensor)

        open_tokens = partial(open_data, config, rules, data_dir, seed, processes)
        timed_run.train(run, reports, assembly, rules, lr_at, processes, open_tokens, save_model)


def open_data(
    config: Config, rules: Rules, data_dir: Path, seed: int, processes: Processes, step: int
) -> tuple[Prefetcher, list[torch.Tensor]]:
    """Open the token files and return (training, evaluation) micro-batches of this rank.

    The training micro-batches begin at `step` and are read ahead. Both kinds are on the device.
    Call it after the clock has started.
    """
    vocab_size = rules.shape.vocab_size
    length = rules.sequence_length
    steps = -(-config.max_samples // config.global_batch_size)  # rounded up
    samples = steps * config.global_batch_size
    data = TrainData(data_dir / rules.train_prefix, length, samples, seed, vocab_size)
    windows = train_batches(
        data,
        config.global_batch_size,
        config.micro_batch_size,
        processes.rank,
        processes.world_size,
        step,
    )
    if rules.eval_by_seed:
        ordered = TrainData(
            data_dir / rules.validation_prefix,
            length,
            rules.eval_order_samples(config.global_batch_size),
            seed,
            vocab_size,
        )
        validation = next(
            train_batches(ordered, rules.eval_samples, rules.eval_samples, rank=0, world_size=1)
        )
    else:
        validation = validation_tokens(
            data_dir / rules.validation_prefix, length, rules.eval_samples, vocab_size
        )
    batches = Prefetcher(map(next_token_pairs, windows), processes.device)
    eval_batches = rank_micro_batches(
        next_token_pairs(validation), processes, config.eval_micro_batch_size
    )
    return batches, eval_batches


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, Config, run_rank, saves=True)
