"""Config keys of `llama2_70b_lora`, and the values that its closed division fixes.

The loop, the log and the log check read them from here.

Source: MLPerf Training rules (mlcommons/training_policies, training_rules.adoc, v5.1 to v6.1), the
reference (mlcommons/training, llama2_70b_lora) and the compliance checker's
closed_llama2_70b_lora.yaml. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common import benchmarks
from common.benchmarks import Download, LogValue
from common.config import FROZEN_BASE_STORAGE, RunConfig
from common.model import shapes
from common.values import folder, of_variable

BENCHMARK = "llama2_70b_lora"
DATA_FILES = {  # split -> MLCommons' name of its file
    "train": "train-00000-of-00001.parquet",
    "validation": "validation-00000-of-00001.parquet",
}


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Config keys that this benchmark adds to RunConfig."""

    # optimizer steps of the half cosine from the base learning rate to 0
    opt_learning_rate_training_steps: int
    # Storage of the base: sharded over the node's GPUs, or whole on each GPU, as W or as W and W^T
    # (common/sharding/frozen_base.py).
    frozen_base: str = "sharded"
    transposed_layers: int = 0  # layers whose W^T is stored too, if "replicated" in FP8
    offload_layers: int = 0  # layers whose SwiGLU input waits for backward in pinned host memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.opt_learning_rate_training_steps >= 1,
            "opt_learning_rate_training_steps",
            "it must be at least 1",
            "set the number of steps",
        )
        self.require_choice("frozen_base", FROZEN_BASE_STORAGE)
        fp8 = self.linear_format.in_fp8
        self.require(
            fp8 or self.frozen_base != "replicated_both",
            "frozen_base",
            "only FP8 products need W and its transpose",
            'set it to "replicated"',
        )
        self.require(
            fp8 or not self.offload_layers,
            "offload_layers",
            "only SwiGLU's input in 8 bits is offloaded",
            'set linear = "fp8", or offload_layers = 0',
        )


@dataclass(frozen=True, kw_only=True)
class Rules(benchmarks.Rules):
    """Rules of one division of this benchmark."""

    train_samples: int  # packed sequences in the training set; one pass is an epoch
    warmup_factor: float = 0.0  # the reference has no warm-up
    # files of the base weights, if they are under DATADIR and not in $MODEL
    base_files: tuple[str, ...] = ()

    @property
    def data_files(self) -> tuple[str, ...]:
        return (*DATA_FILES.values(), *self.base_files)

    def weights_folder(
        self, config: RunConfig, data_dir: Path, environment: Mapping[str, str]
    ) -> Path:
        """Return the folder of the base weights: $MODEL, or `base` in `data_dir`.

        The miniature has its own base.
        """
        given = None if config.miniature else of_variable(environment, "MODEL", folder)
        return given or data_dir / "base"

    def skipped_evaluations(self, global_batch_size: int) -> int:
        """Return the number of intervals without an evaluation at the start of a run.

        S = floor(0.125 * global batch size + 2).
        """
        return global_batch_size // 8 + 2

    def first_evaluation(self, global_batch_size: int) -> int:
        """Return the training sequences before the first evaluation: S + 1 intervals."""
        intervals = self.skipped_evaluations(global_batch_size) + 1
        return intervals * self.eval_interval(global_batch_size)

    def fixed_log_values(self) -> dict[str, LogValue]:
        return super().fixed_log_values() | {
            "train_samples": self.train_samples,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
        }

    def own_log_keys(self, config: RunConfig) -> list[tuple[str, LogValue]]:
        assert isinstance(config, Config)
        return [
            ("opt_learning_rate_training_steps", config.opt_learning_rate_training_steps),
            ("opt_learning_rate_warmup_factor", self.warmup_factor),
            ("lora_rank", self.lora_rank),
            ("lora_alpha", self.lora_alpha),
            ("lora_dropout", self.lora_dropout),
        ]


CLOSED = Rules(
    division="closed",
    shape=shapes.LLAMA2_70B,
    sequence_length=8192,
    train_samples=3901,
    eval_samples=173,  # the whole validation set
    eval_interval_samples=384,
    # 4,074 rows of 64 KiB as int32; 68,976,648,192 parameters in bf16.
    downloads=(
        Download(
            "GovReport, tokenized by the reference",
            267_000_000,
            "MLCommons or the Hugging Face Hub",
            "see its page",
        ),
        Download(
            "Llama 2 70B with fused QKV",
            138_000_000_000,
            "MLCommons or the Hugging Face Hub",
            "Llama 2 Community License",
        ),
    ),
    target_loss=0.925,  # mean over sequences of the mean loss over valid tokens
    adam_beta_1=0.9,
    adam_beta_2=0.999,
    adam_epsilon=1e-8,
    weight_decay=1e-4,
    gradient_clip_norm=0.3,
    lora_rank=16,
    lora_alpha=32,
    lora_dropout=0.1,
    throughput_mode="lora",
    missing_weights_help="set MODEL, or see ./run_and_time.sh llama2_70b_lora prepare --help",
    # Both tables: mlperf-logging 4.1.68, rcp_checker/training_6.1.0/rcps_llama2_70b_lora.json,
    # "samples to converge" and "Hyperparams". The files of 5.1.0 and 6.0.0 are identical.
    reference_runs={
        8: ((2688, 3), (3072, 9), (3456, 7), (3840, 1)),
        16: ((3456, 1), (3840, 13), (4224, 2), (4608, 2), (4992, 2)),
        32: ((5376, 1), (5760, 8), (6144, 7), (6528, 4)),
        128: ((9984, 2), (10752, 5), (11136, 7), (11520, 2), (12288, 1), (12672, 1), (13056, 2)),
    },
    reference_learning_rates={8: 4e-4, 16: 4e-4, 32: 4e-4, 128: 1e-3},
)

# The whole path on a CPU: same code, a base that `prepare` has trained, and a target that only the
# adapters reach. Not a benchmark result.
MINIATURE = replace(
    CLOSED,
    division="miniature",
    shape=shapes.MINIATURE,
    sequence_length=256,
    train_samples=1024,
    eval_samples=48,
    eval_interval_samples=128,
    # The texts come from the running Python, so the loss depends on its version. With Python 3.11
    # the base alone has 4.94 and adapters reach 4.6, with 3.12 5.04 and 4.68.
    target_loss=4.75,
    base_files=("base/manifest.json",),
    manifests=(
        "base/manifest.json",
        # Differs from the name of the 8B miniature's manifest, which may be in the same folder.
        "miniature-govreport.json",
    ),
    reference_runs={},
    reference_learning_rates={},
)

DIVISIONS = (CLOSED, MINIATURE)


def rules_of(config: RunConfig) -> Rules:
    """Return the rules of the division that a run with `config` belongs to."""
    return MINIATURE if config.miniature else CLOSED
