"""Config keys and rules shared by benchmarks that pre-train on Megatron's token files.

The values are in the rules.py of each benchmark. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.benchmarks import LogValue, Rules
from common.config import RunConfig
from common.data.indexed_dataset_header import (
    require_training,
    require_validation,
    stored_sequences,
)
from common.gpu_kinds import KINDS


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(RunConfig):
    """Config keys that pre-training adds to RunConfig."""

    opt_learning_rate_warmup_steps: int  # optimizer steps of the linear warm-up
    recompute_layers: int = 0  # the first n layers recompute their activations in backward
    # reduce-scatter of gradients: "nccl" (NCCL or RCCL; gloo on a CPU), or "copy_engine" within one
    # node
    reduce_scatter: str = "nccl"
    # dtype of AdamW's two moments; "bf16" saves 4 bytes per weight and rank
    moment_precision: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("reduce_scatter", ("nccl", "copy_engine"))
        self.require_choice("moment_precision", ("fp32", "bf16"))
        if self.reduce_scatter == "copy_engine":
            do = 'set reduce_scatter = "nccl"'
            self.require(self.gpu != "CPU", "reduce_scatter", "a CPU has no copy engines", do)
            self.require(self.gpus_per_node > 1, "reduce_scatter", "one GPU sends nothing", do)
            is_amd = self.gpu in KINDS and KINDS[self.gpu].vendor == "amd"
            self.require(
                not is_amd,
                "reduce_scatter",
                "torch's symmetric memory was never tried on AMD GPUs",
                do,
            )
            self.require(
                self.nodes == 1,
                "reduce_scatter",
                "copy engines reach the GPUs of one node only",
                do,
            )


@dataclass(frozen=True, kw_only=True)
class PretrainingRules(Rules):
    """Rules of one division of a pre-training benchmark."""

    train_prefix: str  # Megatron .bin/.idx pair of the training tokens, under DATADIR
    validation_prefix: str
    max_steps: int
    end_learning_rate_ratio: float = 0.1
    decay_schedule: str = "cosine with linear warmup"
    # False: evaluate on the file's first sequences, as in the reference's README. True: evaluate on
    # the sequences that the reference's code draws.
    eval_by_seed: bool = False

    @property
    def data_files(self) -> tuple[str, ...]:
        prefixes = (self.train_prefix, self.validation_prefix)
        return tuple(f"{prefix}.{kind}" for prefix in prefixes for kind in ("bin", "idx"))

    def require_data(self, config: RunConfig, data_dir: Path) -> None:
        train = data_dir / self.train_prefix
        validation = data_dir / self.validation_prefix
        unit = f"sequences of {self.sequence_length} tokens"
        do = "fetch or build the training data again"
        require_training(train, stored_sequences(train, self.sequence_length), unit, do)
        # By seed, the sequences of a short file are drawn repeatedly.
        expected = 1 if self.eval_by_seed else self.eval_samples
        stored = stored_sequences(validation, self.sequence_length)
        do = "fetch or build the validation data again"
        require_validation(validation, stored, expected, unit, do)

    def eval_order_samples(self, global_batch_size: int) -> int:
        """Return the number of validation samples that NeMo asks GPTDataset to put in order.

        They suffice for the evaluations within max_steps, plus one.
        """
        interval = self.eval_interval(global_batch_size)
        evaluations = self.max_steps * global_batch_size // interval + 1
        return evaluations * self.eval_samples

    def end_learning_rate(self, base_learning_rate: float) -> float:
        return base_learning_rate * self.end_learning_rate_ratio

    def own_log_keys(self, config: RunConfig) -> list[tuple[str, LogValue]]:
        assert isinstance(config, PretrainingConfig)
        warmup_steps = config.opt_learning_rate_warmup_steps
        # The checker computes opt_learning_rate_decay_steps from the warm-up steps, so these are
        # logged first.
        return [
            ("opt_end_learning_rate", self.end_learning_rate(config.opt_base_learning_rate)),
            ("opt_learning_rate_warmup_steps", warmup_steps),
            ("opt_learning_rate_decay_steps", self.max_steps - warmup_steps),
            ("opt_learning_rate_decay_schedule", self.decay_schedule),
            ("max_steps", self.max_steps),
        ]
