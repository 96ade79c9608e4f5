"""The real trainer in FP8, from the log's first line to its last: warm-up and exact restore, training, evaluation, what is disclosed."""

import json
from dataclasses import replace

import pytest
from tiny import TINY, records, run, write_data

from common.model.shapes import ModelShape

# Sizes that FP8 products take: multiples of 16.
RULES = replace(TINY, shape=ModelShape(2, 64, 96, 4, 2, 64, 10000.0))
FP8 = {"precision": "bf16", "fused_blocks": True, "fp8": "torch"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), RULES)


@pytest.fixture(scope="module")
def in_bf16(data, tmp_path_factory):
    return run(tmp_path_factory.mktemp("bf16") / "run", data, RULES, precision="bf16")


WAYS = [{}, {"fp8_recipe": "current"}, {"fp8_swiglu_input": True}, {"fp8_head": True}, {"recompute_layers": 1}, {"micro_batch_size": 2}]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_it_trains_as_bf16_does_and_says_what_it_is(data, in_bf16, tmp_path, ways):
    facts = run(tmp_path / "run", data, RULES, **FP8, **ways)
    assert facts.error == in_bf16.error == "target_missed", facts.message  # TINY's target is out of reach
    assert [samples for samples, _ in facts.evaluations] == [32, 64, 96]
    assert in_bf16.losses[-1] < 0.9 * in_bf16.losses[0], "bf16 learns nothing: this test would see nothing"
    assert facts.losses[:2] == pytest.approx(in_bf16.losses[:2], rel=0.01)  # steps 3 and 6: before the toy's noise has grown
    assert [loss for _, loss in facts.evaluations] == pytest.approx([loss for _, loss in in_bf16.evaluations], rel=0.05)
    assert facts.losses != in_bf16.losses, "this was not FP8"
    log = {record["key"]: record["value"] for record in records(tmp_path / "run" / "result.txt")}
    assert log["lowest_numerical_precision_in_linear"] == "fp8" and log["lowest_numerical_precision_in_attn"] == "bfloat16"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    clipped = [event["clipped_elements"] for event in events if event["event"] == "fp8"]
    assert len(clipped) == 3 and all(count >= 0 for count in clipped)
    if ways.get("fp8_recipe") == "current":
        assert clipped == [0, 0, 0]


def test_the_warm_up_leaves_no_trace_in_the_scales(data, tmp_path):
    warm, cold = (run(tmp_path / str(steps), data, RULES, **FP8, warmup_train_steps=steps) for steps in (2, 0))
    assert warm.losses == cold.losses and warm.norms == cold.norms and warm.evaluations == cold.evaluations
