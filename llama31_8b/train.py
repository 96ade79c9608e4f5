"""Builds the objects of a `llama31_8b` run and hands them to the loop. One process per GPU, started by torchrun.

    python -m llama31_8b.train --run-dir DIR --data-dir DIR --config-name NAME --seed N --device cuda|cpu     a timed run
    python -m llama31_8b.train --bench --config FILE --device cuda|cpu --steps N                              throughput only

A run reads DIR/config.toml, which the launcher wrote. Order: build, warm up on synthetic tokens, start the clock, open the data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import config as configs
from common.config import RunConfig
from common.distributed import Heartbeat, Processes, start_processes
from common.errors import ConfigError
from common.guard import run_guarded
from common.hardware import KINDS
from common.kernels.attention import attention_backends
from common.llama import Llama, init_weights
from common.loop import Batching, evaluate, next_token_pairs, pad_for_ranks, train, train_step
from common.metrics import Events, Meter, Progress, Rate, memory_gib
from common.mllog import RunLog
from common.optim import ClippedAdamW, local, warmup_cosine
from common.parallel import materialise, prepare
from common.prefetch import Prefetcher
from common.warmup import state_digest, warm_up
from llama31_8b.data import TrainData, sequences_in, train_batches, validation_tokens
from llama31_8b.log_keys import hyperparameters
from llama31_8b.rules import BENCHMARK, CLOSED, MINIATURE, Rules


def build(config: RunConfig, rules: Rules, processes: Processes, seed: int) -> tuple[Llama, ClippedAdamW]:
    """The initialised model, sharded over the ranks, and its optimizer with empty moments."""
    with torch.device("meta"):
        model = Llama(rules.shape, rules.sequence_length, config.kernels)
    prepare(model, config, processes.mesh)
    materialise(model, processes.device)
    init_weights(model, seed, rules.init_std)
    optimizer = ClippedAdamW(
        model.parameters(),
        betas=(rules.adam_beta_1, rules.adam_beta_2),
        eps=rules.adam_epsilon,
        weight_decay=rules.weight_decay,
        clip_norm=rules.gradient_clip_norm,
        sum_over_ranks=processes.sum,
    )
    return model, optimizer


def synthetic_batches(config: RunConfig, rules: Rules, processes: Processes, micro_batch_size: int) -> Iterator[Tensor]:
    """Endless random tokens, int32 [micro batch, 2, sequence] on the device: four batches, made once, in turn."""
    generator = np.random.default_rng(processes.rank)  # own generator: torch's global one must stay as it is
    shape = (micro_batch_size, 2, rules.sequence_length)
    batches = [torch.from_numpy(generator.integers(0, rules.shape.vocab_size, shape, np.int32)).to(processes.device) for _ in range(4)]
    while True:
        yield from batches


def batching_of(config: RunConfig) -> Batching:
    return Batching(config.global_batch_size, config.gradient_accumulation_steps, config.reshard_after_forward)


def warm_up_on_synthetic_tokens(
    model: Llama, optimizer: ClippedAdamW, config: RunConfig, rules: Rules, processes: Processes, beat: Callable[[str], None]
) -> str:
    """Everything the timed part will do, on random tokens, and back: returns the digest of the unchanged state."""
    train_source = synthetic_batches(config, rules, processes, config.micro_batch_size)
    eval_source = synthetic_batches(config, rules, processes, config.eval_micro_batch_size)
    weights = [local(p.detach()) for p in model.parameters()]
    return warm_up(
        lambda lr: train_step(model, optimizer, train_source, batching_of(config), lr, processes.world_size, beat),
        lambda: evaluate(model, [next(eval_source)], processes, beat),
        optimizer,
        lambda: state_digest(weights, optimizer, data_position=0, device=processes.device),
        train_steps=config.warmup_train_steps,
        eval_steps=config.warmup_eval_steps,
        device=processes.device,
    )


def meter_for(config: RunConfig, rules: Rules, processes: Processes, events: Events, progress: Progress) -> Meter:
    return Meter(
        processes,
        events,
        progress,
        tokens_per_step=config.global_batch_size * rules.sequence_length,
        samples_per_step=config.global_batch_size,
        flops_per_token=rules.shape.training_flops_per_token(rules.sequence_length),
        peak_tflops=peak_tflops(config, processes.device),
        max_samples=config.max_samples,
    )


def peak_tflops(config: RunConfig, device: torch.device) -> float | None:
    """Dense bf16 peak of the configured GPU; None where the run is elsewhere (the miniature on whatever is there)."""
    return KINDS[config.gpu].peak_bf16_tflops if device.type == "cuda" and config.gpu in KINDS else None


class Run:
    """A timed run of one rank. `body` is the whole story; `abort` and `step` serve the guard when it ends early."""

    def __init__(self, args: argparse.Namespace, rank: int):
        self.args, self.run_dir = args, args.run_dir
        self.config = configs.load(self.run_dir / "config.toml")
        self.rules = MINIATURE if self.config.miniature else CLOSED
        self.log = RunLog(self.run_dir / "result.txt" if rank == 0 else None)
        self.events = Events(self.run_dir / "events.jsonl" if rank == 0 else None)
        self.progress = Progress(rank == 0)
        self.heartbeat = Heartbeat(self.run_dir, rank)
        self.meter: Meter | None = None

    def body(self) -> None:
        config, rules, log = self.config, self.rules, self.log
        self.heartbeat.beat(0, "init")
        began = time.monotonic()
        log.cache_clear(os.environ.get("CACHE_CLEARED", "no") != "no")
        log.init_start()
        processes = start_processes(self.args.device, config.hang_timeout_s)
        self.log_submission()
        with attention_backends(processes.device.type):
            model, optimizer = build(config, rules, processes, self.args.seed)
            self.events.write("phase", name="init", seconds=time.monotonic() - began, time_s=0.0)
            warmup_began = time.monotonic()
            digest = warm_up_on_synthetic_tokens(model, optimizer, config, rules, processes, partial(self.heartbeat.beat, 0))
            self.events.write("phase", name="warmup", seconds=time.monotonic() - warmup_began, time_s=0.0, state_digest=digest)
            self.meter = meter_for(config, rules, processes, self.events, self.progress)
            processes.barrier()
            log.init_stop()
            log.run_start()
            self.train(model, optimizer, processes)

    def log_submission(self) -> None:
        rules, log, environment = self.rules, self.log, os.environ
        log.submission(
            benchmark=BENCHMARK,
            org=environment.get("MLPERF_SUBMISSION_ORG", "unnamed"),
            platform=environment.get("MLPERF_SUBMISSION_PLATFORM", f"{self.config.nodes}x{self.config.gpus_per_node} {self.config.gpu}"),
            division=rules.division,
            status="onprem",
        )
        log.seed(self.args.seed)
        # Document lengths are metadata: the .idx may be read before the clock starts, the tokens may not.
        train_samples = sequences_in(self.args.data_dir / rules.train_prefix, rules.sequence_length)
        log.hyperparameters(hyperparameters(self.config, rules, train_samples, self.args.config_name))

    def train(self, model: Llama, optimizer: ClippedAdamW, processes: Processes) -> None:
        """From here on the clock runs, and only from here on token files are opened."""
        config, rules, data_dir = self.config, self.rules, self.args.data_dir
        assert self.meter is not None
        self.heartbeat.beat(0, "open data")
        vocab_size, length = rules.shape.vocab_size, rules.sequence_length
        data = TrainData(data_dir / rules.train_prefix, length, config.max_samples, self.args.seed, vocab_size)
        windows = train_batches(data, config.global_batch_size, config.micro_batch_size, processes.rank, processes.world_size)
        batches = Prefetcher(map(next_token_pairs, windows), processes.device)
        validation = validation_tokens(data_dir / rules.validation_prefix, length, rules.eval_samples, vocab_size)
        base = config.opt_base_learning_rate
        outcome = train(
            model=model,
            optimizer=optimizer,
            lr_at=warmup_cosine(base, rules.end_learning_rate(base), config.opt_learning_rate_warmup_steps, rules.max_steps),
            batches=batches,
            eval_batches=pad_for_ranks(next_token_pairs(validation), processes, config.eval_micro_batch_size),
            batching=batching_of(config),
            eval_interval=rules.eval_interval(config.global_batch_size),
            target_loss=rules.target_loss,
            max_samples=config.max_samples,
            log_every_steps=config.log_every_steps,
            processes=processes,
            log=self.log,
            meter=self.meter,
            heartbeat=self.heartbeat,
        )
        minutes = self.log.run_stop(outcome.samples, "success")
        batches.close()
        self.events.write("verdict", status="success", samples=outcome.samples, loss=outcome.loss, minutes=minutes)
        self.heartbeat.beat(self.step(), "done")

    def step(self) -> int:
        return self.meter.samples // self.config.global_batch_size if self.meter else 0

    def abort(self) -> None:
        self.progress.close()
        samples = self.meter.samples if self.meter else 0
        self.log.abort(samples)
        self.events.write("verdict", status="aborted", samples=samples, loss=None, minutes=None)


def bench(args: argparse.Namespace) -> None:
    """Throughput of the configured step on synthetic tokens, optimizer included. No data, no evaluation, no MLLOG."""
    config = configs.load(args.config, dict(item.split("=", 1) for item in args.set))
    rules = MINIATURE if config.miniature else CLOSED
    if args.layers:
        rules = replace(rules, shape=replace(rules.shape, num_layers=args.layers))
    processes = start_processes(args.device, config.hang_timeout_s)
    progress = Progress(processes.rank == 0)
    meter = meter_for(config, rules, processes, Events(None), progress)
    began = time.monotonic()
    with attention_backends(processes.device.type):
        model, optimizer = build(config, rules, processes, args.seed)
        progress.show(f"model and optimizer built in {time.monotonic() - began:.1f} s", final=True)
        source = synthetic_batches(config, rules, processes, config.micro_batch_size)
        for step in range(args.warmup + args.steps):
            if step == args.warmup:
                processes.barrier()
                meter.start()
            loss, norm = train_step(model, optimizer, source, batching_of(config), 1e-6, processes.world_size, lambda phase: None)
            if step >= args.warmup:
                meter.record(step - args.warmup + 1, 1e-6, loss, norm)
    meter.flush(next_eval_samples=0)
    if processes.rank == 0:
        print(bench_line(args, config, rules, processes, meter), flush=True)
    torch.distributed.destroy_process_group()


def bench_line(args: argparse.Namespace, config: RunConfig, rules: Rules, processes: Processes, meter: Meter) -> str:
    median_ms = statistics.median(meter.step_times_ms)
    rate = Rate.of(median_ms, meter.tokens_per_step, processes.world_size, meter.flops_per_token, meter.peak_tflops)
    spread = f"{min(meter.step_times_ms):.1f}..{max(meter.step_times_ms):.1f}"
    memory = memory_gib(processes.device)
    used = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated, {memory:.1f} GiB reserved" if memory else ""
    return (
        f"BENCH {BENCHMARK} {Path(args.config).stem} {config.precision}, {rules.shape.num_layers} layers, {processes.world_size} x "
        f"{config.micro_batch_size} x {config.gradient_accumulation_steps} sequences of {rules.sequence_length}: {rate.text()}, "
        f"step {median_ms:.1f} ms (median of {args.steps}; {spread}){used}"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llama31_8b.train", description=__doc__)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--config-name", help="name of the TOML, as it goes into the log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="bench a model of fewer layers")
    args = parser.parse_args(argv)
    needed = ("config",) if args.bench else ("run_dir", "data_dir", "config_name")
    for name in needed:
        if getattr(args, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is missing", "the trainer was started by hand without it", "use ./run_and_time.sh")
    return args


def main(argv: list[str]) -> None:
    args, rank = parse(argv), int(os.environ.get("RANK", "0"))
    if args.bench:
        run_guarded(None, rank, partial(bench, args), lambda: None, lambda: 0)
        return
    run = Run(args, rank)
    run_guarded(args.run_dir, rank, run.body, run.abort, run.step)
    # The record says "done"; waiting for the peers here would only give a broken group a chance to hang.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
