"""Files of runs for the tests, with invented numbers.

A run has a log, which the real RunLog writes, events, config, versions and GPU samples.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

from common import config
from common.records.mlperf_log import TOKEN
from common.training.log_keys import hyperparameters
from common.training.mllog import RunLog
from llama2_70b_lora import rules as lora_rules
from llama31_8b import rules
from llama31_8b.rules import Config

CONFIG_FILENAME = "A_TEST_1x8.toml"
ORG = "Acme"
CONFIG = "MI355X_1x8.toml"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MS = 1_000_000  # ns


@dataclass(frozen=True)
class Benchmark:
    """Contents of the log of one benchmark."""

    rules: ModuleType
    config: dict  # the keys of its config that decide convergence
    train_samples: int

    def run_config(self, global_batch_size: int | None = None, **changes) -> config.RunConfig:
        sizes = {
            "nodes": 1,
            "gpus_per_node": 8,
            "micro_batch_size": 1,
            "eval_micro_batch_size": 1,
            "max_samples": 1_000_000,
        }
        table = {"gpu": "MI355X", **sizes, **self.config, **changes}
        return config.from_table(
            table | ({"global_batch_size": global_batch_size} if global_batch_size else {}),
            self.rules.Config,
            "test",
        )


PRETRAINING = Benchmark(
    rules,
    {
        "global_batch_size": 32,
        "opt_base_learning_rate": 8e-4,
        "opt_learning_rate_warmup_steps": 128,
    },
    1_574_207,
)
LORA = Benchmark(
    lora_rules,
    {
        "global_batch_size": 8,
        "opt_base_learning_rate": 4e-4,
        "opt_learning_rate_training_steps": 1024,
    },
    3901,
)
BENCHMARKS = (PRETRAINING, LORA)


def benchmark_of(rules_) -> Benchmark:
    return next(benchmark for benchmark in BENCHMARKS if isinstance(rules_, benchmark.rules.Rules))


def project_root(folder: Path) -> Path:
    """Create a project that has the config that the log names."""
    for benchmark in BENCHMARKS:
        path = folder / "configs" / benchmark.rules.BENCHMARK / CONFIG_FILENAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def run_config(global_batch_size: int = 32, **changes) -> Config:
    found = PRETRAINING.run_config(global_batch_size, **changes)
    assert isinstance(found, Config)
    return found


def start(path: Path | None, rules_=rules.CLOSED, global_batch_size: int | None = None) -> RunLog:
    """Write a log up to run_start."""
    log = RunLog(path)
    log.cache_clear(True)
    log.init_start()
    initialize(log, rules_, benchmark_of(rules_).run_config(global_batch_size))
    return log


def initialize(
    log: RunLog,
    rules_,
    config: config.RunConfig,
    config_filename: str = CONFIG_FILENAME,
    org: str = "An Organisation",
    platform: str = "8 GPUs",
    seed: int = 3_123_456_789,
    status: str = "onprem",
) -> None:
    """Log what comes between init_start and run_start."""
    benchmark = benchmark_of(rules_)
    train_samples = getattr(rules_, "train_samples", benchmark.train_samples)
    log.submission(
        benchmark=benchmark.rules.BENCHMARK,
        org=org,
        platform=platform,
        division=rules_.division,
        status=status,
    )
    log.seed(seed)
    log.hyperparameters(hyperparameters(config, rules_, train_samples, config_filename))
    log.init_stop()
    log.run_start()


def evaluate(log: RunLog, samples: int, loss: float) -> None:
    log.eval_start(samples)
    log.eval_accuracy(samples, loss)
    log.eval_stop(samples)


def write_good(
    path: Path, rules_=rules.CLOSED, global_batch_size: int | None = None, evaluations: int = 4
) -> Path:
    """Write the log of a run that reaches the target at its last evaluation."""
    batch = benchmark_of(rules_).run_config(global_batch_size).global_batch_size
    first, interval = rules_.first_evaluation(batch), rules_.eval_interval(batch)
    return write_evaluations(
        path, rules_, [first + interval * index for index in range(evaluations)], batch
    )


def write_evaluations(
    path: Path, rules_, counts: list[int], global_batch_size: int | None = None
) -> Path:
    """Write a run that reaches the target, with evaluations at `counts` training sequences.

    `counts` need not follow the rules.
    """
    log = start(path, rules_, global_batch_size)
    losses = iter(losses_to_target(rules_, len(counts)))
    train_and_evaluate(
        log, counts, 25.5, lambda before, samples: None, lambda samples: next(losses)
    )
    time.sleep(0.002)  # a run without a duration is no result
    log.run_stop(counts[-1], "success")
    log.close()
    return path


def losses_to_target(rules_, evaluations: int) -> list[float]:
    """Return the loss of each evaluation of a run that reaches the target at its last one."""
    return [rules_.target_loss + 0.05 * left for left in range(evaluations - 1, -1, -1)]


def train_and_evaluate(
    log: RunLog,
    counts: Iterable[int],
    throughput: float,
    train: Callable[[int, int], None],
    evaluation: Callable[[int], float],
    killed: bool = False,
) -> int:
    """Log a block and an evaluation for each of `counts`. Return the samples at the last eval_stop.

    `train(before, samples)` and `evaluation(samples)`, which returns a loss, may let time pass.
    If `killed`, the log ends before the last eval_stop.
    """
    counts = list(counts)
    before = 0
    for samples in counts:
        log.block_start(before)
        train(before, samples)
        log.block_stop(samples, throughput=throughput)
        log.eval_start(samples)
        log.eval_accuracy(samples, evaluation(samples))
        if killed and samples == counts[-1]:
            break
        log.eval_stop(samples)
        before = samples
    return before


def records(path: Path) -> list[dict]:
    return [json.loads(line[len(TOKEN) :]) for line in path.read_text().splitlines()]


def write_records(path: Path, changed: list[dict]) -> Path:
    path.write_text("".join(f"{TOKEN} {json.dumps(record)}\n" for record in changed))
    return path


def find(log: list[dict], key: str, occurrence: int = 0) -> int:
    """Return the index in `log` of an occurrence of `key`, counted from 0.

    The line number is one more than the index.
    """
    return [index for index, record in enumerate(log) if record["key"] == key][occurrence]


# Logs of whole closed runs: RunLog's lines get the times of a run.


@dataclass(frozen=True)
class Timed:
    """Times of a run in seconds.

    `minutes` of the whole run, if given, set the time after the last evaluation.
    """

    samples: int  # training sequences to the target
    samples_per_s: float = 30.0
    evaluation_s: float = 10.0
    first_block_s: float = 6.0  # additional seconds of the first block
    minutes: float | None = None
    converged: bool = True


def write_timed(
    path: Path,
    benchmark: Benchmark,
    run: Timed,
    seed: int,
    rules_=None,
    global_batch_size: int | None = None,
) -> Path:
    """Write the log of one run, with evaluations by the rules up to `run.samples`."""
    rules_ = rules_ or benchmark.rules.CLOSED
    batch = benchmark.run_config(global_batch_size).global_batch_size
    counts = list(
        range(rules_.first_evaluation(batch), run.samples + 1, rules_.eval_interval(batch))
    )
    assert counts[-1] == run.samples, f"no evaluation at {run.samples}"
    path.parent.mkdir(parents=True, exist_ok=True)
    changed = json.loads(_template(rules_, batch, tuple(counts)))
    changed[find(changed, "seed")]["value"] = seed
    if not run.converged:
        changed[find(changed, "eval_accuracy", len(counts) - 1)]["value"] = rules_.target_loss + 0.1
        changed[-1]["metadata"]["status"] = "aborted"
    set_times(changed, run)
    return write_records(path, changed)


@cache
def _template(rules_, batch: int, counts: tuple[int, ...]) -> str:
    """Return the records of a log as JSON, for all runs of the same length.

    They are cached because RunLog, which writes them, waits for the disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        return json.dumps(
            records(write_evaluations(Path(folder) / "log", rules_, list(counts), batch))
        )


def set_times(changed: list[dict], run: Timed) -> None:
    """Set the time of each record in place, with the first record's time as the beginning.

    All records before run_start get that time. run_start follows a minute later.
    """
    began = changed[0]["time_ms"]
    start = now = float(began + 60_000)
    before = 0
    for record in changed:
        samples = record["metadata"].get("samples_count", 0)
        if record["key"] == "block_stop":
            block_ms = (samples - before) / run.samples_per_s * 1000
            if before == 0:
                block_ms += run.first_block_s * 1000
            now += block_ms
            before = samples
        elif record["key"] == "eval_accuracy":
            now += run.evaluation_s * 1000
        elif record["key"] == "run_stop" and run.minutes is not None:
            assert start + run.minutes * 60_000 >= now, (
                "the parts of the run take longer than the whole"
            )
            now = start + run.minutes * 60_000
        in_init = before == 0 and samples == 0 and record["key"] not in ("run_start", "block_start")
        record["time_ms"] = began if in_init else round(now)


def write_timed_series(folder: Path, benchmark: Benchmark, runs: list[Timed], **options) -> Path:
    """Write result_0.txt, result_1.txt, ... as in a submission."""
    for index, run in enumerate(runs):
        write_timed(folder / f"result_{index}.txt", benchmark, run, seed=1000 + index, **options)
    return folder


# The directory of a run.


def write_json_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def step_event(step: int, samples: int, **values) -> dict:
    return {"event": "step", "step": step, "samples": samples, **values}


def evaluation_event(step: int, samples: int, loss: float, seconds: float, time_s: float) -> dict:
    values = {"loss": loss, "seconds": seconds, "time_s": time_s}
    return {"event": "eval", "step": step, "samples": samples, **values}


def phase_event(name: str, seconds: float, time_s: float) -> dict:
    return {"event": "phase", "name": name, "seconds": seconds, "time_s": time_s}


def events(steps: int = 50, interval: int = 12288) -> list[dict]:
    """Return events of a run that reaches the target at its fourth evaluation, in even numbers."""
    lines = [phase_event("init", 30.0, 0.0)]
    for step in range(1, steps + 1):
        lines.append(
            step_event(
                step,
                step * 1000,
                loss=10 / step**0.3,
                grad_norm=1.0,
                learning_rate=8e-4,
                time_s=step,
                step_time_ms=900 + step % 7,
                tokens_per_s_per_gpu=9000.0,
                tflops_per_gpu=480.0,
                mfu=None,
                memory_gib=100.5,
            )
        )
    for number, loss in enumerate(losses_to_target(rules.CLOSED, 4), start=1):
        lines.append(evaluation_event(number, number * interval, loss, 8.25, 60.0))
    lines += [phase_event(name, 100.0, 200.0) for name in ("train", "eval")]
    lines.append(
        {
            "event": "self_test",
            "attention": "cudnn-of-the-test",
            "seconds": 5.0,
            "ops": 30,
            "worst": "attention: 50.0 dB",
        }
    )
    verdict = {"status": "success", "samples": 4 * interval, "loss": 3.3, "minutes": 5.0}
    lines.append({"event": "verdict", **verdict})
    return lines


def spread(path: Path, milliseconds: int) -> None:
    """Put `milliseconds` between the records of the log. An evaluation takes two of these."""
    log = records(path)
    write_records(
        path,
        [
            record | {"time_ms": log[0]["time_ms"] + milliseconds * index}
            for index, record in enumerate(log)
        ],
    )


def write_run(folder: Path, gpus: int = 0) -> Path:
    """Write a good run into `folder`, which exists, with a minute of samples of `gpus` GPUs."""
    log = write_good(folder / "result.txt")
    spread(log, 4125)
    write_json_lines(folder / "events.jsonl", events())
    versions = {"commit": "0123abc", "torch": "2.13.0", "gpus": ["MI355X"] * 8}
    write_facts(folder, 'gpu = "MI355X"\nglobal_batch_size = 32\n', versions)
    if gpus:
        write_json_lines(folder / "gpu_samples.jsonl", gpu_samples(gpus, run_start_s(log)))
    return folder


def write_facts(folder: Path, config: str, versions: dict) -> None:
    (folder / "config.toml").write_text(config)
    (folder / "versions.json").write_text(json.dumps(versions))


def run_start_s(log: Path) -> float:
    found = records(log)
    return found[find(found, "run_start")]["time_ms"] / 1e3


def sample_lines(source: str, start_s: float, gpus: list[dict], samples: list[list[dict]]) -> list:
    """Return the lines of gpu_samples.jsonl: the GPUs, then a sample of all of them each second."""
    start = {"event": "start", "source": source, "time": start_s, "gpus": gpus}
    rows = [
        {"event": "sample", "time_s": second, "gpus": values}
        for second, values in enumerate(samples)
    ]
    return [start, *rows]


def gpu_samples(gpus: int, start_s: float) -> list[dict]:
    samples = []
    for second in range(60):
        wave = math.sin(second / 9)
        row = []
        for gpu in range(gpus):
            row.append(
                {
                    "power_w": 1000 + 10 * gpu + 20 * wave,
                    "temperature_c": 60 + gpu,
                    "clock_mhz": 2000 - gpu,
                    "memory_gib": 100.5,
                    "throttle": [],
                }
            )
        samples.append(row)
    return sample_lines("a test", start_s, [{"name": "MI355X"}] * gpus, samples)


# An attempt of a series, timed by a simulated clock.


class Clock:
    """The clock of a RunLog, which advances only by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_790_000_000_000 * MS

    def __call__(self) -> int:
        return self.now_ns // MS

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1000) * MS


@dataclass
class Plan:
    """An attempt: the evaluation that reaches the target, or the kind of failure."""

    evaluations: int
    seed: int
    fails: str = ""  # "", missed, killed (no run_stop), early (no run_start), unclean
    changes: dict = field(default_factory=dict)  # of versions.json
    org: str = ORG
    platform: str = "1x8 MI355X"
    status: str = "onprem"
    config_name: str = CONFIG
    # Number of evaluations after which the loss curve would reach the target, if the run ends
    # before; 0: `evaluations`.
    shape: int = 0


def write_attempt(
    run_dir: Path,
    benchmark: Benchmark,
    rules_,
    config: config.RunConfig,
    plan: Plan,
    versions: dict,
    clock: Clock,
) -> int:
    """Write the log, events, config and versions of one attempt. Return its samples."""
    write_facts(run_dir, config.as_toml(), versions)
    log = RunLog(run_dir / "result.txt", clock)
    log.cache_clear(True)
    log.init_start()
    clock.pass_s(95)
    if plan.fails == "early":
        log.abort(0)
        return 0
    initialize(
        log, rules_, config, plan.config_name, plan.org, plan.platform, plan.seed, plan.status
    )
    batch = config.global_batch_size
    first, interval = rules_.first_evaluation(batch), rules_.eval_interval(batch)
    counts = [first + interval * index for index in range(plan.evaluations)]
    curve = Curve(plan, rules_, batch, clock)
    killed = plan.fails == "killed"
    samples = train_and_evaluate(
        log, counts, batch / 0.9, curve.train, curve.evaluate, killed=killed
    )
    if not killed:
        log.run_stop(samples, "aborted" if plan.fails == "missed" else "success")
        log.close()
    curve.write(run_dir / "events.jsonl")
    return samples


class Curve:
    """Plausible curves: a power law to the target, little noise, steps of 0.9 s with a tail."""

    def __init__(self, plan: Plan, rules_, batch: int, clock: Clock):
        self.chance = random.Random(plan.seed)
        self.target = rules_.target_loss
        self.batch = batch
        self.clock = clock
        first, interval = rules_.first_evaluation(batch), rules_.eval_interval(batch)
        self.total = first + (max(plan.shape, plan.evaluations) - 1) * interval
        self.reached_at = None
        if plan.fails in ("", "unclean"):
            self.reached_at = first + (plan.evaluations - 1) * interval
        self.step_ms = 900 + self.chance.gauss(0, 4)
        self.seconds = {"init": 62.0, "warmup": 33.0, "train": 0.0, "eval": 0.0}
        self.start_loss = 11.8 if self.target > 2 else 1.4
        self.lines: list[dict] = []

    def _loss(self, samples: int) -> float:
        floor = self.target - 0.15 * (self.start_loss - self.target)
        return floor + (self.start_loss - floor) * 0.13 ** min(1.0, (samples / self.total) ** 0.35)

    def train(self, before: int, samples: int) -> None:
        """Let the time of a block pass. Every twentieth step is recorded, and the first five."""
        elapsed = 0.0
        for step in range(before // self.batch + 1, samples // self.batch + 1):
            time_ms = self.step_ms + abs(self.chance.gauss(0, 3))
            if self.chance.random() < 0.01:
                time_ms += 60
            elapsed += time_ms / 1000
            if step % 20 == 0 or step <= 5:
                self._record(step, time_ms, self.seconds["train"] + elapsed)
        self.seconds["train"] += elapsed
        self.clock.pass_s(elapsed)

    def _record(self, step: int, time_ms: float, time_s: float) -> None:
        rate = self.batch * 8192 / 8 / time_ms * 1000
        loss = self._loss(step * self.batch) + self.chance.gauss(0, 0.03)
        self.lines.append(
            step_event(
                step,
                step * self.batch,
                loss=loss,
                grad_norm=0.4,
                learning_rate=4e-4,
                step_time_ms=time_ms,
                time_s=time_s,
                tokens_per_s_per_gpu=rate,
                tflops_per_gpu=rate * 51.47e-3,
                mfu=rate * 51.47e-3 / 2516.6,
                memory_gib=214.5 + self.chance.random(),
            )
        )

    def evaluate(self, samples: int) -> float:
        """Let the time of an evaluation pass. Return its loss."""
        loss = self._loss(samples) + self.chance.gauss(0, 0.004)
        if samples == self.reached_at:
            loss = self.target - abs(self.chance.gauss(0, 0.004))
        else:
            loss = max(loss, self.target + 0.006)
        self.seconds["eval"] += 21.5
        self.clock.pass_s(21.5)
        step = samples // self.batch
        self.lines.append(evaluation_event(step, samples, loss, 21.5, self.seconds["train"]))
        return loss

    def write(self, path: Path) -> None:
        phases = [phase_event(name, seconds, 0.0) for name, seconds in self.seconds.items()]
        write_json_lines(path, self.lines + phases)
