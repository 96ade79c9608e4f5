"""What the closed division fixes for `llama31_8b`, typed once: the loop, the log and the lint read it from here.

Source: MLPerf Training rules (mlcommons/training_policies, training_rules.adoc, v5.1 to v6.1), the reference
(mlcommons/training, small_llm_pretraining/nemo) and the compliance checker's closed_llama31_8b.yaml.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config import RunConfig
from common.model.shapes import LLAMA31_8B, ModelShape

BENCHMARK = "llama31_8b"


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    opt_learning_rate_warmup_steps: int
    recompute_layers: int = 0  # the first n layers recompute their activations in backward
    reduce_scatter: str = "nccl"  # of gradients: "nccl" (NCCL or RCCL; gloo on a CPU), or "copy_engine" within one node
    moment_precision: str = "fp32"  # of AdamW's two moments; "bf16" saves 4 bytes per weight and rank

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("reduce_scatter", ("nccl", "copy_engine"))
        self.require_choice("moment_precision", ("fp32", "bf16"))
        if self.reduce_scatter == "copy_engine":
            do = 'set reduce_scatter = "nccl"'
            self.require(self.gpu != "CPU", "reduce_scatter", "a CPU has no copy engines", do)
            self.require(self.gpus_per_node > 1, "reduce_scatter", "one GPU sends nothing", do)
            self.require(self.nodes == 1, "reduce_scatter", "copy engines reach the GPUs of one node only", do)


@dataclass(frozen=True)
class Rules:
    division: str  # "closed", or "miniature" for the toy that no one can submit
    shape: ModelShape
    sequence_length: int
    train_prefix: str  # Megatron .bin/.idx pair of the training tokens, under DATADIR
    validation_prefix: str
    eval_samples: int  # so many validation sequences, the same ones every time
    eval_interval_samples: int  # before rounding up to the global batch
    target_loss: float  # natural-log cross entropy per token; stop at <=
    max_steps: int
    opt_name: str = "adamw"
    adam_beta_1: float = 0.9
    adam_beta_2: float = 0.95
    adam_epsilon: float = 1e-5
    # Decoupled. 1-D parameters are exempt here; NeMo 2.1.0, which the reference pins, decays them too, later versions of NeMo exempt them.
    weight_decay: float = 0.1
    gradient_clip_norm: float = 1.0
    end_learning_rate_ratio: float = 0.1
    decay_schedule: str = "cosine with linear warmup"
    init_std: float = 0.02
    init_limit_s: float = 1800.0
    eval_by_seed: bool = False  # False: on the file's first sequences, by the reference's README; True: on those that its code draws
    manifests: tuple[str, ...] = ()  # under DATADIR, where `prepare` wrote them: the files beside one are checked before a run

    @property
    def data_files(self) -> tuple[str, ...]:
        """Files of DATADIR that a run reads."""
        return tuple(f"{prefix}.{kind}" for prefix in (self.train_prefix, self.validation_prefix) for kind in ("bin", "idx"))

    @property
    def flops_per_token(self) -> int:
        """See common/model/shapes.py."""
        return self.shape.training_flops_per_token(self.sequence_length)

    def eval_interval(self, global_batch_size: int) -> int:
        """Train sequences between evaluations: ceil(12288/GBS)*GBS. No evaluation is skipped; the first is at one interval."""
        return -(-self.eval_interval_samples // global_batch_size) * global_batch_size

    def first_evaluation(self, global_batch_size: int) -> int:
        return self.eval_interval(global_batch_size)

    def eval_order_samples(self, global_batch_size: int) -> int:
        """For how many samples NeMo asks GPTDataset to order the validation split: so many evaluations as max_steps has, and one."""
        return (self.max_steps * global_batch_size // self.eval_interval(global_batch_size) + 1) * self.eval_samples

    def end_learning_rate(self, base_learning_rate: float) -> float:
        return base_learning_rate * self.end_learning_rate_ratio

    def own_log_keys(self, config: Config) -> list[tuple[str, int | float | str]]:
        """See common/training/log_keys.py."""
        warmup_steps = config.opt_learning_rate_warmup_steps
        return [
            ("opt_end_learning_rate", self.end_learning_rate(config.opt_base_learning_rate)),
            ("opt_learning_rate_warmup_steps", warmup_steps),  # the checker computes the next line's value from this one
            ("opt_learning_rate_decay_steps", self.max_steps - warmup_steps),
            ("opt_learning_rate_decay_schedule", self.decay_schedule),
            ("max_steps", self.max_steps),
        ]


CLOSED = Rules(
    division="closed",
    shape=LLAMA31_8B,
    sequence_length=8192,
    train_prefix="c4-train.en_6_text_document",
    validation_prefix="c4-validation-91205-samples.en_text_document",
    eval_samples=1024,
    eval_interval_samples=12288,
    target_loss=3.3,
    max_steps=1_200_000,
)

# The whole path on a CPU in two minutes: same code, real text, a target that has to be learned. Not a benchmark result.
MINIATURE = replace(
    CLOSED,
    division="miniature",
    shape=ModelShape(4, 128, 384, 4, 2, 2048, 10000.0),
    sequence_length=128,
    train_prefix="python-docs-train_text_document",
    validation_prefix="python-docs-validation_text_document",
    eval_samples=64,
    eval_interval_samples=1024,
    target_loss=4.5,  # ten seeds needed 5 to 9 of at most 20 evaluations
    max_steps=2_000,
    manifests=("miniature.json",),
)
