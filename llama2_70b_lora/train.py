"""Timed run of `llama2_70b_lora` on one rank (arguments: common/training/timed_run.py).

The base weights are in $MODEL, or in DATADIR/base if MODEL is unset. At the end the run saves the
adapters in RUN_DIR/adapter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import numpy as np

from common.sharding.processes import Processes
from common.training import timed_run
from common.training.finetuning import finetune
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import cosine_to_zero
from llama2_70b_lora.data import next_token_labels, read_rows, train_batches
from llama2_70b_lora.rules import BENCHMARK, Config, Rules, rules_of


def run_rank(run: Run, reports: Reports) -> None:
    """Do a timed run on one rank, from the first line of the log to the last."""
    config = run.config
    assert isinstance(config, Config)
    rules = rules_of(config)
    processes = timed_run.start(run, reports, rules)
    timed_run.log_submission(run, reports.log, rules, rules.train_samples)
    lr_at = cosine_to_zero(config.opt_base_learning_rate, config.opt_learning_rate_training_steps)
    finetune(run, reports, rules, processes, lr_at, partial(open_data, run, rules, processes))


def open_data(
    run: Run, rules: Rules, processes: Processes, step: int
) -> tuple[Iterator[np.ndarray], np.ndarray, None]:
    """Open the files of both splits (see `timed_run.OpenData`)."""
    rows = read_rows(run.data_dir, "train", rules)
    batches = train_batches(
        rows,
        run.seed,
        run.config.global_batch_size,
        run.config.micro_batch_size,
        processes.data_rank,
        processes.data_ranks,
        step,
    )
    return batches, next_token_labels(read_rows(run.data_dir, "validation", rules)), None


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, run_rank)
