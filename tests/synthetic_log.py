"""Logs for the tests, written through the real RunLog with invented losses; and ways to spoil them."""

from __future__ import annotations

import json
from pathlib import Path

from common import config
from common.mllog import TOKEN, RunLog
from llama31_8b import log_keys, rules
from llama31_8b.rules import Rules

CONFIG_FILENAME = "A_TEST_1x8.toml"


def project_root(folder: Path) -> Path:
    """A project that has the config the log names."""
    path = folder / "configs" / rules.BENCHMARK / CONFIG_FILENAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return folder


def run_config(global_batch_size: int = 32, **changes) -> config.RunConfig:
    table = {
        "gpu": "MI355X",
        "nodes": 1,
        "gpus_per_node": 8,
        "global_batch_size": global_batch_size,
        "opt_base_learning_rate": 8e-4,
        "opt_learning_rate_warmup_steps": 128,
        "max_samples": 1_000_000,
        "micro_batch_size": 1,
        "eval_micro_batch_size": 1,
    }
    return config.from_table({**table, **changes}, "test")


def start(path: Path | None, rules_: Rules = rules.CLOSED, global_batch_size: int = 32) -> RunLog:
    """A log up to run_start."""
    log = RunLog(path)
    log.cache_clear(True)
    log.init_start()
    log.submission(benchmark=rules.BENCHMARK, org="An Organisation", platform="8 GPUs", division=rules_.division, status="onprem")
    log.seed(1234567)
    log.hyperparameters(log_keys.hyperparameters(run_config(global_batch_size), rules_, 1_574_207, CONFIG_FILENAME))
    log.init_stop()
    log.run_start()
    return log


def evaluate(log: RunLog, samples: int, loss: float) -> None:
    log.eval_start(samples)
    log.eval_accuracy(samples, loss)
    log.eval_stop(samples)


def write_good(path: Path, rules_: Rules = rules.CLOSED, global_batch_size: int = 32, evaluations: int = 4) -> Path:
    """A run that reaches the target at its last evaluation."""
    log = start(path, rules_, global_batch_size)
    interval = rules_.eval_interval(global_batch_size)
    for index in range(1, evaluations + 1):
        log.block_start((index - 1) * interval)
        log.block_stop(index * interval, throughput=25.5)
        evaluate(log, index * interval, rules_.target_loss + 0.05 * (evaluations - index))
    log.run_stop(evaluations * interval, "success")
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line[len(TOKEN) :]) for line in path.read_text().splitlines()]


def write_records(path: Path, changed: list[dict]) -> Path:
    path.write_text("".join(f"{TOKEN}{json.dumps(record)}\n" for record in changed))
    return path


def find(log: list[dict], key: str, occurrence: int = 0) -> int:
    """Index in `log` of the given occurrence of `key`; its line number is one more."""
    return [index for index, record in enumerate(log) if record["key"] == key][occurrence]
