"""The hyper-parameter lines of a `llama31_8b` log: the closed list, the disclosure keys of 6.1, and the target.

Keys and order: MLPerf compliance checker, training_6.1.0/common.yaml, closed_common.yaml and closed_llama31_8b.yaml.
All of them are always logged, so that one log passes 5.1.0, 6.0.0 and 6.1.0.
Standard library only.
"""

from __future__ import annotations

from common.training.log_keys import disclosure
from llama31_8b.rules import Config, Rules


def hyperparameters(config: Config, rules: Rules, train_samples: int, config_filename: str) -> list[tuple[str, int | float | str]]:
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
