"""What surrounds a benchmark's own few lines: arguments, files of the run, warm-up, throughput measurement, the way it ends.

A benchmark's train.py defines `run(session)` and `bench(session)`, which build its objects and hand them to the functions here
and to common/training/loop.py, and ends with `main(sys.argv[1:], Config, run, bench)`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common import config as configs
from common.config import RunConfig
from common.data.prefetch import Prefetcher
from common.errors import ConfigError
from common.gpu_kinds import KINDS
from common.model.llama import Llama
from common.model.shapes import ModelShape
from common.sharding.processes import Heartbeat, Processes, start_processes
from common.training.guard import run_guarded
from common.training.loop import Batching, Outcome, evaluate, pad_for_ranks, train, train_step
from common.training.metrics import Events, Meter, Progress, Rate, memory_gib
from common.training.mllog import RunLog
from common.training.optimizer import ClippedAdamW, local
from common.training.rank_comparison import RankComparison, compare_ranks
from common.training.warmup import state_digest, warm_up
from throughput import profiling


class Session:
    """One rank's files and helpers. For `bench` there is no run directory: nothing is logged but the progress line."""

    def __init__(self, args: argparse.Namespace, config: RunConfig, rank: int):
        self.args, self.config, self.rank = args, config, rank
        self.run_dir: Path | None = args.run_dir
        writes = rank == 0 and self.run_dir is not None
        self.log = RunLog(args.run_dir / "result.txt" if writes else None)
        self.events = Events(args.run_dir / "events.jsonl" if writes else None)
        self.progress = Progress(rank == 0)
        self.heartbeat = Heartbeat(self.run_dir, rank)
        self.meter: Meter | None = None
        self.ranks: RankComparison | None = None

    # The beginning.

    def start(self, compute_first: bool = False) -> Processes:
        """Log what comes before any model exists, and join the process group. Raises ConfigError if it has another size.

        `compute_first`: see `start_processes`.
        """
        self.heartbeat.beat(0, "init")
        self.began = time.monotonic()
        self.log.cache_clear(os.environ.get("CACHE_CLEARED", "no") != "no")
        self.log.init_start()
        processes = start_processes(self.args.device, self.config.hang_timeout_s, compute_first)
        if processes.world_size != (wanted := self.config.world_size):
            raise ConfigError(
                f"{processes.world_size} process{'es' if processes.world_size > 1 else ''} started, but the config is for {wanted}",
                "gradients would be accumulated for another number, and the global batch would not be the one in the log",
                "start it through ./run_and_time.sh, or change nodes and gpus_per_node",
            )
        return processes

    def log_submission(self, benchmark: str, division: str, hyperparameters: list) -> None:
        environment = os.environ
        platform = f"{self.config.nodes}x{self.config.gpus_per_node} {self.config.gpu}"
        self.log.submission(
            benchmark=benchmark,
            org=environment.get("MLPERF_SUBMISSION_ORG", "unnamed"),
            platform=environment.get("MLPERF_SUBMISSION_PLATFORM", platform),
            division=division,
            status="onprem",
        )
        self.log.seed(self.args.seed)
        self.log.hyperparameters(hyperparameters)

    def phase_done(self, name: str, **facts) -> None:
        """Note a phase before the clock: seconds since the last one."""
        now = time.monotonic()
        self.events.write("phase", name=name, seconds=now - self.began, time_s=0.0, **facts)
        self.began = now

    def start_clock(self, processes: Processes) -> None:
        """From here on time counts, and from here on token files may be opened."""
        processes.barrier()
        self.log.init_stop()
        self.log.run_start()
        self.heartbeat.beat(0, "open data")

    def make_meter(self, shape: ModelShape, sequence_length: int, flops_per_token: int, processes: Processes) -> Meter:
        config = self.config
        # No peak, so no MFU, where the run is elsewhere than its config says: the miniature on whatever is there.
        peak_tflops = KINDS[config.gpu].peak_bf16_tflops if processes.device.type == "cuda" and config.gpu in KINDS else None
        against = f"; MFU is against {peak_tflops} TFLOP/s, dense bf16" if peak_tflops else ""
        self.progress.show(
            f"{flops_per_token / 1e9:.4g} GFLOP per token, recomputation not counted (common/model/shapes.py){against}", final=True
        )
        self.meter = Meter(
            processes,
            self.events,
            self.progress,
            tokens_per_step=config.global_batch_size * sequence_length,
            samples_per_step=config.global_batch_size,
            flops_per_token=flops_per_token,
            peak_tflops=peak_tflops,
            max_samples=config.max_samples,
        )
        self.ranks = compare_ranks(processes, self.events, self.progress)
        return self.meter

    # The end.

    def succeed(self, outcome: Outcome) -> None:
        minutes = self.log.run_stop(outcome.samples, "success")
        self.events.write("verdict", status="success", samples=outcome.samples, loss=outcome.loss, minutes=minutes)
        self.heartbeat.beat(self.step(), "done")

    def abort(self) -> None:
        self.progress.close()
        samples = self.meter.samples if self.meter else 0
        self.log.abort(samples)
        self.events.write("verdict", status="aborted", samples=samples, loss=None, minutes=None)

    def step(self) -> int:
        return self.meter.samples // self.config.global_batch_size if self.meter else 0


def batching_of(config: RunConfig) -> Batching:
    return Batching(config.global_batch_size, config.gradient_accumulation_steps, config.reshard_after_forward)


def synthetic_batches(vocab_size: int, sequence_length: int, processes: Processes, micro_batch_size: int) -> Iterator[Tensor]:
    """Endless random tokens and labels, int32 [micro batch, 2, sequence] on the device: four batches, made once, in turn."""
    generator = np.random.default_rng(processes.rank)  # own generator: torch's global one must stay as it is
    shape = (micro_batch_size, 2, sequence_length)
    batches = [torch.from_numpy(generator.integers(0, vocab_size, shape, np.int32)).to(processes.device) for _ in range(4)]
    while True:
        yield from batches


def warm_up_on_synthetic_tokens(session: Session, model: Llama, optimizer: ClippedAdamW, processes: Processes) -> None:
    """As `synthetic_warm_up`; the digest of the unchanged state goes into the events."""
    digest = synthetic_warm_up(session.config, model, optimizer, processes, partial(session.heartbeat.beat, 0))
    session.phase_done("warmup", state_digest=digest)


def synthetic_warm_up(config: RunConfig, model: Llama, optimizer: ClippedAdamW, processes: Processes, beat: Callable[[str], None]) -> str:
    """Everything the timed part will do, on random tokens, and back. Returns the digest of the unchanged state."""
    sources = [
        synthetic_batches(model.shape.vocab_size, model.max_sequence_length, processes, size)
        for size in (config.micro_batch_size, config.eval_micro_batch_size)
    ]
    state = [*(local(p.detach()) for p in model.trained_tensors()), *model.scale_tensors()]

    def restore() -> None:
        optimizer.zero_grad()
        optimizer.reset_state()
        model.reset_scales()

    return warm_up(
        lambda lr: train_step(model, optimizer, sources[0], batching_of(config), lr, processes.world_size, beat),
        lambda: evaluate(model, [next(sources[1])], processes, beat),
        restore,
        lambda: state_digest(state, optimizer, data_position=0, device=processes.device),
        train_steps=config.warmup_train_steps,
        eval_steps=config.warmup_eval_steps,
        device=processes.device,
    )


class FixedByRules(Protocol):
    """What the loop needs of a benchmark's rules."""

    @property
    def target_loss(self) -> float: ...
    def eval_interval(self, global_batch_size: int) -> int: ...
    def first_evaluation(self, global_batch_size: int) -> int: ...


def train_to_target(
    session: Session,
    rules: FixedByRules,
    processes: Processes,
    model: Llama,
    optimizer: ClippedAdamW,
    lr_at: Callable[[int], float],
    batches: Prefetcher,
    eval_batches: list[Tensor],
) -> None:
    """The timed part: loop.train with the numbers of config and rules, then run_stop with success. Raises as loop.train does."""
    config, meter = session.config, session.meter
    assert meter is not None
    outcome = train(
        model=model,
        optimizer=optimizer,
        lr_at=lr_at,
        batches=batches,
        eval_batches=eval_batches,
        batching=batching_of(config),
        eval_interval=rules.eval_interval(config.global_batch_size),
        first_evaluation=rules.first_evaluation(config.global_batch_size),
        target_loss=rules.target_loss,
        max_samples=config.max_samples,
        log_every_steps=config.log_every_steps,
        processes=processes,
        log=session.log,
        meter=meter,
        heartbeat=session.heartbeat,
        ranks=session.ranks,
    )
    session.succeed(outcome)
    batches.close()


def measure(session: Session, benchmark: str, model: Llama, optimizer: ClippedAdamW, processes: Processes) -> None:
    """Throughput of the configured step on synthetic tokens, optimizer included: `args.warmup` steps, then `args.steps` timed ones.

    Prints one BENCH line on stdout; the median of the steps counts. With `args.profile` as many steps more, under the profiler.
    """
    config, args, meter = session.config, session.args, session.meter
    assert meter is not None
    source = synthetic_batches(model.shape.vocab_size, model.max_sequence_length, processes, config.micro_batch_size)

    def one_step() -> tuple[Tensor, Tensor]:
        return train_step(model, optimizer, source, batching_of(config), 1e-6, processes.world_size, lambda phase: None)

    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            processes.barrier()
            meter.start()
        loss, norm = one_step()
        if step >= args.warmup:
            meter.record(step - args.warmup + 1, 1e-6, loss, norm)
    meter.flush(next_eval_samples=0)
    if processes.rank == 0:
        print(_bench_line(session, benchmark, model, processes, meter), flush=True)
    if processes.device.type == "cuda":
        print_kept_bytes(session, benchmark, model, processes, next(source))
    if args.eval_sequences:
        measure_evaluation(session, benchmark, model, processes)
    profiled_ms = profiling.record(one_step, args.steps, args.profile, processes) if args.profile else 0.0
    torch.distributed.destroy_process_group()
    if args.profile and processes.rank == 0:
        print(_profile_table(session, benchmark, model, processes, meter, profiled_ms), flush=True)


def print_kept_bytes(session: Session, benchmark: str, model: Llama, processes: Processes, batch: Tensor) -> None:
    """One line: what a forward leaves in memory for its backward, per token and layer, without the logits. `plan` computes the same."""
    with torch.no_grad():
        model(*batch.unbind(1))  # gathers the weights and casts them, if they stay
    before = torch.cuda.memory_allocated()
    losses = model(*batch.unbind(1))
    logits = batch.shape[0] * batch.shape[2] * model.shape.vocab_size * 2
    kept = torch.cuda.memory_allocated() - before - logits
    del losses
    per_token = kept / (batch.shape[0] * batch.shape[2] * model.shape.num_layers)
    if processes.rank == 0:
        print(f"KEPT {benchmark}: {per_token:,.0f} bytes per token and layer for the backward, {kept / 2**30:.1f} GiB in all", flush=True)


def measure_evaluation(session: Session, benchmark: str, model: Llama, processes: Processes) -> None:
    """Time of an evaluation of `args.eval_sequences` synthetic sequences, padded to the ranks, after one that is not timed. One line."""
    config, count, length = session.config, session.args.eval_sequences, model.max_sequence_length
    tokens = np.random.default_rng(0).integers(0, model.shape.vocab_size, (count, 2, length), np.int32)
    batches = pad_for_ranks(tokens, processes, config.eval_micro_batch_size)
    for _ in range(2):
        processes.barrier()
        began = time.monotonic()
        evaluate(model, batches, processes, lambda phase: None)  # ends with a sum over the ranks, read by the host
        seconds = time.monotonic() - began
    rate = count * length / seconds / processes.world_size
    if processes.rank == 0:
        size = config.eval_micro_batch_size
        print(f"EVALUATION {benchmark}: {count} sequences in {seconds:.2f} s, {rate:,.0f} tok/s/GPU, micro-batch {size}", flush=True)


def _profile_table(session: Session, benchmark: str, model: Llama, processes: Processes, meter: Meter, profiled_ms: float) -> str:
    config, args = session.config, session.args
    facts = profiling.Facts(
        benchmark=benchmark,
        config=Path(args.config).stem,
        precision=precision_of(config),
        layers=model.shape.num_layers,
        world_size=processes.world_size,
        device=torch.cuda.get_device_name(processes.device) if processes.device.type == "cuda" else "cpu",
        torch=torch.__version__,
        steps=args.steps,
        tokens_per_step_per_rank=meter.tokens_per_step // processes.world_size,
    )
    micro_batch_tokens = config.micro_batch_size * model.max_sequence_length
    return profiling.summarize(args.profile, model, micro_batch_tokens, facts, profiled_ms, statistics.mean(meter.step_times_ms))


def _bench_line(session: Session, benchmark: str, model: Llama, processes: Processes, meter: Meter) -> str:
    config, args = session.config, session.args
    median_ms = statistics.median(meter.step_times_ms)
    rate = Rate.of(median_ms, meter.tokens_per_step, processes.world_size, meter.flops_per_token, meter.peak_tflops)
    spread = f"{min(meter.step_times_ms):.1f}..{max(meter.step_times_ms):.1f}"
    memory = memory_gib(processes.device)
    used = ""
    if memory:
        free, total = torch.cuda.mem_get_info(processes.device)  # with NCCL's, contexts, and what copy engines reach
        allocated = torch.cuda.max_memory_allocated() / 2**30
        used = f", peak {allocated:.1f} GiB allocated, {memory:.1f} GiB reserved, {(total - free) / 2**30:.1f} GiB of the GPU in use"
    return (
        f"BENCH {benchmark} {Path(args.config).stem} {precision_of(config)}, {model.shape.num_layers} layers, {processes.world_size} x "
        f"{config.micro_batch_size} x {config.gradient_accumulation_steps} sequences of {model.max_sequence_length}: {rate.text()}, "
        f"step {median_ms:.1f} ms (median of {args.steps}; {spread}){used}"
    )


def precision_of(config: RunConfig) -> str:
    """In words, for a line of output."""
    return f"{config.precision}, fp8 {config.fp8} {config.fp8_recipe}" if config.fp8 else config.precision


def parse(argv: list[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--config-name", help="name of the TOML, as it goes into the log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="bench: and as many steps under the profiler; results go to DIR")
    parser.add_argument("--config", type=Path, help="bench: the TOML; a run reads RUN_DIR/config.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="bench a model of fewer layers")
    parser.add_argument("--eval-sequences", type=int, default=0, help="bench: time an evaluation of so many sequences as well")
    args = parser.parse_args(argv)
    for name in ("config",) if args.bench else ("run_dir", "data_dir", "config_name"):
        if getattr(args, name) is None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is missing", "the trainer was started by hand without it", "use ./run_and_time.sh"
            )
    return args


def main(argv: list[str], kind: type[RunConfig], run: Callable[[Session], None], bench: Callable[[Session], None], program: str) -> None:
    """Entry of a rank: `run` or `bench` under the guard. Does not return after a run."""
    args, rank = parse(argv, program), int(os.environ.get("RANK", "0"))
    if args.bench:
        config = configs.load(args.config, kind, dict(item.split("=", 1) for item in args.set))
        session = Session(args, config, rank)
        run_guarded(None, rank, partial(bench, session), lambda: None, lambda: 0)
        return
    session = Session(args, configs.load(args.run_dir / "config.toml", kind), rank)
    run_guarded(args.run_dir, rank, partial(run, session), session.abort, session.step)
    # The record says "done"; waiting for the peers here would only give a broken group a chance to hang.
    os._exit(0)
