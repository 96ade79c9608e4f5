"""Config and rules of `open_llama`: any Llama-like model and any tokens, by rules from a TOML file.

Examples of the file are in open_llama/examples. It can leave out the machine: with `gpu = "any"`,
the default, the launcher fits the config to the machine it runs on. A relative path starts at the
current directory. If it does not exist there, it starts at the root of the repository. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from common import benchmarks, values
from common.benchmarks import LogValue
from common.config import ANY_GPU, FROZEN_BASE_STORAGE, RunConfig
from common.data.indexed_dataset_header import (
    require_training,
    require_validation,
    stored_documents,
    stored_sequences,
)
from common.model.checkpoint_names import CONFIG
from common.model.families import Family, family_of, known_name, require_within_window
from common.paths import ROOT
from open_llama.tokenizer import RECORD, are_masked, tokenizer_files

BENCHMARK = "open_llama"
SCHEDULES = ("cosine", "linear", "constant")  # after a linear warm-up


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Config keys of this benchmark, in addition to RunConfig's."""

    # The machine. With gpu = "any" these keys are fitted to it, except `nodes` and, on a CPU,
    # `gpus_per_node`.
    gpu: str = ANY_GPU
    nodes: int = 1
    gpus_per_node: int = 1
    micro_batch_size: int = 1
    eval_micro_batch_size: int = 1

    # name (common/model/families.py), config.json, or the folder that holds it; a relative path
    # starts at the current directory or, if it does not exist there, at the root of the repository
    model: str
    # folder of a Hugging Face checkpoint in safetensors, absolute or relative like `model`; "":
    # random weights
    weights: str = ""
    init_std: float = 0.02  # standard deviation of random weights

    # Token files that `prepare text` writes, under DATADIR.
    train_data: str = "train"  # training tokens: name of the files, without .bin and .idx
    validation_data: str = "validation"  # validation tokens: likewise
    # False: documents follow each other in one stream, which is cut into sequences. True: each
    # document is a sequence, cut off or padded.
    one_document_per_sequence: bool = False
    sequence_length: int  # tokens

    eval_samples: int  # validation sequences of each evaluation, spread evenly over the file
    eval_interval_samples: int  # training sequences between evaluations
    target_loss: float = 0.0  # a run ends at this loss; 0: it ends after max_samples

    # Schedule of the learning rate: "cosine", "linear" or "constant". The first two end at
    # end_learning_rate_ratio, which may be 0.
    schedule: str
    opt_learning_rate_warmup_steps: int  # optimizer steps of the linear warm-up
    end_learning_rate_ratio: float = 0.1  # last learning rate / opt_base_learning_rate
    adam_beta_1: float = 0.9  # decay of AdamW's first moment, per step
    adam_beta_2: float = 0.95  # decay of AdamW's second moment, per step
    adam_epsilon: float = 1e-8  # added to the root of AdamW's second moment
    weight_decay: float  # AdamW's weight decay of matrices; vectors have none
    gradient_clip_norm: float  # largest global L2 norm of the gradients; larger ones are scaled

    lora_rank: int = 0  # rank of adapters on a frozen base; 0: all weights train
    lora_alpha: int = 32  # the adapters' output is multiplied by alpha / rank
    lora_dropout: float = 0.0  # probability that an element of the adapters' input is zeroed
    frozen_base: str = "sharded"  # LoRA: storage of the base (common/sharding/frozen_base.py)
    offload_layers: int = 0  # LoRA: layers whose SwiGLU input waits in host memory
    recompute_layers: int = 0  # the first n layers recompute their activations in backward
    moment_precision: str = "fp32"  # dtype of AdamW's two moments; "bf16" saves 4 bytes per weight

    # The benchmark that the log names, for an entry in the open division of MLPerf. Its tree is
    # made by hand (docs/submission.md).
    submission_benchmark: str = BENCHMARK

    def __post_init__(self) -> None:
        super().__post_init__()
        # Attention over one token has no gradient.
        for key, least in ("sequence_length", 2), ("eval_samples", 1), ("eval_interval_samples", 1):
            why = f"it must be at least {least}"
            self.require(getattr(self, key) >= least, key, why, "set a larger number")
        self.require_choice("schedule", SCHEDULES)
        self.require_choice("moment_precision", ("fp32", "bf16"))
        self.require_choice("frozen_base", FROZEN_BASE_STORAGE)
        # The names for which `check` has rules.
        self.require_choice("submission_benchmark", (BENCHMARK, *benchmarks.closed()))
        for key in ("adam_beta_1", "adam_beta_2", "lora_dropout"):
            self.require(getattr(self, key) < 1, key, "it must be below 1", "set a smaller number")
        for key in ("adam_epsilon", "gradient_clip_norm", "init_std", "lora_alpha"):
            self.require(
                getattr(self, key) > 0, key, "it must be positive", "set a positive number"
            )
        self.require(
            self.end_learning_rate_ratio <= 1,
            "end_learning_rate_ratio",
            "no schedule ends above opt_base_learning_rate",
            "set a number from 0 to 1",
        )
        self.require(
            not self.miniature,
            "miniature",
            f"{BENCHMARK} has no toy model",
            "leave it out; open_llama/examples has small models",
        )
        self.require(
            not self.lora_rank or bool(self.weights),
            "lora_rank",
            "adapters on random weights learn nothing useful",
            "set weights to the folder of the base",
        )
        self.require(
            not (self.lora_rank and self.recompute_layers),
            "recompute_layers",
            "layers of a frozen base are never recomputed",
            "set it to 0",
        )
        may_offload = bool(self.lora_rank) and self.linear_format.in_fp8
        self.require(
            may_offload or not self.offload_layers,
            "offload_layers",
            "only LoRA on an FP8 base offloads layers",
            "set it to 0",
        )

    def resolved(self) -> Self:
        # In the copy of the config in the run's directory, the paths must not depend on the
        # directory from which a command reads it.
        model = self.model
        if not known_name(model):
            model = from_current_directory(model)
        weights = from_current_directory(self.weights) if self.weights else ""
        return replace(self, model=model, weights=weights)

    @property
    def steps(self) -> int:
        """Optimizer steps up to max_samples, the length of the learning rate's schedule."""
        return -(-self.max_samples // self.global_batch_size)


@dataclass(frozen=True, kw_only=True)
class Rules(benchmarks.Rules):
    """Rules of one run, which its config sets."""

    train_data: str
    validation_data: str

    @property
    def data_files(self) -> tuple[str, ...]:
        prefixes = (self.train_data, self.validation_data)
        return tuple(f"{prefix}.{kind}" for prefix in prefixes for kind in ("bin", "idx"))

    def recorded_files(self, data_dir: Path) -> tuple[str, ...]:
        """Return the data files, their masks, and the tokenizer, which a saved model gets."""
        masks = (f"{self.train_data}.mask", f"{self.validation_data}.mask")
        files = (*self.data_files, *tokenizer_files(data_dir))
        return (*files, *masks) if self.counts_answers(data_dir) else files

    def counts_answers(self, data_dir: Path) -> bool:
        """Return whether the loss is the mean over the answers of conversations."""
        return are_masked([data_dir / self.train_data, data_dir / self.validation_data])

    def weights_folder(
        self, config: RunConfig, data_dir: Path, environment: Mapping[str, str]
    ) -> Path | None:
        assert isinstance(config, Config)
        return in_repository(config.weights) if config.weights else None

    def require_data(self, config: RunConfig, data_dir: Path) -> None:
        assert isinstance(config, Config)
        train = data_dir / self.train_data
        validation = data_dir / self.validation_data
        config.require(
            config.one_document_per_sequence or not self.counts_answers(data_dir),
            "one_document_per_sequence",
            f"{data_dir} holds conversations, of which a stream would also train on the questions",
            "set it to true",
        )
        if config.one_document_per_sequence:
            unit = "documents with a token to predict"
            length = self.sequence_length
            train_stored = stored_documents(train, length, limit=1)
            validation_stored = stored_documents(validation, length, limit=self.eval_samples)
        else:
            unit = f"sequences of {self.sequence_length} tokens"
            train_stored = stored_sequences(train, self.sequence_length)
            validation_stored = stored_sequences(validation, self.sequence_length)
        do = "run prepare text for another --data-dir, with more text"
        require_training(train, train_stored, unit, do)
        do += " or a larger --validation-fraction"
        if validation_stored:
            do = f"set eval_samples to at most {validation_stored}, or {do}"
        require_validation(validation, validation_stored, self.eval_samples, unit, do)

    def own_log_keys(self, config: RunConfig) -> list[tuple[str, LogValue]]:
        assert isinstance(config, Config)
        base = config.opt_base_learning_rate
        warmup_steps = config.opt_learning_rate_warmup_steps
        end = base if config.schedule == "constant" else base * config.end_learning_rate_ratio
        pairs: list[tuple[str, LogValue]] = [
            ("opt_end_learning_rate", end),
            ("opt_learning_rate_warmup_steps", warmup_steps),
            ("opt_learning_rate_decay_steps", config.steps - warmup_steps),
            ("opt_learning_rate_decay_schedule", f"{config.schedule} with linear warmup"),
            ("max_steps", config.steps),
        ]
        if config.lora_rank:
            pairs += [
                ("lora_rank", config.lora_rank),
                ("lora_alpha", config.lora_alpha),
                ("lora_dropout", config.lora_dropout),
            ]
        return pairs


# A log names the division "open", whose rules are in config.toml beside the log.
DIVISIONS: tuple[Rules, ...] = ()


def rules_of(config: RunConfig) -> Rules:
    """Return the rules that the config's file sets.

    Raises ConfigError for an unusable model, and for a schedule that does not fit the batch.
    """
    assert isinstance(config, Config)
    require_schedule(config)
    family = model_family(config.model)
    for each in (family, base_family(config)):
        require_within_window(each, config.sequence_length)
    return Rules(
        division="open",
        log_name=config.submission_benchmark,
        shape=family.shape,
        sequence_length=config.sequence_length,
        train_data=config.train_data,
        validation_data=config.validation_data,
        eval_samples=config.eval_samples,
        eval_interval_samples=config.eval_interval_samples,
        target_loss=config.target_loss,
        adam_beta_1=config.adam_beta_1,
        adam_beta_2=config.adam_beta_2,
        adam_epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
        gradient_clip_norm=config.gradient_clip_norm,
        init_std=config.init_std,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        checkpoint="600s" if config.nodes == 1 else "",  # several nodes do not support it
        manifests=tuple(dict.fromkeys(map(record_of, (config.train_data, config.validation_data)))),
        missing_weights_help="set weights to the folder of a Hugging Face checkpoint",
    )


def record_of(prefix: str) -> str:
    """Return the path of the record that `prepare text` wrote beside the token files `prefix`."""
    return str(Path(prefix).parent / RECORD)


def require_schedule(config: Config) -> None:
    """Raise ConfigError unless the config's schedule fits its batch.

    The warm-up must be shorter than the run. A run without a target must end with an evaluation.
    """
    config.require(
        config.opt_learning_rate_warmup_steps < config.steps,
        "opt_learning_rate_warmup_steps",
        f"the run has only {config.steps:,} steps",
        "set fewer warm-up steps, or a larger max_samples",
    )
    batch = config.global_batch_size
    interval = -(-config.eval_interval_samples // batch) * batch
    config.require(
        bool(config.target_loss) or config.max_samples % interval == 0,
        "max_samples",
        "without a target the run ends with an evaluation, and there is one"
        f" every {interval:,} sequences",
        f"set a multiple of {interval:,}",
    )


def model_family(name: str) -> Family:
    """Return the model that the key `model` names. Raises ConfigError."""
    return family_of(name if known_name(name) else str(in_repository(name)))


def base_family(config: Config) -> Family:
    """Return the model of the weights' config.json, or of the key `model` if there is none.

    Raises ConfigError.
    """
    folder = in_repository(config.weights)
    if config.weights and (folder / CONFIG).is_file():
        return family_of(str(folder))
    return model_family(config.model)


def from_current_directory(path: str) -> str:
    """Return `path` as an absolute path from the current directory.

    A path that exists in the repository, but not in the current directory, stays relative: the
    examples name models in this way, and their configs are equal on all machines.
    """
    absolute = values.path(path).absolute()
    in_root = in_repository(path)
    if in_root.exists() and (not absolute.exists() or absolute.samefile(in_root)):
        return path
    return str(absolute)


def in_repository(path: str) -> Path:
    """Return the path in a key of a config. A relative one starts at the repository's root."""
    return ROOT / path
