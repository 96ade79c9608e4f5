"""One rank's run around a benchmark's own few lines: arguments, files, clock, reporting, and the way it ends.

A benchmark's train.py defines `run(session)`, which builds its objects and hands them to common/training/loop.py, and ends with
`main(sys.argv[1:], Config, run, NAME)`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from common import config as configs
from common.benchmarks import Rules
from common.config import RunConfig
from common.errors import ConfigError, TargetMissed
from common.gpu_kinds import KINDS
from common.sharding.processes import Processes, start_processes
from common.training.assembly import Assembly, Batching
from common.training.guard import run_guarded
from common.training.heartbeat import Heartbeat
from common.training.log_keys import hyperparameters
from common.training.loop import Goal, Reporting, train
from common.training.metrics import Events, Meter, Progress
from common.training.mllog import RunLog
from common.training.rank_comparison import compare_ranks
from common.training.warmup import warm_up


class Session:
    """One rank's files, clock and reporting. Without a run directory nothing is logged."""

    def __init__(self, args: argparse.Namespace, config: RunConfig, rank: int):
        self.args, self.config, self.rank = args, config, rank
        self.run_dir: Path | None = args.run_dir
        writes = rank == 0 and self.run_dir is not None
        self.log = RunLog(args.run_dir / "result.txt" if writes else None)
        self.events = Events(args.run_dir / "events.jsonl" if writes else None)
        self.progress = Progress(rank == 0)
        self.heartbeat = Heartbeat(self.run_dir, rank)
        self.meter: Meter | None = None
        self.over = False  # run_stop is written, or the run has failed before

    # The beginning.

    def start(self, high_priority_compute: bool = False) -> Processes:
        """Log what comes before any model exists, and join the process group. Raises ConfigError if it has another size.

        `high_priority_compute`: see `start_processes`.
        """
        self.heartbeat.write(0, "init")
        self.began = time.monotonic()
        self.log.cache_clear(os.environ.get("CACHE_CLEARED", "no") != "no")
        self.log.init_start()
        processes = start_processes(self.args.device, self.config.hang_timeout_s, high_priority_compute)
        if processes.world_size != (expected := self.config.world_size):
            raise ConfigError(
                f"{processes.world_size} process{'es' if processes.world_size > 1 else ''} started, but the config is for {expected}",
                "gradients would be accumulated for another number, and the global batch would not be the one in the log",
                "start it through ./run_and_time.sh, or change nodes and gpus_per_node",
            )
        return processes

    def log_submission(self, benchmark: str, rules: Rules, train_samples: int) -> None:
        """`train_samples`: training sequences in the data set."""
        self.benchmark = benchmark
        platform = f"{self.config.nodes}x{self.config.gpus_per_node} {self.config.gpu}"
        self.log.submission(
            benchmark=benchmark,
            org=os.environ.get("MLPERF_SUBMISSION_ORG", "unnamed"),
            platform=os.environ.get("MLPERF_SUBMISSION_PLATFORM", platform),
            division=rules.division,
            status="onprem",
        )
        self.log.seed(self.args.seed)
        self.log.hyperparameters(hyperparameters(self.config, rules, train_samples, self.args.config_name))

    def phase_done(self, name: str, **facts) -> None:
        """Note a phase before the clock: seconds since the last one."""
        now = time.monotonic()
        self.events.write("phase", name=name, seconds=now - self.began, time_s=0.0, **facts)
        self.began = now

    def make_meter(self, sequence_length: int, flops_per_token: int, processes: Processes) -> Meter:
        config = self.config
        # No peak, so no MFU, where the run is elsewhere than its config says: the miniature on a GPU.
        peak_tflops = KINDS[config.gpu].peak_bf16_tflops if processes.device.type == "cuda" and config.gpu in KINDS else None
        self.meter = Meter(
            processes,
            self.events,
            tokens_per_step=config.global_batch_size * sequence_length,
            samples_per_step=config.global_batch_size,
            flops_per_token=flops_per_token,
            peak_tflops=peak_tflops,
        )
        return self.meter

    @property
    def batching(self) -> Batching:
        return Batching(self.config.global_batch_size, self.config.gradient_accumulation_steps)

    # Warm-up, clock, training, success.

    def train(
        self,
        assembly: Assembly,
        rules: Rules,
        lr_at: Callable[[int], float],
        processes: Processes,
        open_data: Callable[[int], tuple[Iterator[Tensor], list[Tensor]]],
        save: Callable[[], None],
    ) -> None:
        """From the synthetic steps to run_stop. `open_data` opens the token files, when the clock runs: training micro-batches after so many
        steps, and all of an evaluation. `save` keeps what was trained, after run_stop, also of a run that missed its target.
        """
        config, on_phase = self.config, partial(self.heartbeat.write, 0)
        checkpoints = None
        if self.args.checkpoint or self.args.continues:
            from common.training.checkpoint import Checkpoints  # no other run needs it

            checkpoints = Checkpoints(self, assembly, processes)
        digest = warm_up(assembly, self.batching, (config.micro_batch_size, config.eval_micro_batch_size), processes, on_phase)
        self.phase_done("warmup", state_digest=digest)
        meter = self.make_meter(rules.sequence_length, rules.flops_per_token, processes)
        step = checkpoints.load() if checkpoints else 0
        if step:
            meter.samples = step * config.global_batch_size
            self.log.resumed(meter.samples, self.args.continues.name)
            self.phase_done("load checkpoint", step=step)
        processes.barrier()
        self.log.init_stop()
        self.log.run_start()
        on_phase("open data")
        batches, validation = open_data(step)
        size = config.global_batch_size
        goal = Goal(rules.eval_interval(size), rules.first_evaluation(size), rules.target_loss, config.max_samples)
        ranks = compare_ranks(processes, self.events, self.progress, assembly.model)
        reporting = Reporting(self.log, meter, self.heartbeat, ranks, checkpoints)
        try:
            outcome = train(assembly, lr_at, batches, validation, self.batching, goal, processes, reporting, step)
        except TargetMissed:
            self.abort()
            self.heartbeat.write(self.step(), "save")
            save()
            processes.barrier()  # else torchrun would end the rank that saves when another one has ended
            raise
        minutes = self.log.run_stop(outcome.samples, "success")
        self.events.write("verdict", status="success", samples=outcome.samples, loss=outcome.loss, minutes=minutes)
        self.over = True
        if checkpoints:
            checkpoints.finish()
        self.heartbeat.write(self.step(), "done")
        save()

    # Failure.

    def abort(self) -> None:
        if self.over:  # what failed came after the run
            return
        self.over = True
        samples = self.meter.samples if self.meter else 0
        self.log.abort(samples)
        self.events.write("verdict", status="aborted", samples=samples, loss=None, minutes=None)

    def step(self) -> int:
        return self.meter.samples // self.config.global_batch_size if self.meter else 0


def main(argv: list[str], kind: type[RunConfig], run: Callable[[Session], None], program: str, saves: bool = False) -> None:
    """Entry of a rank: `run` under the guard. Does not return. `saves`: the program takes --save."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="One rank of a timed run; ./run_and_time.sh starts it.")
    parser.add_argument("--run-dir", type=Path, required=True, help="holds config.toml; results go here")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--config-name", required=True, help="name of the TOML, as it goes into the log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--checkpoint", metavar="WHEN", help="save the state of training: after N evaluations, or every Ns, seconds")
    parser.add_argument("--continue", dest="continues", type=Path, metavar="RUN", help="go on from the checkpoint of this run")
    if saves:
        parser.add_argument("--save", action="store_true", help="write the trained model when the clock has stopped")
    args = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    session: Session | None = None  # until its config was read

    def work() -> None:
        nonlocal session
        session = Session(args, configs.load(args.run_dir / "config.toml", kind), rank)
        run(session)

    run_guarded(args.run_dir, rank, work, lambda: session.abort() if session else None, lambda: session.step() if session else 0)
