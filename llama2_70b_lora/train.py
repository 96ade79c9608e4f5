"""Timed run of `llama2_70b_lora`: build the objects and pass them to the loop.

torchrun starts one process per GPU:

    python -m llama2_70b_lora.train --run-dir RUN_DIR --data-dir DATADIR --config-name NAME
        --seed N --device cuda|cpu [--checkpoint WHEN] [--continue RUN]

The process reads RUN_DIR/config.toml, which the launcher wrote. It runs the self-test and builds
the objects. It loads the base weights from $MODEL, or from DATADIR/base if MODEL is unset. Then it
warms up on synthetic tokens, starts the clock and opens the data. At the end it saves the adapters
in RUN_DIR/adapter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.data.prefetch import Prefetcher
from common.kernels.attention import attention_backends
from common.model.checkpoint_loader import LoadReport, load_base
from common.model.llama import Llama
from common.model.lora import AdapterSettings
from common.self_test.run import run_self_test
from common.sharding.frozen_base import FrozenBase
from common.sharding.processes import Processes
from common.training import timed_run
from common.training.assembly import Assembly
from common.training.build import DTYPES
from common.training.loop import rank_micro_batches
from common.training.lora_training import (
    assemble_lora,
    base_fingerprints,
    load_random,
    save_adapter,
)
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import cosine_to_zero
from llama2_70b_lora.data import next_token_labels, read_rows, train_batches
from llama2_70b_lora.rules import BENCHMARK, Config, Rules, rules_of
from llama2_70b_lora.weights_help import weights_help


def assemble(
    config: Config,
    rules: Rules,
    processes: Processes,
    seed: int,
    load: Callable[[Llama, FrozenBase], object],
) -> tuple[Assembly, FrozenBase]:
    """Assemble the adapters of these rules on a frozen base that `load` fills."""
    return assemble_lora(config, rules, adapter_settings(rules), processes, seed, load)


def adapter_settings(rules: Rules) -> AdapterSettings:
    """Return the settings of the adapters, which the rules fix."""
    return AdapterSettings(rules.lora_rank, rules.lora_alpha, rules.lora_dropout)


def base_folder(config: Config, data_dir: Path) -> tuple[Path, Path | None]:
    """Return (folder of the base weights, manifest with their SHA-256).

    The manifest is None if the folder has no manifest.json (see `prepare write-manifest`).
    """
    folder = rules_of(config).weights_folder(config, data_dir, os.environ)
    manifest = folder / "manifest.json"
    return folder, manifest if manifest.is_file() else None


def high_priority_compute(config: Config) -> bool:
    """Return False: compute kernels never run on a high-priority stream (see `start_processes`).

    The gathers of a sharded base and the transposes of a replicated one run at the same time, and
    must not wait for compute.
    """
    return False


def run_rank(run: Run, reports: Reports) -> None:
    """Do a timed run on one rank, from the first line of the log to the last."""
    config = run.config
    data_dir = run.data_dir
    seed = run.seed
    assert isinstance(config, Config)
    rules = rules_of(config)
    processes = timed_run.start(run, reports, high_priority_compute(config))
    timed_run.log_submission(run, reports.log, rules, rules.train_samples)
    torch.manual_seed(seed + processes.rank)  # for the dropout, which must differ between the ranks
    with attention_backends(processes.device.type, DTYPES[config.precision]):
        run_self_test(config, rules, processes, reports)
        loads: list[LoadReport] = []  # one entry, which `load` adds
        folder, manifest = base_folder(config, data_dir)

        def load(model: Llama, base: FrozenBase) -> None:
            with weights_help():
                on_layer = partial(reports.heartbeat.write, 0, "loading")
                loads.append(load_base(model, folder, manifest, base, on_layer))

        assembly, base = assemble(config, rules, processes, seed, load)
        before = base_fingerprints(assembly.model, base)
        reports.phase_done("init", base_bytes=loads[0].bytes, base_seconds=loads[0].seconds)
        lr_at = cosine_to_zero(
            config.opt_base_learning_rate, config.opt_learning_rate_training_steps
        )
        open_tokens = partial(open_data, config, rules, data_dir, seed, processes)
        save = partial(
            save_adapter,
            run,
            reports,
            assembly.model,
            adapter_settings(rules),
            base,
            before,
            folder,
        )
        timed_run.train(run, reports, assembly, rules, lr_at, processes, open_tokens, save)


def open_data(
    config: Config, rules: Rules, data_dir: Path, seed: int, processes: Processes, step: int
) -> tuple[Prefetcher, list[torch.Tensor]]:
    """Open the token files and return (training, evaluation) micro-batches of this rank.

    The training micro-batches begin at `step` and are read ahead. Both kinds are on the device.
    Call it after the clock has started.
    """
    rows = read_rows(data_dir, "train", rules)
    pairs = train_batches(
        rows,
        seed,
        config.global_batch_size,
        config.micro_batch_size,
        processes.rank,
        processes.world_size,
        step,
    )
    validation = next_token_labels(read_rows(data_dir, "validation", rules))
    batches = Prefetcher(pairs, processes.device)
    eval_batches = rank_micro_batches(validation, processes, config.eval_micro_batch_size)
    return batches, eval_batches


def assemble_random(config: Config, rules: Rules, processes: Processes, seed: int) -> Assembly:
    """Assemble adapters on a random base, for the speed measurements of `throughput`."""
    return assemble(config, rules, processes, seed, load_random)[0]


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, Config, run_rank)
