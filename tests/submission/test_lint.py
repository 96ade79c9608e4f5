"""Lint: a good log is clean; every way to spoil it is found at its line and by its rule."""

import json

import pytest
from synthetic_log import (
    BENCHMARKS,
    CONFIG_FILENAME,
    LORA,
    PRETRAINING,
    evaluate,
    find,
    project_root,
    records,
    start,
    write_evaluations,
    write_good,
    write_records,
)

from common.training.mllog import TOKEN
from llama31_8b import rules
from submission.lint import DISCLOSURE_KEYS, lint


@pytest.fixture
def good(tmp_path):
    return records(write_good(tmp_path / "good.txt"))


@pytest.fixture
def good_lora(tmp_path):
    return records(write_good(tmp_path / "good.txt", LORA.rules.CLOSED))


def findings(tmp_path, log: list[dict], **options) -> list:
    return lint(write_records(tmp_path / "changed.txt", log), project_root=project_root(tmp_path), **options)


def found(tmp_path, log: list[dict], **options) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in findings(tmp_path, log, **options)]


SIZES = [(PRETRAINING, 16), (PRETRAINING, 32), (PRETRAINING, 96), (LORA, 8), (LORA, 16), (LORA, 64), (LORA, 72)]


@pytest.mark.parametrize(("benchmark", "global_batch_size"), SIZES)
def test_a_good_closed_log_is_clean(tmp_path, benchmark, global_batch_size):
    path = write_good(tmp_path / "result.txt", benchmark.rules.CLOSED, global_batch_size)
    assert lint(path, project_root=project_root(tmp_path)) == []


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_a_miniature_log_is_clean_by_its_own_rules_and_refused_by_the_closed_ones(tmp_path, benchmark):
    log = records(write_good(tmp_path / "miniature.txt", benchmark.rules.MINIATURE))
    log[find(log, "cache_clear")]["value"] = False  # honest: no root, nothing dropped
    assert found(tmp_path, log) == []
    closed = found(tmp_path, log, division="closed")
    own = "max_steps" if benchmark is PRETRAINING else "train_samples"
    for key in ("submission_division", "max_sequence_length", "eval_samples", own, "target_accuracy"):
        assert (find(log, key) + 1, "constant") in closed
    assert (find(log, "eval_accuracy") + 1, "eval_interval") in closed and (1, "cache_clear") in closed


def test_an_aborted_log_that_says_so_is_clean(tmp_path):
    path = tmp_path / "result.txt"
    log = start(path)
    log.block_start(0)
    log.block_stop(12288)
    evaluate(log, 12288, 5.0)
    log.block_start(12288)
    log.abort(12288 + 320)
    assert lint(path, project_root=project_root(tmp_path)) == []


# One value changed: key, which occurrence, new value, rule that must find it on that line.
VALUES = [
    ("opt_end_learning_rate", 0, 8e-6, "learning_rate"),
    ("opt_learning_rate_decay_steps", 0, 1_200_000, "decay_steps"),
    ("lowest_numerical_precision_in_attn", 0, "bf16", "disclosure"),
    ("tensor_parallelism", 0, 0, "disclosure"),
    ("micro_batch_size", 0, "1", "disclosure"),
    ("cache_clear", 0, False, "cache_clear"),
    ("seed", 0, 2**32, "seed"),
    ("seed", 0, "1234", "seed"),
    ("eval_accuracy", 1, float("nan"), "finite"),
    ("eval_accuracy", 1, "3.9", "eval_value"),
    ("max_sequence_length", 0, 4096, "constant"),
    ("eval_samples", 0, 1023, "constant"),
    ("max_steps", 0, 1000, "constant"),
    ("opt_name", 0, "sgd", "constant"),
    ("opt_adamw_beta_2", 0, 0.999, "constant"),
    ("opt_adamw_epsilon", 0, 1e-8, "constant"),
    ("opt_adamw_weight_decay", 0, 0.01, "constant"),
    ("opt_gradient_clip_norm", 0, True, "constant"),
    ("opt_learning_rate_decay_schedule", 0, "linear", "constant"),
    ("target_accuracy", 0, 3.4, "constant"),
    ("gradient_accumulation_steps", 0, 0, "batch"),
    ("config_filename", 0, "other.toml", "config_filename"),
    ("config_filename", 0, f"../llama31_8b/{CONFIG_FILENAME}", "config_filename"),
    ("submission_platform", 0, "eval_error box", "reserved_word"),
    ("submission_org", 0, "", "submission"),
    ("submission_status", 0, "available", "submission"),
]


@pytest.mark.parametrize(("key", "occurrence", "value", "rule"), VALUES)
def test_a_wrong_value_is_found(tmp_path, good, key, occurrence, value, rule):
    index = find(good, key, occurrence)
    good[index]["value"] = value
    result = found(tmp_path, good)
    assert (index + 1, rule) in result and {line for line, _ in result} == {index + 1}


LORA_VALUES = [
    ("train_samples", 0, 3900, "constant"),
    ("eval_samples", 0, 176, "constant"),
    ("max_sequence_length", 0, 4096, "constant"),
    ("opt_adamw_beta_2", 0, 0.95, "constant"),
    ("opt_adamw_epsilon", 0, 1e-5, "constant"),
    ("opt_adamw_weight_decay", 0, 0.1, "constant"),
    ("opt_gradient_clip_norm", 0, 5, "constant"),
    ("lora_rank", 0, 8, "constant"),
    ("lora_rank", 0, "16", "constant"),
    ("lora_alpha", 0, 64, "constant"),
    ("lora_dropout", 0, 0.0, "constant"),
    ("target_accuracy", 0, 0.93, "constant"),
    ("opt_base_learning_rate", 0, 0.0, "learning_rate"),
    ("opt_learning_rate_training_steps", 0, 0, "learning_rate"),
    ("opt_learning_rate_training_steps", 0, 1024.5, "learning_rate"),
    ("opt_learning_rate_warmup_factor", 0, 1.0, "learning_rate"),
    ("opt_learning_rate_warmup_factor", 0, None, "learning_rate"),
    ("gradient_accumulation_steps", 0, 0, "batch"),
]


@pytest.mark.parametrize(("key", "occurrence", "value", "rule"), LORA_VALUES)
def test_a_wrong_value_of_lora_is_found(tmp_path, good_lora, key, occurrence, value, rule):
    index = find(good_lora, key, occurrence)
    good_lora[index]["value"] = value
    assert found(tmp_path, good_lora) == [(index + 1, rule)]


@pytest.mark.parametrize("key", ["seed", "max_steps", "submission_org", *DISCLOSURE_KEYS])
def test_a_missing_key_is_found(tmp_path, good, key):
    del good[find(good, key)]
    result = findings(tmp_path, good)
    assert [(finding.rule, finding.message) for finding in result] == [("missing", f"{key} is missing")]


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_every_hyperparameter_must_be_there(tmp_path, benchmark):
    log = records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED))
    first, last = find(log, "global_batch_size"), find(log, "config_filename")
    without = log[:first] + log[last + 1 :]
    missing = {finding.message.split()[0] for finding in findings(tmp_path, without) if finding.rule == "missing"}
    logged = {record["key"] for record in log[first : last + 1]}
    assert missing == logged - {"target_accuracy"}  # by convention only


@pytest.mark.parametrize(("key", "value"), [("seed", 99), ("seed", 1234567), ("run_start", None), ("max_steps", 1_200_000)])
def test_a_repeated_key_is_found(tmp_path, good, key, value):
    index = find(good, key)
    good.insert(index + 1, {**good[index], "value": value})
    assert (index + 2, "repeated") in found(tmp_path, good)


def test_a_wrong_evaluation_interval_is_found_at_each_evaluation(tmp_path):
    changed = records(write_evaluations(tmp_path / "result.txt", rules.CLOSED, [24576, 49152, 73728]))  # as some accepted logs do
    assert found(tmp_path, changed) == [(find(changed, "eval_accuracy", n) + 1, "eval_interval") for n in range(3)]


# Global batch, evaluations, which of them are wrong. By the rules 8 begins at 1536 and 16 at 1920, and both go on by 384.
LORA_EVALUATIONS = [
    (8, [1536, 1920, 2304], []),
    (8, [384, 768, 1152], [0]),
    (8, [1920, 2304], [0]),
    (8, [1528, 1912], [0]),
    (8, [1536, 2304, 2688], [1]),
    (8, [1536, 1728, 2112], [1]),
    (8, [768, 1536], [0, 1]),
    (16, [1920, 2304], []),
    (16, [1536, 1920], [0]),  # as one published result does
]


@pytest.mark.parametrize(("global_batch_size", "counts", "wrong"), LORA_EVALUATIONS)
def test_lora_evaluates_first_after_the_skipped_ones_and_then_at_every_interval(tmp_path, global_batch_size, counts, wrong):
    log = records(write_evaluations(tmp_path / "result.txt", LORA.rules.CLOSED, counts, global_batch_size))
    assert found(tmp_path, log) == [(find(log, "eval_accuracy", number) + 1, "eval_interval") for number in wrong]


def test_lora_that_stops_before_its_first_evaluation_has_none_left_out(tmp_path):
    for samples, expected in ((1528, 0), (1536, 1)):
        log = start(tmp_path / f"{samples}.txt", LORA.rules.CLOSED)
        log.block_start(0)
        log.abort(samples)
        result = lint(tmp_path / f"{samples}.txt", project_root=project_root(tmp_path))
        assert [finding.rule for finding in result].count("eval_interval") == expected


def test_a_skipped_evaluation_is_found_at_the_next_one(tmp_path, good):
    start_index, stop_index = find(good, "eval_start", 1), find(good, "block_start", 2)
    changed = good[:start_index] + good[stop_index:]
    assert found(tmp_path, changed) == [(find(changed, "eval_accuracy", 1) + 1, "eval_interval")]


def test_training_to_the_end_without_evaluations_is_found(tmp_path):
    path = tmp_path / "result.txt"
    log = start(path)
    log.block_start(0)
    log.abort(12288)
    assert (log_end(path), "eval_interval") in [(f.line, f.rule) for f in lint(path, project_root=None)]


def log_end(path) -> int:
    return len(path.read_text().splitlines())


def test_success_without_the_target_is_found(tmp_path, good):
    good[find(good, "eval_accuracy", 3)]["value"] = 3.3000001
    assert found(tmp_path, good) == [(len(good), "status")]


def test_aborted_though_the_target_was_reached_is_found(tmp_path, good):
    good[-1]["metadata"]["status"] = "aborted"
    assert found(tmp_path, good) == [(len(good), "status")]


def test_samples_one_step_behind_are_found(tmp_path, good):
    for record in good:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] -= 32
    result = found(tmp_path, good)
    first = find(good, "eval_accuracy") + 1
    assert (first, "samples_count") in result and (first, "eval_interval") in result


def test_samples_that_are_no_whole_batch_are_found(tmp_path, good):
    index = find(good, "run_stop")
    good[index]["metadata"]["samples_count"] -= 1
    assert (index + 1, "samples_count") in found(tmp_path, good)


def test_training_after_the_target_is_found(tmp_path, good):
    good[find(good, "eval_accuracy", 1)]["value"] = 3.2
    result = found(tmp_path, good)
    assert result[0] == (find(good, "block_start", 2) + 1, "after_target") and {rule for _, rule in result} == {"after_target"}


def test_time_going_backwards_is_found(tmp_path, good):
    index = find(good, "eval_start", 1)
    good[index]["time_ms"] -= 3_600_000
    assert found(tmp_path, good) == [(index + 1, "time")]


@pytest.mark.parametrize(("minutes", "warning"), [(24.9, None), (26, True), (30, False), (31, False)])
def test_initialization_time(tmp_path, good, minutes, warning):
    stop = find(good, "init_stop")
    for record in good[stop:]:
        record["time_ms"] += int(minutes * 60_000)
    for record in good[:stop]:  # the log's own milliseconds do not count here
        record["time_ms"] = good[0]["time_ms"]
    good[stop]["time_ms"] = good[0]["time_ms"] + int(minutes * 60_000)
    result = [(finding.line, finding.rule, finding.warning) for finding in findings(tmp_path, good)]
    assert result == ([] if warning is None else [(stop + 1, "init_time", warning)])


def test_run_start_before_init_stop_is_found(tmp_path, good):
    index = find(good, "run_start")
    good[index - 1], good[index] = good[index], good[index - 1]
    assert (index, "order") in found(tmp_path, good)


def test_a_block_that_is_not_closed_is_found(tmp_path, good):
    del good[find(good, "block_stop", 1)]
    assert (find(good, "eval_start", 1) + 1, "order") in found(tmp_path, good)


def test_an_evaluation_without_a_value_is_found(tmp_path, good):
    index = find(good, "eval_accuracy", 1)
    del good[index]
    assert (index + 2, "order") in found(tmp_path, good)  # the block after it


def test_a_hyperparameter_on_the_clock_is_found(tmp_path, good):
    record = good.pop(find(good, "train_samples"))
    good.insert(find(good, "run_start") + 1, record)
    assert (find(good, "train_samples") + 1, "order") in found(tmp_path, good)


def test_anything_after_run_stop_is_found(tmp_path, good):
    good.append({**good[0], "time_ms": good[-1]["time_ms"], "key": "tracked_stats", "value": {"loss": 1.0}})
    assert (len(good), "after_run_stop") in found(tmp_path, good)


def test_a_missing_run_stop_is_found(tmp_path, good):
    assert found(tmp_path, good[:-1]) == [(0, "missing")]


def test_decay_before_warmup_is_found(tmp_path, good):
    index = find(good, "opt_learning_rate_warmup_steps")
    first, second = good[index], good[index + 1]
    first["time_ms"], second["time_ms"] = second["time_ms"], first["time_ms"]  # the swap is no step back in time
    good[index], good[index + 1] = second, first
    assert found(tmp_path, good) == [(index + 1, "decay_steps")]


def test_a_wrong_event_type_is_found(tmp_path, good):
    good[find(good, "run_stop")]["event_type"] = "POINT_IN_TIME"
    assert found(tmp_path, good) == [(len(good), "event_type")]


@pytest.mark.parametrize("spoil", ["{line} and more", "rank 0: {line}", "{line}{line}", ":::MLLOG load_state_dict", "{cut}"])
def test_a_line_that_is_not_one_event_is_found(tmp_path, good, spoil):
    path = write_records(tmp_path / "result.txt", good)
    lines = path.read_text().splitlines()
    index = find(good, "eval_stop", 0)
    lines[index] = spoil.format(line=lines[index], cut=lines[index][:60])
    path.write_text("\n".join(lines) + "\n")
    result = [(finding.line, finding.rule) for finding in lint(path, project_root=None)]
    assert (index + 1, "line_format") in result


def test_lines_without_the_token_are_not_looked_at(tmp_path):
    path = write_good(tmp_path / "result.txt")
    path.write_text("RESULT,llama31_8b,...\n" + path.read_text() + "the end\n")
    assert lint(path, project_root=None) == []


def test_an_unknown_benchmark_or_division_is_found(tmp_path, good):
    good[find(good, "submission_division")]["value"] = "Closed"
    assert (find(good, "submission_division") + 1, "benchmark") in found(tmp_path, good)


@pytest.mark.parametrize("benchmark", ["llama31_8b", "llama2_70b_lora"])
def test_junk_never_crashes_lint(tmp_path, benchmark):
    path = tmp_path / "junk.txt"
    events = [[], 1, None, {"key": "seed"}, {"time_ms": 1, "event_type": 5, "key": "seed", "value": [1], "metadata": {}}]
    counted = {"time_ms": 1, "event_type": "POINT_IN_TIME", "value": {"a": 1}, "metadata": {"samples_count": "x", "status": 1}}
    events += [{**counted, "key": key} for key in ("eval_accuracy", "block_start", "run_stop", "global_batch_size", "config_filename")]
    events += [{**counted, "key": key} for key in ("opt_base_learning_rate", "opt_learning_rate_decay_steps", "init_start", "init_stop")]
    events += [{**counted, "key": "submission_benchmark", "value": benchmark}, {**counted, "key": "opt_learning_rate_warmup_steps"}]
    events += [{**counted, "key": key} for key in ("opt_learning_rate_training_steps", "opt_learning_rate_warmup_factor", "lora_rank")]
    events += [{**counted, "key": "submission_division", "value": "closed"}]
    path.write_bytes(b"\xff\xfe\n" + "".join(f"{TOKEN}{json.dumps(event)}\n" for event in events).encode())
    assert lint(path)
