"""Train `toy_benchmark`: all weights train, and each step reads the next rows of the file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.kernels.attention import attention_backends
from common.model.fused_block import FusedBlock
from common.model.initialization import init_weights
from common.model.linear_layers import linear_layers
from common.model.llama import Head, Llama
from common.sharding.optimizer import UPDATE_RULES
from common.sharding.processes import Processes
from common.sharding.zero import ZeroOptimizer, make_reduce_scatter
from common.training import timed_run
from common.training.assembly import Assembly
from common.training.build import DTYPES, build
from common.training.loop import next_token_pairs, rank_micro_batches
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import warmup_cosine
from toy_benchmark.rules import BENCHMARK, TRAIN_FILE, VALIDATION_FILE, Config, Rules, rules_of


def high_priority_compute(config: Config) -> bool:
    return False


def assemble(config: Config, rules: Rules, processes: Processes, seed: int) -> Assembly:
    shape, kernels = rules.shape, config.kernels
    dtype = DTYPES[config.precision]
    linear = linear_layers(config.linear_format)

    def make_layers() -> tuple[list[FusedBlock], Head]:
        return [FusedBlock(shape, kernels, linear) for _ in range(shape.num_layers)], Head(
            shape, kernels
        )

    def make_optimizer(model: Llama) -> ZeroOptimizer:
        make_rule = UPDATE_RULES[rules.opt_name](rules, kernels, torch.float32)
        reduce_scatter = partial(
            make_reduce_scatter, config.reduce_scatter, processes, dtype, kernels
        )
        return ZeroOptimizer(
            [model.embedding, *model.blocks, model.head],
            processes,
            make_rule,
            kernels,
            reduce_scatter,
        )

    def fill_weights(model: Llama, optimizer: ZeroOptimizer) -> None:
        init_weights(model, shape.num_layers, seed, 0.02, optimizer.set_weight)
        optimizer.gather()

    return build(
        config,
        shape,
        rules.sequence_length,
        processes.device,
        linear=linear,
        make_layers=make_layers,
        make_optimizer=make_optimizer,
        fill_weights=fill_weights,
    )


assemble_random = assemble


def run_rank(run: Run, reports: Reports) -> None:
    config = run.config
    assert isinstance(config, Config)
    rules = rules_of(config)
    processes = timed_run.start(run, reports, high_priority_compute(config))
    timed_run.log_submission(run, reports.log, rules, rules.train_samples)
    base = config.opt_base_learning_rate
    steps = config.max_samples // config.global_batch_size
    lr_at = warmup_cosine(base, base / 10, config.opt_learning_rate_warmup_steps, steps)
    with attention_backends(processes.device.type, DTYPES[config.precision]):
        assembly = assemble(config, rules, processes, run.seed)
        reports.phase_done("init")
        data = partial(open_data, config, run.data_dir, processes)
        timed_run.train(run, reports, assembly, rules, lr_at, processes, data, save=lambda: None)


def open_data(
    config: Config, data_dir: Path, processes: Processes, step: int
) -> tuple[Iterator[Tensor], list[Tensor]]:
    rows = next_token_pairs(np.load(data_dir / TRAIN_FILE))
    validation = next_token_pairs(np.load(data_dir / VALIDATION_FILE))
    return batches(rows, config, processes, step), rank_micro_batches(
        validation, processes, config.eval_micro_batch_size
    )


def batches(rows: np.ndarray, config: Config, processes: Processes, step: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches from `step` on, [micro_batch_size, 2, sequence_length]."""
    share = config.global_batch_size // processes.world_size
    while True:
        first = step * config.global_batch_size + processes.rank * share
        for start in range(first, first + share, config.micro_batch_size):
            indices = np.arange(start, start + config.micro_batch_size) % len(rows)
            yield torch.from_numpy(rows[indices]).to(processes.device)
        step += 1


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, Config, run_rank)
