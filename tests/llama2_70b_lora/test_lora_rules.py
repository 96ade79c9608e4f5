"""Test the constants of the closed division, and the learning rate against transformers."""

import math

import pytest
import torch

from common.training.schedules import cosine_to_zero
from llama2_70b_lora.rules import CLOSED, MINIATURE

pytestmark = pytest.mark.quick

# Global batch, interval, skipped evaluations, first evaluation: what published v5.1 logs and the
# rules' formulas have.
EVALUATIONS = [
    (8, 384, 3, 1536),
    (9, 387, 3, 1548),
    (16, 384, 4, 1920),
    (32, 384, 6, 2688),
    (64, 384, 10, 4224),
    (72, 432, 11, 5184),
    (128, 384, 18, 7296),
]


@pytest.mark.parametrize(("batch", "interval", "skipped", "first"), EVALUATIONS)
def test_evaluations_are_those_of_the_published_logs(batch, interval, skipped, first):
    assert (
        CLOSED.eval_interval(batch),
        CLOSED.skipped_evaluations(batch),
        CLOSED.first_evaluation(batch),
    ) == (interval, skipped, first)


def test_skipped_evaluations_are_those_of_the_formula_for_every_batch():
    assert all(
        CLOSED.skipped_evaluations(batch) == math.floor(0.125 * batch + 2)
        for batch in range(1, 1025)
    )


def test_the_adapters_of_the_rules_have_44_million_parameters():
    """80 x (16 x 8192 + 16 x 10240 + 16 x 8192 + 16 x 8192), from mlcommons/training."""
    shape, rank = CLOSED.shape, CLOSED.lora_rank
    per_layer = rank * (shape.hidden_size + shape.qkv_size) + rank * (
        shape.hidden_size + shape.hidden_size
    )
    assert shape.num_layers * per_layer == 44_564_480


def test_the_miniature_differs_only_in_size():
    own = {
        "division",
        "shape",
        "sequence_length",
        "train_samples",
        "eval_samples",
        "eval_interval_samples",
        "target_loss",
    }
    own |= {"base_files", "manifests", "reference_runs", "reference_learning_rates"}
    assert {name for name, value in vars(CLOSED).items() if value != vars(MINIATURE)[name]} == own


def test_the_learning_rate_at_marked_steps():
    lr_at = cosine_to_zero(4e-4, 1024)
    assert lr_at(0) == 4e-4 and lr_at(512) == pytest.approx(2e-4, rel=1e-12)
    # Where a run at global batch 8 typically stops.
    assert lr_at(384) == pytest.approx(2.765e-4, rel=1e-3)
    assert lr_at(1023) > 0 and lr_at(1024) == lr_at(1025) == lr_at(100_000) == 0.0


@pytest.mark.parametrize("steps", [1024, 7, 1])
def test_the_learning_rate_is_that_of_transformers(steps):
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=4e-4)
    theirs = transformers.get_cosine_schedule_with_warmup(optimizer, 0, steps)
    lr_at = cosine_to_zero(4e-4, steps)
    for step in range(steps + 1):
        assert lr_at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-18)
        optimizer.step()
        theirs.step()
