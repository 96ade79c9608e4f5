"""Values that the closed division of `llama31_8b` fixes.

The loop, the log and the log check read them from here.

Source: MLPerf Training rules (mlcommons/training_policies, training_rules.adoc, v5.1 to v6.1), the
reference (mlcommons/training, small_llm_pretraining/nemo) and the compliance checker's
closed_llama31_8b.yaml. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from common.benchmarks import Download
from common.config import RunConfig
from common.model import shapes
from common.training.pretraining_rules import PretrainingConfig, PretrainingRules

BENCHMARK = "llama31_8b"
Config = PretrainingConfig
Rules = PretrainingRules

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
    # The size is approximate, from AMD's v5.1 README.
    downloads=(
        Download("C4, tokenized by MLCommons", 80_000_000_000, "MLCommons' storage", "ODC-BY"),
    ),
    adam_beta_1=0.9,
    adam_beta_2=0.95,
    adam_epsilon=1e-5,
    # 1-D parameters are exempt here. NeMo 2.1.0, which the reference pins, decays them too. Later
    # versions of NeMo exempt them.
    weight_decay=0.1,
    gradient_clip_norm=1.0,
    saves_model=True,
    throughput_mode="full",
    # All tables: mlperf-logging 4.1.68, rcp_checker/training_6.1.0/rcps_llama31_8b.json, "Epochs to
    # converge" (which are samples) and "Hyperparams". The files of 5.1.0 and 6.0.0 are identical.
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
    reference_warmup_samples={16: 256, 32: 4096, 64: 6144, 96: 16348, 128: 32768},
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
    reference_warmup_samples={},
)

DIVISIONS = (CLOSED, MINIATURE)


def rules_of(config: RunConfig) -> Rules:
    """Return the rules of the division that a run with `config` belongs to."""
    return MINIATURE if config.miniature else CLOSED
