"""The hyper-parameter lines of a `llama31_8b` log: the closed list, the disclosure keys of 6.1, and the target.

Keys and order: MLPerf compliance checker, training_6.1.0/common.yaml, closed_common.yaml and closed_llama31_8b.yaml.
All of them are always logged, so that one log passes 5.1.0, 6.0.0 and 6.1.0.
Standard library only.
"""

from __future__ import annotations

from common.config import PRECISIONS, RunConfig
from llama31_8b.rules import Rules


def hyperparameters(config: RunConfig, rules: Rules, train_samples: int, config_filename: str) -> list[tuple[str, int | float | str]]:
    """(key, value) in the order of emission.

    `train_samples`: training sequences in the data set. `config_filename`: name of the TOML under configs/llama31_8b/.
    """
    base, warmup_steps = config.opt_base_learning_rate, config.opt_learning_rate_warmup_steps
    return [
        ("global_batch_size", config.global_batch_size),
        ("gradient_accumulation_steps", config.gradient_accumulation_steps),
        ("max_sequence_length", rules.sequence_length),
        ("train_samples", train_samples),
        ("eval_samples", rules.eval_samples),
        ("opt_name", rules.opt_name),
        ("opt_base_learning_rate", base),
        ("opt_end_learning_rate", rules.end_learning_rate(base)),
        ("opt_learning_rate_warmup_steps", warmup_steps),  # the checker computes the next line's value from this one
        ("opt_learning_rate_decay_steps", rules.decay_steps(warmup_steps)),
        ("opt_learning_rate_decay_schedule", rules.decay_schedule),
        ("opt_adamw_beta_1", rules.adam_beta_1),
        ("opt_adamw_beta_2", rules.adam_beta_2),
        ("opt_adamw_epsilon", rules.adam_epsilon),
        ("opt_adamw_weight_decay", rules.weight_decay),
        ("opt_gradient_clip_norm", rules.gradient_clip_norm),
        ("max_steps", rules.max_steps),
        ("target_accuracy", rules.target_loss),
        *disclosure(config, config_filename),
    ]


def disclosure(config: RunConfig, config_filename: str) -> list[tuple[str, int | float | str]]:
    """The nine keys that 6.1 demands. We shard data and weights only: all four model parallelisms are 1."""
    return [
        ("lowest_numerical_precision_in_linear", PRECISIONS[config.precision]),
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
