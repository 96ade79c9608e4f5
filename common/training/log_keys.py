"""The log keys that every benchmark has: what MLPerf 6.1 wants disclosed about precision and parallelism. Standard library only."""

from __future__ import annotations

from common.config import RunConfig

PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16"}  # ours -> the word of the MLPerf log


def disclosure(config: RunConfig, config_filename: str) -> list[tuple[str, int | float | str]]:
    """The nine keys that 6.1 demands. We shard data and weights only: all four model parallelisms are 1.

    `config_filename`: name of the TOML under configs/<benchmark>/. Source: compliance checker, training_6.1.0/common.yaml.
    """
    return [
        ("lowest_numerical_precision_in_linear", "fp8" if config.fp8 else PRECISIONS[config.precision]),
        ("lowest_numerical_precision_in_attn", PRECISIONS[config.precision]),
        ("lowest_numerical_precision_in_comm", PRECISIONS[config.precision]),
        ("tensor_parallelism", 1),
        ("pipeline_parallelism", 1),
        ("context_parallelism", 1),
        ("expert_parallelism", 1),
        ("micro_batch_size", config.micro_batch_size),
        ("config_filename", config_filename),
    ]
