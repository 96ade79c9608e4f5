"""The log keys that every benchmark has: what MLPerf 6.1 wants disclosed about precision and parallelism. Standard library only."""

from __future__ import annotations

from common.config import PRECISIONS, RunConfig


def disclosure(config: RunConfig, config_filename: str) -> list[tuple[str, int | float | str]]:
    """The nine keys that 6.1 demands. We shard data and weights only: all four model parallelisms are 1.

    `config_filename`: name of the TOML under configs/<benchmark>/. Source: compliance checker, training_6.1.0/common.yaml.
    """
    return [
        ("lowest_numerical_precision_in_linear", "fp8" if config.fp8 else PRECISIONS[config.precision]),
        ("lowest_numerical_precision_in_attn", PRECISIONS[config.precision]),
        ("lowest_numerical_precision_in_comm", _lower(config.precision, config.reduce_precision)),
        ("tensor_parallelism", 1),
        ("pipeline_parallelism", 1),
        ("context_parallelism", 1),
        ("expert_parallelism", 1),
        ("micro_batch_size", config.micro_batch_size),
        ("config_filename", config_filename),
    ]


def _lower(gather_precision: str, reduce_precision: str) -> str:
    """Weights are gathered in the one and gradients reduced in the other; PRECISIONS stands from high to low."""
    order = list(PRECISIONS)
    return PRECISIONS[max(gather_precision, reduce_precision, key=order.index)]
