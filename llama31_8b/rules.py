"""Config keys of `llama31_8b`, and the values that its closed division fixes.

The loop, the log and the log check read them from here.

Source: MLPerf Training rules (mlcommons/training_policies, training_rules.adoc, v5.1 to v6.1), the
reference (mlcommons/training, small_llm_pretraining/nemo) and the compliance checker's
closed_llama31_8b.yaml. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common import benchmarks
from common.benchmarks import LogValue
from common.config import RunConfig
from common.data.indexed_dataset_header import (
    require_training,
    require_validation,
    stored_sequences,
)
from common.gpu_kinds import KINDS
from common.model import shapes

BENCHMARK = "llama31_8b"


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Config keys of this benchmark, in addition to those of RunConfig."""

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
class Rules(benchmarks.Rules):
    """Rules of one division of this benchmark."""

    train_prefix: str  # Megatron .bin/.idx pair of the training tokens, under DATADIR
    validation_prefix: str
    max_steps: int
    end_learning_rate_ratio: float = 0.1
    decay_schedule: str = "cosine with linear warmup"
    init_std: float = 0.02
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
        assert isinstance(config, Config)
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


CLOSED = Rules(
    division="closed",
    shape=shapes.LLAMA31_8B,
    sequence_length=8192,
    train_prefix="c4-train.en_6_text_document",
    validation_prefix="c4-validation-91205-samples.en_text_document",
    eval_samples=1024,
    eval_interval_samples=12288,
    target_loss=3.3,
    max_steps=1_200_000,
    adam_beta_1=0.9,
    adam_beta_2=0.95,
    adam_epsilon=1e-5,
    # 1-D parameters are exempt here. NeMo 2.1.0, which the reference pins, decays them too. Later
    # versions of NeMo exempt them.
    weight_decay=0.1,
    gradient_clip_norm=1.0,
    saves_model=True,
    throughput_mode="full",
    # Both tables: mlperf-logging 4.1.68, rcp_checker/training_6.1.0/rcps_llama31_8b.json, "Epochs
    # to converge" (which are samples) and "Hyperparams". The files of 5.1.0 and 6.0.0 are
    # identical.
    reference_runs={
        16: ((159744, 17), (172032, 3)),
        32: ((172032, 9), (184320, 10), (196608, 1)),
        64: ((208896, 4), (221184, 4), (233472, 11), (245760, 1)),
        96: ((260064, 2), (272448, 10), (284832, 4), (297216, 4)),
        128: (
            (307200, 2),
            (319488, 2),
            (331776, 4),
            (344064, 4),
            (356352, 3),
            (368640, 3),
            (380928, 1),
            (405504, 1),
        ),
    },
    reference_learning_rates={16: 4e-4, 32: 8e-4, 64: 8e-4, 96: 1e-3, 128: 2e-3},
)

# The whole path on a CPU in a few minutes: same code, real text, and a target that must be learned.
# Not a benchmark result.
MINIATURE = replace(
    CLOSED,
    division="miniature",
    shape=shapes.MINIATURE,
    sequence_length=128,
    train_prefix="python-docs-train_text_document",
    validation_prefix="python-docs-validation_text_document",
    eval_samples=64,
    eval_interval_samples=1024,
    target_loss=4.5,  # reached after 5 to 10 of at most 20 evaluations
    max_steps=2_000,
    manifests=("miniature.json",),
    reference_runs={},
    reference_learning_rates={},
)

DIVISIONS = (CLOSED, MINIATURE)


def rules_of(config: RunConfig) -> Rules:
    """Return the rules of the division that a run with `config` belongs to."""
    return MINIATURE if config.miniature else CLOSED
