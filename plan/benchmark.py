"""A benchmark as the plan sees it: its configs, and what its rules fix. Standard library only, besides the benchmark's rules."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from common import config as configs
from common.config import RunConfig
from common.gpu_kinds import KINDS
from common.hardware import config_names, config_path
from plan.estimate import Workload


def load_all(root: Path, benchmark: str, overrides: dict[str, str] | None = None) -> dict[str, RunConfig]:
    """Name -> config, in the order of GPU and number of GPUs."""
    kind = config_class(benchmark)
    found = {name: configs.load(config_path(root, benchmark, name), kind, overrides) for name in config_names(root, benchmark)}
    return dict(sorted(found.items(), key=lambda item: ([*KINDS, "CPU"].index(item[1].gpu), item[1].world_size)))


def _rules(benchmark: str) -> ModuleType:
    return importlib.import_module(f"{benchmark}.rules")


def config_class(benchmark: str) -> type[RunConfig]:
    return _rules(benchmark).Config


def workload(benchmark: str, config: RunConfig) -> Workload:
    """What the benchmark's rules fix, at the config's global batch."""
    rules, batch = _rules(benchmark).MINIATURE if config.miniature else _rules(benchmark).CLOSED, config.global_batch_size
    intervals = rules.eval_interval(batch), rules.first_evaluation(batch)
    return Workload(rules.shape, rules.sequence_length, rules.eval_samples, *intervals, getattr(rules, "lora_rank", 0))
