"""Logs for the tests, written through the real RunLog with invented losses; and ways to spoil them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Benchmark:
    """What the log of one benchmark is made of."""

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
    """A project that has the config the log names."""
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
    """A log up to run_start."""
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
) -> None:
    """Log what comes between init_start and run_start."""
    benchmark = benchmark_of(rules_)
    train_samples = getattr(rules_, "train_samples", benchmark.train_samples)
    log.submission(
        benchmark=benchmark.rules.BENCHMARK,
        org=org,
        platform=platform,
        division=rules_.division,
        status="onprem",
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
    """A run that reaches the target at its last evaluation."""
    batch = benchmark_of(rules_).run_config(global_batch_size).global_batch_size
    first, interval = rules_.first_evaluation(batch), rules_.eval_interval(batch)
    return write_evaluations(
        path, rules_, [first + interval * index for index in range(evaluations)], batch
    )


def write_evaluations(
    path: Path, rules_, counts: list[int], global_batch_size: int | None = None
) -> Path:
    """The same, with evaluations at `counts` training sequences, be that by the rules or not."""
    log = start(path, rules_, global_batch_size)
    for number, (before, samples) in enumerate(zip([0, *counts], counts, strict=False), start=1):
        log.block_start(before)
        log.block_stop(samples, throughput=25.5)
        evaluate(log, samples, rules_.target_loss + 0.05 * (len(counts) - number))
    log.run_stop(counts[-1], "success")
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line[len(TOKEN) :]) for line in path.read_text().splitlines()]


def write_records(path: Path, changed: list[dict]) -> Path:
    path.write_text("".join(f"{TOKEN} {json.dumps(record)}\n" for record in changed))
    return path


def find(log: list[dict], key: str, occurrence: int = 0) -> int:
    """Index in `log` of the given occurrence of `key`; its line number is one more."""
    return [index for index, record in enumerate(log) if record["key"] == key][occurrence]


# --- whole closed runs: every line from RunLog, its times then set to those of a run ---


@dataclass(frozen=True)
class Timed:
    """What a run took. Seconds; `minutes` of the whole run, if given, decide what is left after the last evaluation."""

    samples: int  # training sequences to the target
    samples_per_s: float = 30.0
    evaluation_s: float = 10.0
    first_block_s: float = 6.0  # what the first block takes more
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
    """The log of one run, with evaluations by the rules up to `run.samples`."""
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
    """Written once for all runs of the same length: RunLog waits for the disk."""
    with tempfile.TemporaryDirectory() as folder:
        return json.dumps(
            records(write_evaluations(Path(folder) / "log", rules_, list(counts), batch))
        )


def set_times(changed: list[dict], run: Timed) -> None:
    began = changed[0]["time_ms"]
    start = now = float(began + 60_000)
    before = 0
    for record in changed:
        samples = record["metadata"].get("samples_count", 0)
        if record["key"] == "block_stop":
            now += (samples - before) / run.samples_per_s * 1000 + (
                run.first_block_s * 1000 if before == 0 else 0
            )
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
    """result_0.txt, result_1.txt, ... as in a submission."""
    for index, run in enumerate(runs):
        write_timed(folder / f"result_{index}.txt", benchmark, run, seed=1000 + index, **options)
    return folder
