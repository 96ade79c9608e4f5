"""Stages of a timed run on one rank: start, log, self-test, warm-up, clock, training and end.

A benchmark's train.py defines `run_rank(run, reports)`. It calls `start`, `log_submission`, and
then `pretrain` of pretraining.py or `finetune` of finetuning.py. These call `self_tested`, build
the objects, and call `train`. As a program, train.py calls `main`, and torchrun starts one for
each GPU:

    python -m BENCHMARK.train --run-dir RUN_DIR --data-dir DATADIR --config-name NAME --seed N
        --device cuda|cpu [--checkpoint WHEN] [--continue RUN] [--save]

RUN_DIR/config.toml was written by the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from common import config as configs
from common import engines
from common.atomic_write import write_whole
from common.benchmarks import Rules, config_class, divisions
from common.config import RunConfig
from common.data.prefetch import Prefetcher
from common.errors import (
    CheckFailed,
    Interrupted,
    RunError,
    TargetMissed,
    first_line,
)
from common.kernels.architecture import gpu_architecture
from common.kernels.attention import attention_backends
from common.model.precision import DTYPES
from common.self_test.kernel_cases import Sizes
from common.self_test.products import cublaslt_choices
from common.self_test.run import require_equal_engines, require_sound, self_test
from common.sharding.processes import (
    Processes,
    high_priority_compute,
    require_world_size,
    start_processes,
)
from common.training import loop
from common.training.assembly import Assembly, Batching
from common.training.continuation import base_record
from common.training.guard import run_guarded
from common.training.log_keys import hyperparameters, submission_texts
from common.training.loop import Goal, TrainingOutcome, rank_micro_batches
from common.training.metrics import make_meter
from common.training.mllog import RunLog
from common.training.rank_comparison import make_rank_comparison
from common.training.reports import Reports
from common.training.run import Run, frozen_weights_folder
from common.training.warmup import warm_up
from system_tuning.settings import state

if TYPE_CHECKING:  # not imported at run time, because most runs have no checkpoints
    from common.training.checkpoint import Checkpoints

# Opens the data files. Its argument is the number of steps already done. Returns the remaining
# training micro-batches of this rank, each int32 [micro_batch_size, 2, sequence_length] (tokens,
# labels), the sequences of an evaluation, int32 [eval_samples, 2, sequence_length], and
# `Batching.counted`.
OpenData = Callable[[int], tuple[Iterator[np.ndarray], np.ndarray, Iterator[int] | None]]


def start(run: Run, reports: Reports, rules: Rules) -> Processes:
    """Log cache_clear and init_start before any model exists, and join the process group.

    If the run saves checkpoints, record the files of its frozen base before they are loaded.

    Raises ConfigError if the number of processes differs from the config's.
    """
    reports.heartbeat.write(0, "init")
    if run.checkpoint:
        run.base_files.update(base_record(frozen_weights_folder(run)))
    reports.log.cache_clear(os.environ.get("CACHE_CLEARED", "no") != "no")
    reports.log.init_start()
    high_priority = high_priority_compute(run.config, rules)
    processes = start_processes(
        run.device, run.config.hang_timeout_s, high_priority, run.config.context_parallel
    )
    require_world_size(processes, run.config.world_size)
    return processes


def log_submission(run: Run, log: RunLog, rules: Rules, train_samples: int) -> None:
    """Log submission, seed and hyperparameters.

    `train_samples`: training sequences in the data set.
    """
    config = run.config
    log.submission(
        benchmark=rules.log_name or run.benchmark,
        division=rules.division,
        **submission_texts(os.environ, config.platform),
    )
    log.seed(run.seed)
    log.hyperparameters(hyperparameters(config, rules, train_samples, run.config_name))


@contextlib.contextmanager
def self_tested(run: Run, reports: Reports, rules: Rules, processes: Processes) -> Iterator[None]:
    """Run the self-test, then the block with this rank's seed, both with attention's backends."""
    with attention_backends(processes.device.type, DTYPES[run.config.precision]):
        run_self_test(run.config, rules, processes, reports)
        # For dropout, which must differ between ranks with different sequences. Set after the
        # self-test, because some libraries draw numbers in it, and not every start times them.
        torch.manual_seed(run.seed + processes.data_rank)
        yield


def run_self_test(config: RunConfig, rules: Rules, processes: Processes, reports: Reports) -> None:
    """Run the self-test of a run, before any weight exists, and write the event `self_test`.

    Raises PreflightError if an op computes wrongly, or if the ranks chose different engines.
    """
    sizes = Sizes.of(config, rules.shape, rules.sequence_length, rules.lora_rank)
    result = self_test(sizes, processes.device, partial(reports.heartbeat.write, 0))
    require_sound(result, processes.device)
    require_equal_engines(result)
    # The first screen named the engines by their order. It cannot know which fail or are slow here.
    for rejection in engines.rejections():
        reports.progress.show(f"NOTE       {rejection}")
    for line in result.engine_lines():
        reports.progress.show(line)
    reports.events.write(
        "self_test",
        attention=result.attention,
        products=result.products,
        swiglu=result.swiglu,
        engines={name: asdict(choice) for name, choice in result.engines.items()},
        missing=result.missing,
        choices=cublaslt_choices(result),
        seconds=result.seconds,
        ops=len(result.results),
        worst=str(result.worst),
    )


def record_state(
    run_dir: Path, config: RunConfig, device: torch.device, variables: Mapping[str, str]
) -> None:
    """Write what runs into versions.json, where the launcher wrote what it expected.

    These are the engines after the self-test, the environment `variables` of this process, and the
    settings of the host. Rank 0 calls it right before the clock starts.
    """
    path = run_dir / "versions.json"
    versions = json.loads(path.read_text()) if path.exists() else {}
    gpu = gpu_architecture(device)
    versions["engines"] = {
        operation: str(engines.in_use(operation, gpu, config.precision).engine)
        for operation in engines.operations(config.linear_format.in_fp8)
    }
    versions["variables"] = variables
    versions["system_tuning"] = state()
    write_whole(path, (json.dumps(versions, indent=1) + "\n").encode())


def train(
    run: Run,
    reports: Reports,
    assembly: Assembly,
    rules: Rules,
    lr_at: Callable[[int], float],
    processes: Processes,
    open_data: OpenData,
    save: Callable[[], None],
    padding: float = 0.0,
) -> None:
    """Warm up, load a checkpoint if the run continues one, start the clock, train, stop and save.

    `lr_at`: returns the learning rate of a step. Steps count from 0.
    `open_data`: called after run_start.
    `save`: writes the model if the run asks for it. Called after run_stop, also if the run missed
        its target.
    `padding`: share of padding in the training sequences.
    """
    config = run.config
    batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
    checkpoints, step = _prepare(run, reports, assembly, rules, processes, batching, padding)
    if processes.rank == 0:
        record_state(run.run_dir, config, processes.device, reports.variables)
    processes.barrier()
    reports.log.init_stop()
    reports.log.run_start()
    reports.heartbeat.write(step, "open data")
    if checkpoints:
        checkpoints.record_data()
    micro_batches, validation, counted = open_data(step)
    batching = replace(batching, counted=counted)
    batches = Prefetcher(micro_batches, processes.device)
    eval_batches = rank_micro_batches(validation, processes, config.eval_micro_batch_size)
    if checkpoints:
        checkpoints.require_recorded_data()
    goal = Goal(
        eval_interval=rules.eval_interval(config.global_batch_size),
        first_evaluation=rules.first_evaluation(config.global_batch_size),
        target_loss=rules.target_loss,
        max_samples=config.max_samples,
    )
    reports.rank_comparison = make_rank_comparison(
        processes, reports.events, reports.progress, assembly.model
    )
    outcome: TrainingOutcome | TargetMissed
    try:
        outcome = loop.train(
            assembly, lr_at, batches, eval_batches, batching, goal, processes, reports, checkpoints
        )
    except TargetMissed as missed:
        outcome = missed
    _end(outcome, reports, processes, checkpoints, save)


def _end(
    outcome: TrainingOutcome | TargetMissed,
    reports: Reports,
    processes: Processes,
    checkpoints: Checkpoints | None,
    save: Callable[[], None],
) -> None:
    """Write run_stop, which decides the result; then complete the last checkpoint and save.

    Each is done even if another one fails. Raises `outcome` if it is TargetMissed, else the first
    failure.
    """
    of_all_ranks: list[Exception] = []
    of_this_rank: list[Exception] = []
    if isinstance(outcome, TargetMissed):
        of_all_ranks.append(outcome)
        reports.abort()
    else:
        with _collecting(of_this_rank):
            reports.succeed(outcome.samples, outcome.loss)
    if checkpoints:
        with _collecting(of_all_ranks):
            checkpoints.finish()
    reports.saving()
    with _collecting(of_this_rank):
        save()
    if of_all_ranks:
        with _collecting(of_this_rank):
            # If a rank ended now, torchrun would kill rank 0 while it saves.
            processes.barrier()
    _raise_first(of_all_ranks + of_this_rank)


@contextlib.contextmanager
def _collecting(failures: list[Exception]) -> Iterator[None]:
    """Append an exception in the block to `failures`, so that the work after it is still done.

    Raises Interrupted, and CheckFailed, after which the run is not good.
    """
    try:
        yield
    except (Interrupted, CheckFailed):
        raise
    except Exception as error:
        failures.append(error)


def _raise_first(failures: list[Exception]) -> None:
    """Raise the first of `failures`, if there is one. A RunError mentions the others."""
    if not failures:
        return
    first, *others = failures
    if isinstance(first, RunError):
        first.why = "; then: ".join([first.why, *map(first_line, others)])
    raise first


def _prepare(
    run: Run,
    reports: Reports,
    assembly: Assembly,
    rules: Rules,
    processes: Processes,
    batching: Batching,
    padding: float,
) -> tuple[Checkpoints | None, int]:
    """Warm up, create the meter, and load the checkpoint of a run that is continued.

    Returns (checkpoints, steps already done). The first is None if the run neither writes
    checkpoints nor continues from one.
    """
    config = run.config
    checkpoints = None
    if run.checkpoint or run.continues:
        from common.training.checkpoint import Checkpoints  # imported only by such runs

        checkpoints = Checkpoints(run, reports, assembly, processes)
    micro_batch_sizes = (config.micro_batch_size, config.eval_micro_batch_size)
    on_phase = partial(reports.heartbeat.write, 0)
    digest = warm_up(assembly, batching, micro_batch_sizes, processes, on_phase)
    reports.phase_done("warmup", state_digest=digest)
    reports.meter = make_meter(config, rules, processes, reports.events, padding)
    step = checkpoints.load() if checkpoints else 0
    if run.continues is not None:
        reports.meter.samples = step * config.global_batch_size
        reports.log.resumed(reports.samples, run.continues.name)
        reports.phase_done("load checkpoint", step=step)
    return checkpoints, step


def main(argv: list[str], benchmark: str, run_rank: Callable[[Run, Reports], None]) -> None:
    """Parse `argv`, call `run_rank`, record failures and end the process."""
    args = _parser(benchmark).parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    reports: Reports | None = None  # None until the config is read

    def work() -> None:
        nonlocal reports
        config = configs.load(args.run_dir / "config.toml", config_class(benchmark))
        reports = Reports.open(args.run_dir, rank)
        run_rank(Run(benchmark=benchmark, config=config, rank=rank, **vars(args)), reports)

    def abort() -> None:
        if reports is not None:
            reports.abort()

    run_guarded(args.run_dir, rank, work, abort, lambda: reports.step if reports else 0)


def _parser(benchmark: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {benchmark}.train",
        description="One rank of a timed run; ./run_and_time.sh starts it.",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        required=True,
        help="run directory with config.toml; receives the results",
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="directory of the data files")
    parser.add_argument("--config-name", required=True, help="name of the config file in the log")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the run (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), required=True, help="cuda: NVIDIA or AMD GPUs"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHEN",
        help="save the training state every N evaluations (N) or seconds (Ns)",
    )
    parser.add_argument(
        "--continue",
        dest="continues",
        type=Path,
        metavar="RUN",
        help="continue from the checkpoint in this run directory",
    )
    if any(rules.saves_model for rules in divisions(benchmark).values()):
        parser.add_argument(
            "--save", action="store_true", help="write the trained model after run_stop"
        )
    return parser
