"""The hyperparameters that a log must state.

They are the keys of the closed division, the precision and parallelism that 6.1 requires, and the
target. Sources: the MLPerf compliance checker (training_6.1.0/common.yaml, closed_common.yaml and
each benchmark's closed_*.yaml) and the published logs. All keys are always logged, so that one log
passes 5.1.0, 6.0.0 and 6.1.0. The checker ignores keys that it does not know. Some are logged only
for `submission.check`, which verifies all values that the rules fix. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.benchmarks import LogValue, Rules
from common.config import RunConfig
from common.errors import ConfigError
from common.training.mllog import EMULATED_KEY, RESERVED_SUBSTRINGS

PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16"}  # config value -> name in the MLPerf log
STATUS_WORDS = ("onprem", "cloud", "research")  # mlperf_logging/mllog/constants.py


def submission_texts(environment: Mapping[str, str], platform: str = "unnamed") -> dict[str, str]:
    """Return org, platform and status of a submission, by the variables MLPERF_SUBMISSION_*.

    `platform`: its default. Raises ConfigError for an empty text, for one with a word that the
    official tools would misread, and for a status that is not in STATUS_WORDS.
    """
    texts = {
        "org": environment.get("MLPERF_SUBMISSION_ORG", "unnamed"),
        "platform": environment.get("MLPERF_SUBMISSION_PLATFORM", platform),
    }
    for key, text in texts.items():
        if not text.strip() or any(word in text for word in RESERVED_SUBSTRINGS):
            name = f"MLPERF_SUBMISSION_{key.upper()}"
            raise ConfigError(
                f"{name}={text}",
                "it must not be empty, and the official tools search a log's lines for "
                f"{', '.join(RESERVED_SUBSTRINGS)}",
                f"name the {key} otherwise, or unset {name}",
            )
    return texts | {"status": _submission_status(environment)}


def _submission_status(environment: Mapping[str, str]) -> str:
    word = environment.get("MLPERF_SUBMISSION_STATUS") or STATUS_WORDS[0]
    if word not in STATUS_WORDS:
        raise ConfigError(
            f"MLPERF_SUBMISSION_STATUS={word}",
            "a log's submission_status must be a word of mlperf_logging/mllog/constants.py",
            f"set it to {', '.join(STATUS_WORDS[:-1])} or {STATUS_WORDS[-1]}; a preview system is"
            " onprem or cloud",
        )
    return word


def _communication_precision(config: RunConfig) -> str:
    """Return the lowest precision in which ranks communicate during training.

    The ranks of a node gather a sharded base in the format in which it is stored
    (common/sharding/frozen_base.py), and everything else in the precision of the run.
    """
    gathers_base = config.frozen_base == "sharded" and config.gpus_per_node > 1
    if gathers_base and config.linear_format.in_fp8:
        return "fp8"
    return PRECISIONS[config.precision]


def hyperparameters(
    config: RunConfig, rules: Rules, train_samples: int, config_filename: str
) -> list[tuple[str, LogValue]]:
    """Return (key, value) pairs in the order of the log.

    `train_samples`: training sequences in the data set.
    `config_filename`: name of the TOML under configs/<benchmark>/.

    Other model parallelisms are 1, because this package shards only data, weights and sequences.
    """
    linear = config.linear_format
    return [
        ("global_batch_size", config.global_batch_size),
        ("gradient_accumulation_steps", config.gradient_accumulation_steps),
        ("max_sequence_length", rules.sequence_length),
        ("train_samples", train_samples),
        ("eval_samples", rules.eval_samples),
        ("opt_name", rules.opt_name),
        ("opt_base_learning_rate", config.opt_base_learning_rate),
        *rules.own_log_keys(config),
        *rules.optimizer_log_keys(),
        ("opt_gradient_clip_norm", rules.gradient_clip_norm),
        ("target_accuracy", rules.target_loss),
        (
            "lowest_numerical_precision_in_linear",
            linear.log_precision or PRECISIONS[config.precision],
        ),
        *([(EMULATED_KEY, config.linear)] if linear.emulated else []),
        ("lowest_numerical_precision_in_attn", PRECISIONS[config.precision]),
        ("lowest_numerical_precision_in_comm", _communication_precision(config)),
        ("tensor_parallelism", 1),
        ("pipeline_parallelism", 1),
        ("context_parallelism", config.context_parallel),
        ("expert_parallelism", 1),
        ("micro_batch_size", config.micro_batch_size),
        ("config_filename", config_filename),
    ]
