"""Test our own log rules on synthetic logs, without the official checker."""

import json

import pytest
from log_dialects import processes, srun
from synthetic_run import (
    BENCHMARKS,
    LORA,
    PRETRAINING,
    evaluate,
    find,
    records,
    start,
    write_evaluations,
    write_good,
    write_records,
)

from common.records.mlperf_log import read
from llama31_8b import rules
from submission.examined_log import rule_findings

pytestmark = pytest.mark.quick


@pytest.fixture
def good(tmp_path):
    return records(write_good(tmp_path / "good.txt"))


@pytest.fixture
def good_lora(tmp_path):
    return records(write_good(tmp_path / "good.txt", LORA.rules.CLOSED))


def found(tmp_path, log: list[dict], ours: bool = True) -> list[tuple[int, str]]:
    return found_in(write_records(tmp_path / "changed.txt", log), ours)


def found_in(path, ours: bool = True) -> list[tuple[int, str]]:
    return sorted((finding.line, finding.rule) for finding in rule_findings(read(path), ours))


SIZES = [(PRETRAINING, 16), (PRETRAINING, 32), (LORA, 8), (LORA, 16), (LORA, 64), (LORA, 72)]


@pytest.mark.parametrize(("benchmark", "global_batch_size"), SIZES)
def test_a_good_closed_log_is_clean(tmp_path, benchmark, global_batch_size):
    found = found_in(write_good(tmp_path / "result.txt", benchmark.rules.CLOSED, global_batch_size))
    # The test's rate is the reference's at one batch only.
    assert [rule for _, rule in found if rule != "learning_rate"] == []


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_an_honest_miniature_is_clean(tmp_path, benchmark):
    log = records(write_good(tmp_path / "miniature.txt", benchmark.rules.MINIATURE))
    log[find(log, "cache_clear")]["value"] = False
    assert found(tmp_path, log) == []


def test_an_aborted_log_that_says_so_is_clean(tmp_path):
    path = tmp_path / "result.txt"
    log = start(path)
    log.block_start(0)
    log.block_stop(12288)
    evaluate(log, 12288, 5.0)
    log.block_start(12288)
    log.abort(12288 + 320)
    assert found_in(path) == []


# One value of a log of ours changed: key, new value, rule that must find it on that line, and
# nothing else.
VALUES = [
    ("cache_clear", False, "cache_clear"),
    ("seed", 2**32, "odd_seed"),
    ("seed", -1, "odd_seed"),
    ("seed", 1234567, "chosen_seed"),
    ("seed", 42, "chosen_seed"),
    ("opt_end_learning_rate", 8e-6, "end_learning_rate"),
    ("opt_end_learning_rate", "8e-5", "end_learning_rate"),
    ("target_accuracy", 3.4, "constant"),
    ("gradient_accumulation_steps", 0, "batch"),
    ("micro_batch_size", 64, "batch"),
    ("submission_org", " ", "submission"),
    ("submission_status", "available", "submission"),
    ("submission_platform", "eval_error box", "reserved_word"),
    ("config_filename", "A_TEST_1x8+modified.toml", "config_filename"),
]
LORA_VALUES = [
    ("train_samples", 3900, "constant"),
    ("eval_samples", 176, "constant"),
    ("max_sequence_length", 4096, "constant"),
    ("opt_adamw_beta_2", 0.95, "constant"),
    ("opt_adamw_epsilon", 1e-5, "constant"),
    ("opt_adamw_weight_decay", 0.1, "constant"),
    ("opt_gradient_clip_norm", True, "constant"),
    ("lora_alpha", "32", "constant"),
    ("lora_dropout", 0.0, "constant"),
    ("target_accuracy", 0.93, "constant"),
    ("opt_base_learning_rate", None, "schedule"),
    ("opt_learning_rate_training_steps", 0, "schedule"),
    ("opt_learning_rate_training_steps", 1024.5, "schedule"),
    ("opt_learning_rate_warmup_factor", 1.0, "schedule"),
    ("opt_learning_rate_warmup_factor", None, "schedule"),
]


@pytest.mark.parametrize(
    ("benchmark", "key", "value", "rule"),
    [(PRETRAINING, *row) for row in VALUES] + [(LORA, *row) for row in LORA_VALUES],
)
def test_a_wrong_value_is_found(tmp_path, benchmark, key, value, rule):
    log = records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED))
    index = find(log, key)
    log[index]["value"] = value
    line = find(log, "global_batch_size") if key == "micro_batch_size" else index
    assert found(tmp_path, log) == [(line + 1, rule)]


def test_lr_unlike_the_reference_is_asked_about_only_where_there_is_one(tmp_path):
    for batch, expected in (
        (32, []),
        (16, ["learning_rate"]),
        (48, []),
    ):  # the test's config says 8e-4; 16 has 4e-4
        log = records(write_good(tmp_path / f"{batch}.txt", global_batch_size=batch))
        log[find(log, "opt_base_learning_rate")]["value"] = 8e-4
        log[find(log, "opt_end_learning_rate")]["value"] = 8e-5
        assert [rule for _, rule in found(tmp_path, log)] == expected


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_every_key_of_ours_must_be_there_once(tmp_path, benchmark):
    log = records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED))
    first, last = find(log, "global_batch_size"), find(log, "config_filename")
    without = write_records(tmp_path / "without.txt", log[:first] + log[last + 1 :])
    missing = {
        finding.message.split()[0]
        for finding in rule_findings(read(without), True)
        if finding.rule == "once"
    }
    # By convention only.
    assert missing == {record["key"] for record in log[first : last + 1]} - {"target_accuracy"}
    twice = [record for record in log for _ in range(1 + (record["key"] == "max_sequence_length"))]
    assert found(tmp_path, twice) == [(find(log, "max_sequence_length") + 2, "once")]


# Evaluations.


def test_a_wrong_interval_is_found_at_the_first_wrong_evaluation(tmp_path):
    # As some accepted logs do.
    changed = records(
        write_evaluations(tmp_path / "result.txt", rules.CLOSED, [24576, 49152, 73728])
    )
    for log, ours in ((changed, True), (srun(changed), False), (processes(changed), False)):
        assert [row for row in found(tmp_path, log, ours) if row[1] != "disclosure"] == [
            (find(log, "eval_accuracy") + 1, "eval_interval")
        ]


# Global batch, evaluations, which of them is wrong. By the rules 8 begins at 1536 and 16 at 1920,
# and both go on by 384.
LORA_EVALUATIONS = [
    (8, [1536, 1920, 2304], None),
    (8, [384, 768, 1152], 0),
    (8, [1920, 2304], 0),
    (8, [1536, 2304, 2688], 1),
    (8, [1536, 1728, 2112], 1),
    (16, [1920, 2304], None),
    (16, [1536, 1920], 0),  # as one published result does
    (64, [8448, 9216], 0),  # as another one does: twice as late as it is due
]


@pytest.mark.parametrize(("global_batch_size", "counts", "wrong"), LORA_EVALUATIONS)
def test_lora_evaluates_first_after_the_skipped_ones_and_then_at_every_interval(
    tmp_path, global_batch_size, counts, wrong
):
    path = write_evaluations(tmp_path / "result.txt", LORA.rules.CLOSED, counts, global_batch_size)
    expected = (
        []
        if wrong is None
        else [(find(records(path), "eval_accuracy", wrong) + 1, "eval_interval")]
    )
    assert found_in(path, ours=False) == expected


def test_counts_one_step_short_are_one_finding_and_no_wrong_interval(tmp_path, good):
    for record in good:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] -= 32
    log = srun(good)
    assert found(tmp_path, log, ours=False) == [(find(log, "eval_accuracy") + 1, "samples_count")]


def test_lora_that_stops_before_its_first_evaluation_has_none_left_out(tmp_path):
    for samples, expected in ((1528, 0), (1536, 1)):
        log = start(tmp_path / f"{samples}.txt", LORA.rules.CLOSED)
        log.block_start(0)
        log.abort(samples)
        assert [rule for _, rule in found_in(tmp_path / f"{samples}.txt")].count(
            "eval_interval"
        ) == expected


def test_a_skipped_evaluation_is_found_at_the_next_one(tmp_path, good):
    start_index, stop_index = find(good, "eval_start", 1), find(good, "block_start", 2)
    changed = good[:start_index] + good[stop_index:]
    assert found(tmp_path, changed) == [(find(changed, "eval_accuracy", 1) + 1, "eval_interval")]


def test_success_without_the_target_is_found(tmp_path, good):
    good[find(good, "eval_accuracy", 3)]["value"] = 3.3000001
    assert found(tmp_path, good) == [(len(good), "status")]


# Habits of our own logs: a log of others that does the same is left alone.


def test_samples_that_are_no_whole_batch_are_found(tmp_path, good):
    index = find(good, "run_stop")
    good[index]["metadata"]["samples_count"] -= 1
    assert (index + 1, "samples_count") in found(tmp_path, good) and found(
        tmp_path, good, ours=False
    ) == []


def test_time_going_backwards_is_found(tmp_path, good):
    index = find(good, "eval_start", 1)
    good[index]["time_ms"] -= 3_600_000
    assert (
        found(tmp_path, good) == [(index + 1, "time")] and found(tmp_path, good, ours=False) == []
    )


def moved(key, before):
    def change(log):
        record = log.pop(find(log, key))
        log.insert(find(log, before), record)

    return change


def without(key, occurrence):
    return lambda log: log.pop(find(log, key, occurrence))


ORDERS = [
    ("run_start before init_stop", moved("run_start", "init_stop"), "run_start"),
    ("a block that is not closed", without("block_stop", 1), "eval_start"),
    ("an evaluation without a value", without("eval_accuracy", 1), "block_start"),
    ("a hyperparameter on the clock", moved("train_samples", "eval_start"), "train_samples"),
]


@pytest.mark.parametrize(
    ("change", "key"), [row[1:] for row in ORDERS], ids=[row[0] for row in ORDERS]
)
def test_a_wrong_order_is_found(tmp_path, good, change, key):
    change(good)
    lines = [index + 1 for index, record in enumerate(good) if record["key"] == key]
    result = [line for line, rule in found(tmp_path, good) if rule == "order"]
    assert (
        result
        and result[0] in lines
        and "order" not in [rule for _, rule in found(tmp_path, good, ours=False)]
    )


def test_anything_after_run_stop_is_found(tmp_path, good):
    good.append(
        {**good[0], "time_ms": good[-1]["time_ms"], "key": "tracked_stats", "value": {"loss": 1.0}}
    )
    assert (len(good), "order") in found(tmp_path, good) and found(tmp_path, good, ours=False) == []


def test_a_wrong_event_type_is_found(tmp_path, good):
    good[find(good, "run_stop")]["event_type"] = "POINT_IN_TIME"
    assert (
        found(tmp_path, good) == [(len(good), "event_type")]
        and found(tmp_path, good, ours=False) == []
    )


def test_a_loss_that_differs_from_the_one_in_events_jsonl_is_found(tmp_path, good):
    at = find(good, "eval_accuracy")
    loss = good[at]["value"]
    event = {"event": "eval", "samples": good[at]["metadata"]["samples_count"], "loss": loss}
    events = tmp_path / "events.jsonl"
    events.write_text(json.dumps(event) + "\n")
    assert found(tmp_path, good) == []
    good[at]["value"] = loss - 0.001
    assert found(tmp_path, good) == [(at + 1, "events")]
    assert found(tmp_path, good, ours=False) == []
    events.unlink()
    assert found(tmp_path, good) == [], "a result set has no such file"


def test_a_resumed_log_is_said_to_be_one_and_may_begin_where_the_other_sitting_ended(tmp_path):
    for benchmark, at in (
        (PRETRAINING, 12288),
        (PRETRAINING, 12288 + 320),
        (LORA, 8),
        (LORA, 1920),
    ):
        log = records(
            write_good(
                tmp_path / f"good_{benchmark.rules.BENCHMARK}_{at}.txt", benchmark.rules.CLOSED
            )
        )
        first = next(
            index
            for index, record in enumerate(log)
            if record["key"] == "block_stop" and record["metadata"]["samples_count"] > at
        )
        begin = {
            **log[first],
            "key": "block_start",
            "event_type": "INTERVAL_START",
            "metadata": {"samples_count": at},
        }
        del log[find(log, "block_start") : first]
        line = {
            **log[find(log, "seed")],
            "key": "resumed",
            "value": at,
            "metadata": {"run": "20261122-101112_A_TEST_1x8_seed3"},
        }
        log.insert(find(log, "run_start") + 1, begin)
        log.insert(find(log, "seed") + 1, line)
        path = write_records(tmp_path / "resumed.txt", log)
        (finding,) = list(rule_findings(read(path), True))
        assert (finding.line, finding.rule, finding.warning) == (
            find(log, "resumed") + 1,
            "resumed",
            True,
        ) and str(at) in finding.message
        log[find(log, "resumed")]["value"] = 0
        assert {"samples_count"} <= {rule for _, rule in found(tmp_path, log)}, (
            "without that line it is no log of a run"
        )


def test_what_others_may_write_is_a_finding_in_a_log_of_ours(tmp_path, good_lora):
    log = srun(good_lora)
    assert found(tmp_path, log, ours=False) == [] and {"once", "order", "samples_count"} <= {
        rule for _, rule in found(tmp_path, log)
    }
