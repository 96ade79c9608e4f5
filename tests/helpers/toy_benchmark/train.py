"""Train `toy_benchmark`: each step reads the next rows of the file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import numpy as np

from common.sharding.processes import Processes
from common.training import timed_run
from common.training.loop import next_token_pairs
from common.training.pretraining import pretrain
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import warmup_cosine
from toy_benchmark.rules import BENCHMARK, TRAIN_FILE, VALIDATION_FILE, Config, rules_of


def run_rank(run: Run, reports: Reports) -> None:
    config = run.config
    assert isinstance(config, Config)
    rules = rules_of(config)
    processes = timed_run.start(run, reports, rules)
    timed_run.log_submission(run, reports.log, rules, rules.train_samples)
    base = config.opt_base_learning_rate
    steps = config.max_samples // config.global_batch_size
    lr_at = warmup_cosine(base, base / 10, config.opt_learning_rate_warmup_steps, steps)
    pretrain(run, reports, rules, processes, lr_at, partial(open_data, run, processes))


def open_data(
    run: Run, processes: Processes, step: int
) -> tuple[Iterator[np.ndarray], np.ndarray, None]:
    rows = next_token_pairs(np.load(run.data_dir / TRAIN_FILE))
    validation = next_token_pairs(np.load(run.data_dir / VALIDATION_FILE))
    return batches(rows, run, processes, step), validation, None


def batches(rows: np.ndarray, run: Run, processes: Processes, step: int) -> Iterator[np.ndarray]:
    """Yield this rank's micro-batches from `step` on, [micro_batch_size, 2, sequence_length]."""
    config = run.config
    share = config.global_batch_size // processes.world_size
    while True:
        first = step * config.global_batch_size + processes.rank * share
        for start in range(first, first + share, config.micro_batch_size):
            yield rows[np.arange(start, start + config.micro_batch_size) % len(rows)]
        step += 1


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, run_rank)
