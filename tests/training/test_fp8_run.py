"""Test the real trainer in FP8: warm-up and exact restore, training, evaluation, disclosure."""

import json
from unittest import mock

import pytest
import torch
from synthetic_run import records
from tiny import FP8_RULES as RULES
from tiny import run, write_data

from common.training import warmup
from llama31_8b.rules import Config

FP8 = {"linear": "fp8"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), RULES)


@pytest.fixture(scope="module")
def in_bf16(data, tmp_path_factory):
    with mock.patch.object(
        Config, "precision", "bf16"
    ):  # on a CPU a config without FP8 computes in fp32
        return run(tmp_path_factory.mktemp("bf16") / "run", data, RULES)


WAYS = [
    {},
    pytest.param({"recompute_layers": 1}, marks=pytest.mark.slow),
    pytest.param({"micro_batch_size": 2}, marks=pytest.mark.slow),
    pytest.param({"moment_precision": "bf16"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_fp8_trains_as_bf16_does_and_logs_its_precision(data, in_bf16, tmp_path, ways):
    facts = run(tmp_path / "run", data, RULES, **FP8, **ways)
    # TINY's target is out of reach.
    assert facts.error == in_bf16.error == "target_missed", facts.message
    assert [samples for samples, _ in facts.evaluations] == [32, 64, 96]
    assert in_bf16.losses[-1] < 0.9 * in_bf16.losses[0], (
        "bf16 learns nothing: this test would see nothing"
    )
    # Before the toy's noise has grown.
    assert facts.losses[:6] == pytest.approx(in_bf16.losses[:6], rel=0.01)
    assert [loss for _, loss in facts.evaluations] == pytest.approx(
        [loss for _, loss in in_bf16.evaluations], rel=0.05
    )
    assert facts.losses != in_bf16.losses, "this was not FP8"
    log = {record["key"]: record["value"] for record in records(tmp_path / "run" / "result.txt")}
    assert (
        log["lowest_numerical_precision_in_linear"] == "fp8"
        and log["lowest_numerical_precision_in_attn"] == "bfloat16"
    )
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    saturated = [event["clipped_elements"] for event in events if event["event"] == "linear"]
    assert len(saturated) == 3 and all(count >= 0 for count in saturated)


def test_the_warm_up_leaves_no_trace_in_the_scales(data, tmp_path, monkeypatch):
    warm = run(tmp_path / "warm", data, RULES, **FP8)
    monkeypatch.setattr(warmup, "TRAIN_STEPS", 0)
    monkeypatch.setattr(warmup, "EVAL_STEPS", 0)
    cold = run(tmp_path / "cold", data, RULES, **FP8)
    assert (
        warm.losses == cold.losses
        and warm.norms == cold.norms
        and warm.evaluations == cold.evaluations
    )


def test_the_digest_of_the_warm_up_is_the_same_in_two_runs_of_one_seed(data, tmp_path):
    digests = []
    for name in ("first", "second"):
        torch.randn(3)  # whatever ran before in this process
        run(tmp_path / name, data, RULES, max_samples=8)
        events = [
            json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()
        ]
        digests += [event["state_digest"] for event in events if event.get("name") == "warmup"]
    assert len(digests) == 2 and digests[0] == digests[1]
