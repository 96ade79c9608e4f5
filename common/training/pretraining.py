"""Pre-train a Llama: all weights train, sharded by ZeRO-2.

`run_on_token_files` is a whole run on Megatron's token files. Other pre-training calls the stages
of timed_run.py, and `pretrain` with its own data, learning rate or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from torch import nn

from common.benchmarks import Rules
from common.config import RunConfig
from common.data.gpt_dataset import TrainData, sequences_in, train_batches, validation_tokens
from common.model.fused_block import FusedBlock
from common.model.initialization import init_weights
from common.model.linear_layers import linear_layers
from common.model.llama import Head, Llama
from common.model.precision import DTYPES
from common.sharding.optimizer import UPDATE_RULES
from common.sharding.processes import Processes
from common.sharding.zero import ZeroOptimizer, make_reduce_scatter
from common.training import timed_run
from common.training.assembly import Assembly
from common.training.build import build
from common.training.loop import next_token_pairs
from common.training.pretraining_rules import PretrainingConfig, PretrainingRules
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import warmup_cosine

FillMasters = Callable[[Llama, ZeroOptimizer], object]


def run_on_token_files(run: Run, reports: Reports, rules: PretrainingRules) -> None:
    """Do a timed run on one rank, from the first line of the log to the last.

    It starts from random weights, and with --save it writes the trained model.
    """
    config = run.config
    assert isinstance(config, PretrainingConfig)
    save = None
    if run.save:
        from common.model import saved_model  # imported only by runs that need it

        saved_model.require_absent(run.run_dir)
        save = partial(saved_model.save_model, run_dir=run.run_dir, on_tensor=reports.saving)
    processes = timed_run.start(run, reports, rules)
    # Reads document lengths from the .idx, which the rules allow before the clock starts. They do
    # not allow it for the tokens.
    train_samples = sequences_in(run.data_dir / rules.train_prefix, rules.sequence_length)
    timed_run.log_submission(run, reports.log, rules, train_samples)
    base = config.opt_base_learning_rate
    end = rules.end_learning_rate(base)
    lr_at = warmup_cosine(base, end, config.opt_learning_rate_warmup_steps, rules.max_steps)
    open_data = partial(open_token_files, run, rules, processes)
    pretrain(run, reports, rules, processes, lr_at, open_data, save=save)


def open_token_files(
    run: Run, rules: PretrainingRules, processes: Processes, step: int
) -> tuple[Iterator[np.ndarray], np.ndarray, None]:
    """Open the token files in Megatron's order (see `timed_run.OpenData`)."""
    config = run.config
    vocab_size = rules.shape.vocab_size
    length = rules.sequence_length
    steps = -(-config.max_samples // config.global_batch_size)  # rounded up
    samples = steps * config.global_batch_size
    data = TrainData(run.data_dir / rules.train_prefix, length, samples, run.seed, vocab_size)
    windows = train_batches(
        data,
        config.global_batch_size,
        config.micro_batch_size,
        processes.data_rank,
        processes.data_ranks,
        step,
    )
    prefix = run.data_dir / rules.validation_prefix
    if rules.eval_by_seed:
        order = rules.eval_order_samples(config.global_batch_size)
        ordered = TrainData(prefix, length, order, run.seed, vocab_size)
        validation = next(
            train_batches(ordered, rules.eval_samples, rules.eval_samples, rank=0, world_size=1)
        )
    else:
        validation = validation_tokens(prefix, length, rules.eval_samples, vocab_size)
    return map(next_token_pairs, windows), next_token_pairs(validation), None


def pretrain(
    run: Run,
    reports: Reports,
    rules: Rules,
    processes: Processes,
    lr_at: Callable[[int], float],
    open_data: timed_run.OpenData,
    fill_masters: FillMasters | None = None,
    save: Callable[[Llama], object] | None = None,
    padding: float = 0.0,
) -> None:
    """Assemble the model and train it: the stages of a run after `log_submission`.

    `fill_masters`: see `assemble_full` (default: random values of the run's seed).
    `save`: writes the trained model. Called on rank 0 after run_stop.
    `lr_at`, `open_data`, `padding`: see `timed_run.train`.
    """
    config = run.config
    fill = fill_masters or partial(_fill_random, rules, run.seed)
    with timed_run.self_tested(run, reports, rules, processes):
        assembly = assemble_full(config, rules, processes, fill)
        reports.phase_done("init")

        def save_on_rank_0() -> None:
            if save and run.rank == 0:
                save(assembly.model)

        timed_run.train(
            run, reports, assembly, rules, lr_at, processes, open_data, save_on_rank_0, padding
        )


def assemble_random(config: RunConfig, rules: Rules, processes: Processes, seed: int) -> Assembly:
    """Assemble model and optimizer with the random weights of `seed`."""
    return assemble_full(config, rules, processes, partial(_fill_random, rules, seed))


def _fill_random(rules: Rules, seed: int, model: Llama, optimizer: ZeroOptimizer) -> None:
    init_weights(model, rules.shape.num_layers, seed, rules.init_std, optimizer.set_weight)


def assemble_full(
    config: RunConfig,
    rules: Rules,
    processes: Processes,
    fill_masters: FillMasters,
) -> Assembly:
    """Assemble the model, its FP8 or bf16 linear layers and the optimizer.

    `fill_masters`: sets every weight by the optimizer's `set_weight`. The weights are gathered
        afterwards.
    """
    shape = rules.shape
    kernels = config.kernels
    linear = linear_layers(config.linear_format)

    def make_layers() -> tuple[list[nn.Module], Head]:
        blocks = [
            FusedBlock(shape, kernels, linear, layer < config.recompute_layers, processes.context)
            for layer in range(shape.num_layers)
        ]
        return [*blocks], Head(shape, kernels)

    def make_optimizer(model: Llama) -> ZeroOptimizer:
        make_rule = UPDATE_RULES[rules.opt_name](rules, kernels, DTYPES[config.moment_precision])
        reduce_scatter = partial(
            make_reduce_scatter, config.reduce_scatter, processes, DTYPES[config.precision], kernels
        )
        modules = [model.embedding, *model.blocks, model.head]
        return ZeroOptimizer(modules, processes, make_rule, kernels, reduce_scatter)

    def fill_weights(model: Llama, optimizer: ZeroOptimizer) -> None:
        fill_masters(model, optimizer)
        optimizer.gather()

    return build(
        config,
        shape,
        rules.sequence_length,
        processes,
        linear=linear,
        make_layers=make_layers,
        make_optimizer=make_optimizer,
        fill_weights=fill_weights,
    )
