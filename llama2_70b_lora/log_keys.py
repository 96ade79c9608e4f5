"""The hyper-parameter lines of a `llama2_70b_lora` log: the closed list, what else the closed division fixes, and disclosure.

Keys and order: MLPerf compliance checker, training_6.1.0/common.yaml, closed_common.yaml and closed_llama2_70b_lora.yaml, and
the published logs. The checker ignores keys that it does not know: dropout, betas and epsilon are logged so that our lint can
hold them to the rules by value.
Standard library only.
"""

from __future__ import annotations

from common.training.log_keys import disclosure
from llama2_70b_lora.rules import Config, Rules


def hyperparameters(config: Config, rules: Rules, train_samples: int, config_filename: str) -> list[tuple[str, int | float | str]]:
    """(key, value) in the order of emission.

    `train_samples`: training sequences in the data set. `config_filename`: name of the TOML under configs/llama2_70b_lora/.
    """
    return [
        ("global_batch_size", config.global_batch_size),
        ("gradient_accumulation_steps", config.gradient_accumulation_steps),
        ("max_sequence_length", rules.sequence_length),
        ("train_samples", train_samples),
        ("eval_samples", rules.eval_samples),
        ("opt_name", rules.opt_name),
        ("opt_base_learning_rate", config.opt_base_learning_rate),
        ("opt_learning_rate_training_steps", config.opt_learning_rate_training_steps),
        ("opt_learning_rate_warmup_factor", rules.warmup_factor),
        ("opt_adamw_beta_1", rules.adam_beta_1),
        ("opt_adamw_beta_2", rules.adam_beta_2),
        ("opt_adamw_epsilon", rules.adam_epsilon),
        ("opt_adamw_weight_decay", rules.weight_decay),
        ("opt_gradient_clip_norm", rules.gradient_clip_norm),
        ("lora_rank", rules.lora_rank),
        ("lora_alpha", rules.lora_alpha),
        ("lora_dropout", rules.lora_dropout),
        ("target_accuracy", rules.target_loss),
        *disclosure(config, config_filename),
    ]
