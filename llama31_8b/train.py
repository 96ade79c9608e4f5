"""Builds the objects of a `llama31_8b` run and hands them to the loop. One process per GPU, started by torchrun.

    python -m llama31_8b.train --run-dir DIR --data-dir DIR --config-name NAME --seed N --device cuda|cpu     a timed run
    python -m llama31_8b.train --bench --config FILE --device cuda|cpu --steps N                              throughput only

A run reads DIR/config.toml, which the launcher wrote. Order: build, warm up on synthetic tokens, start the clock, open the data.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from common.config import RunConfig
from common.data.prefetch import Prefetcher
from common.kernels.attention import attention_backends
from common.model.llama import Llama, init_weights
from common.sharding.processes import Processes
from common.training.build import build_model, materialize, prepare, shard_weights
from common.training.loop import next_token_pairs, pad_for_ranks
from common.training.optimizer import ClippedAdamW, warmup_cosine
from common.training.session import Session, main, measure, train_to_target, warm_up_on_synthetic_tokens
from llama31_8b.data import TrainData, sequences_in, train_batches, validation_tokens
from llama31_8b.log_keys import hyperparameters
from llama31_8b.rules import BENCHMARK, CLOSED, MINIATURE, Config, Rules


def build(config: RunConfig, rules: Rules, processes: Processes, seed: int) -> tuple[Llama, ClippedAdamW]:
    """The initialized model, sharded over the ranks, and its optimizer with empty moments."""
    with torch.device("meta"):
        model = build_model(config, rules.shape, rules.sequence_length)
    prepare(model, config, processes.mesh)
    materialize(model, processes.device)
    shard_weights(model, config, processes.mesh)
    init_weights(model, seed, rules.init_std)
    optimizer = ClippedAdamW(
        model.trained_tensors(),
        betas=(rules.adam_beta_1, rules.adam_beta_2),
        eps=rules.adam_epsilon,
        weight_decay=rules.weight_decay,
        clip_norm=rules.gradient_clip_norm,
        sum_over_ranks=processes.sum_over_shards,
        kernels=config.kernels,
        rounded=model.weight_shards.mine if model.weight_shards else (),
    )
    return model, optimizer


def run(session: Session) -> None:
    """A timed run of one rank, from the first line of the log to the last."""
    config, data_dir, seed = session.config, session.args.data_dir, session.args.seed
    assert isinstance(config, Config)
    rules = MINIATURE if config.miniature else CLOSED
    processes = session.start(compute_first=True)  # sums of gradients beside the backward: 10 ms of a step of 2,120 (docs/log.md)
    # Document lengths are metadata: the .idx may be read before the clock starts, the tokens may not.
    train_samples = sequences_in(data_dir / rules.train_prefix, rules.sequence_length)
    session.log_submission(BENCHMARK, rules.division, hyperparameters(config, rules, train_samples, session.args.config_name))
    with attention_backends(processes.device.type):
        model, optimizer = build(config, rules, processes, seed)
        session.phase_done("init")
        warm_up_on_synthetic_tokens(session, model, optimizer, processes)
        session.make_meter(rules.shape, rules.sequence_length, rules.shape.training_flops_per_token(rules.sequence_length), processes)
        session.start_clock(processes)
        batches, validation = open_data(config, rules, data_dir, seed, processes)
        base = config.opt_base_learning_rate
        lr_at = warmup_cosine(base, rules.end_learning_rate(base), config.opt_learning_rate_warmup_steps, rules.max_steps)
        train_to_target(session, rules, processes, model, optimizer, lr_at, batches, validation)


def open_data(config: Config, rules: Rules, data_dir: Path, seed: int, processes: Processes) -> tuple[Prefetcher, list[torch.Tensor]]:
    """Training micro-batches, read ahead, and the evaluation set on the device. The clock runs."""
    vocab_size, length = rules.shape.vocab_size, rules.sequence_length
    samples = -(-config.max_samples // config.global_batch_size) * config.global_batch_size  # the last step is a whole one
    data = TrainData(data_dir / rules.train_prefix, length, samples, seed, vocab_size)
    windows = train_batches(data, config.global_batch_size, config.micro_batch_size, processes.rank, processes.world_size)
    validation = validation_tokens(data_dir / rules.validation_prefix, length, rules.eval_samples, vocab_size)
    batches = Prefetcher(map(next_token_pairs, windows), processes.device)
    return batches, pad_for_ranks(next_token_pairs(validation), processes, config.eval_micro_batch_size)


def bench(session: Session) -> None:
    """Throughput of the configured step on synthetic tokens. No data, no evaluation, no MLLOG."""
    config, args = session.config, session.args
    rules = MINIATURE if config.miniature else CLOSED
    if args.layers:
        rules = replace(rules, shape=replace(rules.shape, num_layers=args.layers))
    processes = session.start(compute_first=True)
    with attention_backends(processes.device.type):
        model, optimizer = build(config, rules, processes, args.seed)
        session.make_meter(rules.shape, rules.sequence_length, rules.shape.training_flops_per_token(rules.sequence_length), processes)
        measure(session, BENCHMARK, model, optimizer, processes)


if __name__ == "__main__":
    main(sys.argv[1:], Config, run, bench, "llama31_8b.train")
