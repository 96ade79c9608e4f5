"""A benchmark as the plan sees it: its configs, and what its rules fix. Standard library only, besides the benchmark's rules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from common import config as configs
from common.config import RunConfig
from common.gpu_kinds import KINDS
from common.hardware import config_names, config_path
from launch.plan.estimate import Workload


def load_all(root: Path, benchmark: str, overrides: dict[str, str] | None = None) -> dict[str, RunConfig]:
    """Name -> config, in the order of GPU and number of GPUs."""
    kind = config_class(benchmark)
    found = {name: configs.load(config_path(root, benchmark, name), kind, overrides) for name in config_names(root, benchmark)}
    return dict(sorted(found.items(), key=lambda item: ([*KINDS, "CPU"].index(item[1].gpu), item[1].world_size)))


def config_class(benchmark: str) -> type[RunConfig]:
    return importlib.import_module(f"{benchmark}.rules").Config


def rules_of(benchmark: str, config: RunConfig) -> Any:
    """The benchmark's `Rules` that the config runs by: the closed division's, or the miniature's."""
    module = importlib.import_module(f"{benchmark}.rules")
    return module.MINIATURE if config.miniature else module.CLOSED


def workload(benchmark: str, config: RunConfig) -> Workload:
    """What the benchmark's rules fix, at the config's global batch."""
    rules, batch = rules_of(benchmark, config), config.global_batch_size
    intervals = rules.eval_interval(batch), rules.first_evaluation(batch)
    return Workload(rules.shape, rules.sequence_length, rules.eval_samples, *intervals, getattr(rules, "lora_rank", 0))
