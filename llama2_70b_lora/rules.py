"""What the closed division fixes for `llama2_70b_lora`, typed once: the loop, the log and the lint read it from here.

Source: MLPerf Training rules (mlcommons/training_policies, training_rules.adoc, v5.1 to v6.1), the reference
(mlcommons/training, llama2_70b_lora) and the compliance checker's closed_llama2_70b_lora.yaml.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config import FROZEN_BASE_STORAGE, RunConfig
from common.model.shapes import LLAMA2_70B, ModelShape

BENCHMARK = "llama2_70b_lora"
DATA_FILES = {"train": "train-00000-of-00001.parquet", "validation": "validation-00000-of-00001.parquet"}  # as MLCommons names them


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    opt_learning_rate_training_steps: int  # optimizer steps of the half cosine from the base learning rate to 0
    frozen_base: str = "sharded"  # over the node's GPUs; or whole on each GPU, as W or as W and W^T (common/sharding/frozen_base.py)
    offload_layers: int = 0  # layers whose SwiGLU input waits for backward in pinned host memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.opt_learning_rate_training_steps >= 1, "opt_learning_rate_training_steps", "it must be at least 1", "give steps")
        self.require_choice("frozen_base", FROZEN_BASE_STORAGE)
        why = "a transform before wgrad changes nothing where a frozen weight has no wgrad"
        self.require("hadamard" not in self.block_format, "block_format", why, "leave out the transform")
        why = "without FP8 products read W in both directions"
        self.require(self.fp8 != "" or self.frozen_base != "replicated_both", "frozen_base", why, 'set it to "replicated"')
        why = "what is offloaded is SwiGLU's input in 8 bits"
        self.require(self.fp8 != "" or not self.offload_layers, "offload_layers", why, 'set fp8 = "torch", or offload_layers = 0')


@dataclass(frozen=True)
class Rules:
    division: str  # "closed", or "miniature" for the toy that no one can submit
    shape: ModelShape
    sequence_length: int
    train_samples: int  # packed sequences in the training set, a pass over which is an epoch
    eval_samples: int  # all validation sequences, every time
    eval_interval_samples: int  # before rounding up to the global batch
    target_loss: float  # mean over the sequences of each one's natural-log cross entropy per token that counts; stop at <=
    lora_rank: int = 16
    lora_alpha: int = 32  # the adapter's output is multiplied by alpha / rank
    lora_dropout: float = 0.1  # on the adapter's input
    opt_name: str = "adamw"
    warmup_factor: float = 0.0  # the reference warms nothing up
    adam_beta_1: float = 0.9
    adam_beta_2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 1e-4  # decoupled
    gradient_clip_norm: float = 0.3
    init_limit_s: float = 1800.0
    manifests: tuple[str, ...] = ()  # under DATADIR, where `prepare` wrote them: the files beside one are checked before a run

    # Files of DATADIR that a run reads; the base weights are in $MODEL, or in DATADIR/base without it.
    data_files: tuple[str, ...] = tuple(DATA_FILES.values())

    @property
    def flops_per_token(self) -> int:
        """See common/model/shapes.py."""
        return self.shape.lora_flops_per_token(self.sequence_length, self.lora_rank)

    def eval_interval(self, global_batch_size: int) -> int:
        """Train sequences between evaluations: ceil(384/GBS)*GBS."""
        return -(-self.eval_interval_samples // global_batch_size) * global_batch_size

    def skipped_evaluations(self, global_batch_size: int) -> int:
        """S = floor(0.125*GBS + 2): so many intervals pass at the beginning without an evaluation."""
        return global_batch_size // 8 + 2

    def first_evaluation(self, global_batch_size: int) -> int:
        """Train sequences before the first evaluation: (S + 1) intervals."""
        return (self.skipped_evaluations(global_batch_size) + 1) * self.eval_interval(global_batch_size)

    def own_log_keys(self, config: Config) -> list[tuple[str, int | float | str]]:
        """See common/training/log_keys.py."""
        return [
            ("opt_learning_rate_training_steps", config.opt_learning_rate_training_steps),
            ("opt_learning_rate_warmup_factor", self.warmup_factor),
            ("lora_rank", self.lora_rank),
            ("lora_alpha", self.lora_alpha),
            ("lora_dropout", self.lora_dropout),
        ]


CLOSED = Rules(
    division="closed",
    shape=LLAMA2_70B,
    sequence_length=8192,
    train_samples=3901,
    eval_samples=173,
    eval_interval_samples=384,
    target_loss=0.925,
)

# The whole path on a CPU: same code, a base that `prepare` has trained, a target that only the adapters reach. No benchmark result.
MINIATURE = replace(
    CLOSED,
    division="miniature",
    shape=ModelShape(4, 128, 384, 4, 2, 2048, 10000.0),
    sequence_length=256,
    train_samples=1024,
    eval_samples=48,
    eval_interval_samples=128,
    target_loss=4.68,  # the base alone stands at 4.95 with Python 3.11's texts, adapters reach 4.6, full-rank training 4.5
    data_files=(*CLOSED.data_files, "base/manifest.json"),
    manifests=("base/manifest.json", "miniature-govreport.json"),  # not the name of the 8B miniature's, which may be in the same folder
)
