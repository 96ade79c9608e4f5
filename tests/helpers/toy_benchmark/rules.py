"""Rules of `toy_benchmark`, as small as a benchmark can be: learn to count upwards."""

from __future__ import annotations

from dataclasses import dataclass

from common import benchmarks
from common.benchmarks import LogValue
from common.config import RunConfig
from common.model.shapes import ModelShape

BENCHMARK = "toy_benchmark"
TRAIN_FILE = "counting.npy"
VALIDATION_FILE = "counting_validation.npy"


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    opt_learning_rate_warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class Rules(benchmarks.Rules):
    train_samples: int  # sequences in TRAIN_FILE

    @property
    def data_files(self) -> tuple[str, ...]:
        return (TRAIN_FILE, VALIDATION_FILE)

    def fixed_log_values(self) -> dict[str, LogValue]:
        return super().fixed_log_values() | {"train_samples": self.train_samples}

    def own_log_keys(self, config: RunConfig) -> list[tuple[str, LogValue]]:
        assert isinstance(config, Config)
        return [("opt_learning_rate_warmup_steps", config.opt_learning_rate_warmup_steps)]


MINIATURE = Rules(
    division="miniature",
    shape=ModelShape(1, 32, 64, 2, 1, 64, 10000.0),
    sequence_length=32,
    train_samples=512,
    eval_samples=8,
    eval_interval_samples=64,
    target_loss=1.0,
    adam_beta_1=0.9,
    adam_beta_2=0.95,
    adam_epsilon=1e-8,
    weight_decay=0.0,
    gradient_clip_norm=1.0,
)
DIVISIONS = (MINIATURE,)


def rules_of(config: RunConfig) -> Rules:
    return MINIATURE
