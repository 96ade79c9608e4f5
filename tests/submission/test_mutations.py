"""Test that `check` finds each mutation of a log that misled an official tool, in two dialects."""

import pytest
from log_dialects import DIALECTS, write
from synthetic_run import BENCHMARKS, LORA, PRETRAINING, find, project_root, records, write_good

from common.records.mlperf_log import TOKEN
from submission.examined_log import examine
from submission.log_rules import DISCLOSURE_KEYS

pytestmark = pytest.mark.quick

pytest.importorskip("mlperf_logging")


def put(key, value, occurrence=0):
    def spoil(log):
        index = find(log, key, occurrence)
        log[index]["value"] = value
        return index + 1

    return spoil


def drop(*keys):
    def spoil(log):
        log[:] = [record for record in log if record["key"] not in keys]
        return 0

    return spoil


def insert_after(where, **changes):
    def spoil(log):
        index = find(log, where)
        log.insert(index + 1, {**log[index], **changes})
        return index + 2

    return spoil


def stopped_as(status):
    def spoil(log):
        index = find(log, "run_stop")
        log[index]["metadata"]["status"] = status
        return index + 1

    return spoil


def evaluations_one_step_behind(log):
    step = log[find(log, "global_batch_size")]["value"]
    for record in log:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] -= step
    return find(log, "eval_accuracy") + 1


def evaluations_twice_as_far_apart(log):
    for record in log:
        if "samples_count" in record["metadata"]:
            record["metadata"]["samples_count"] *= 2
    return find(log, "eval_accuracy") + 1


def nan_after_the_target(log):
    """One more block and evaluation after the one that reached the target."""
    stop, last = find(log, "run_stop"), find(log, "eval_accuracy", -1)
    first = max(index for index, record in enumerate(log) if record["key"] == "block_start")
    log[stop:stop] = [{**record, "time_ms": log[stop]["time_ms"]} for record in log[first:stop]]
    index = stop + last - first
    log[index]["value"] = float("nan")
    return index + 1


def target_reached_early(log):
    log[find(log, "eval_accuracy", 1)]["value"] = 0.5
    return find(log, "eval_accuracy", 2) + 1


def init_of(minutes):
    def spoil(log):
        stop = find(log, "init_stop")
        for record in log[stop:]:
            record["time_ms"] += minutes * 60_000
        return stop + 1

    return spoil


def benchmark_after_the_first_evaluation(log):
    record = log.pop(find(log, "submission_benchmark"))
    index = find(log, "eval_accuracy")
    log.insert(index + 1, record)
    return index + 2


def evaluations_in_steps(log):
    step = log[find(log, "global_batch_size")]["value"]
    for record in log:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] //= step
    return find(log, "eval_accuracy", 1) + 1


def counted(key, occurrence, samples):
    def spoil(log):
        index = find(log, key, occurrence)
        log[index]["metadata"]["samples_count"] = samples
        return index + 1

    return spoil


def seed_without_its_file(log):
    log[find(log, "seed")]["metadata"].pop("file")
    return find(log, "seed") + 1


def put_seed(**metadata):
    def spoil(log):
        log[find(log, "seed")]["metadata"].update(metadata)
        return find(log, "seed") + 1

    return spoil


def two_runs_in_one_file(log):
    first = len(log)
    log += [{**record, "time_ms": record["time_ms"] + 3_600_000} for record in log]
    return first + find(log[:first], "init_start") + 1


def run_stop_before_run_start(log):
    record = log.pop(find(log, "run_stop"))
    index = find(log, "run_start")
    log.insert(index, record)
    return index + 1


CUSTOM = {"key": "tracked_stats", "event_type": "POINT_IN_TIME", "metadata": {"samples_count": 0}}
BOTH = (PRETRAINING, LORA)
COMMON, LATEST, RCP, OWN = "/common.yaml", "training_6.1.0/common.yaml", "RCP rcp_checker.py", "OWN"
# what, how (returns the line), rule, how its source begins or ends; and where a log of others
# differs: its rule and severity
ERROR, WARNING, NOTE = "error", "warning", "note"
MUTATIONS = [
    (
        "precision word bf16",
        put("lowest_numerical_precision_in_linear", "bf16"),
        "value",
        LATEST,
        ERROR,
    ),
    (
        "aborted though the target was reached",
        stopped_as("aborted"),
        "status",
        "TR Run Results",
        ERROR,
    ),
    ("no status that a tool knows", stopped_as("fine"), "status", "TR Run Results", ERROR),
    ("run_stop missing", drop("run_stop"), "missing", COMMON, ERROR),
    ("run_stop before run_start", run_stop_before_run_start, "value", COMMON, ERROR),
    ("NaN at an evaluation", put("eval_accuracy", float("nan"), 1), "finite", OWN, WARNING),
    ("NaN at the last evaluation", put("eval_accuracy", float("nan"), 3), "finite", OWN, WARNING),
    ("NaN after the target", nan_after_the_target, "finite", OWN, WARNING),
    (
        "an evaluation after the target",
        target_reached_early,
        "after_target",
        "TR Run Results",
        WARNING,
    ),
    ("run_start twice, same value", insert_after("run_start"), "repeated", COMMON, WARNING),
    ("cache_clear false", put("cache_clear", False), "cache_clear", "TR Data State", WARNING),
    ("cache_clear absent", drop("cache_clear"), "missing", COMMON, ERROR),
    ("train_samples absent", drop("train_samples"), "missing", COMMON, ERROR),
    ("empty organisation", put("submission_org", ""), "value", COMMON, ERROR),
    ("init of 31 minutes", init_of(31), "value", COMMON, ERROR),
    ("init of 40 minutes", init_of(40), "value", COMMON, ERROR),
    (
        "custom key that names the batch",
        insert_after("run_start", **CUSTOM, value={"global_batch_size_note": 7}),
        "reserved_word",
        RCP,
        ERROR,
    ),
    (
        "custom key that names the loss",
        insert_after("run_start", **CUSTOM, value={"best_eval_accuracy": 7}),
        "reserved_word",
        RCP,
        ERROR,
    ),
    (
        "custom key of its own that names it",
        insert_after("run_start", **CUSTOM | {"key": "my_eval_error"}),
        "reserved_word",
        RCP,
        ERROR,
    ),
    (
        "evaluation as a text",
        put("eval_accuracy", "3.9", 1),
        "eval_value",
        "CC eval_accuracy",
        ERROR,
    ),
    ("two runs in one file", two_runs_in_one_file, "value", COMMON, ERROR),
    (
        "samples_count one step behind",
        evaluations_one_step_behind,
        "samples_count",
        "TR RCP Rules",
        WARNING,
    ),
    (
        "evaluation interval",
        evaluations_twice_as_far_apart,
        "eval_interval",
        "TR Quality measure",
        WARNING,
    ),
    ("counts in steps", evaluations_in_steps, "samples_count", "TR RCP Rules", ERROR),
    ("a count of 1e20", counted("eval_accuracy", 3, 10**20), "samples_count", "TR RCP", ERROR),
    ("a count decreases", counted("eval_accuracy", 1, 1), "samples_count", "TR RCP", ERROR),
    ("run_stop of a block", counted("run_stop", 0, 384), "samples_count", "TR RCP", WARNING),
    (
        "benchmark after the first evaluation",
        benchmark_after_the_first_evaluation,
        "order",
        RCP,
        ERROR,
    ),
    ("batch of -5", put("global_batch_size", -5), "batch", RCP, ERROR),
    ("no seed", drop("seed"), "seed", "SEED", ERROR),
    ("seed that is no number", put("seed", "abc"), "seed", "SEED", ERROR),
    ("seed of 15 bits as a text", put("seed", "31415"), "odd_seed", "SEED", WARNING),
    ("seed without its line of code", seed_without_its_file, "seed", "SEED", ERROR),
    ("seed at two lines", put_seed(lineno=[1, 2]), "seed", "SEED", ERROR),
    ("seed of each rank", insert_after("seed"), "seed", "SEED", ERROR),
    ("cache_clear 0", put("cache_clear", 0), "cache_clear", "TR Data State", WARNING),
    ("cache_clear as a text", put("cache_clear", "false"), "cache_clear", "TR", WARNING),
    ("two seeds", insert_after("seed", value=99_999), "many_seeds", "SEED", WARNING),
    (
        "learning rate unlike the reference's",
        put("opt_base_learning_rate", 5e-4),
        "learning_rate",
        "RCP Hyperparams",
        NOTE,
    ),
    (
        "config changed with --set",
        put("config_filename", "A_TEST_1x8+modified.toml"),
        "config_filename",
        OWN,
        ERROR,
    ),
    (
        "config derived, not a file",
        put("config_filename", "A_TEST_1x2+derived.toml"),
        "config_filename",
        OWN,
        ERROR,
    ),
    (
        "config of another GPU",
        put("config_filename", "A_TEST_1x8+forced.toml"),
        "config_filename",
        OWN,
        ERROR,
    ),
    *((f"{key} absent", drop(key), "missing", LATEST, ERROR) for key in DISCLOSURE_KEYS),
]
ALWAYS_NOTE = ("learning rate unlike the reference's",)
# Of one benchmark only.
OF_ONE = [
    (PRETRAINING, "clip 5", put("opt_gradient_clip_norm", 5.0), "value", "closed_llama31_8b.yaml"),
    (
        PRETRAINING,
        "end learning rate",
        put("opt_end_learning_rate", 8e-6),
        "end_learning_rate",
        "TR Hyperparameters",
    ),
    (
        PRETRAINING,
        "decay steps",
        put("opt_learning_rate_decay_steps", 1_200_000),
        "value",
        "closed_llama31_8b.yaml",
    ),
    (
        PRETRAINING,
        "warm-up of half a step",
        put("opt_learning_rate_warmup_steps", 128.5),
        "schedule",
        "TR Hyperparameters",
    ),
    (
        PRETRAINING,
        "warm-up of all steps",
        put("opt_learning_rate_warmup_steps", 1_200_000),
        "schedule",
        "TR Hyperparameters",
    ),
    (
        LORA,
        "a schedule that ends before the run",
        put("opt_learning_rate_training_steps", 100),
        "schedule",
        "TR Hyperparameters",
    ),
    (
        LORA,
        "optimizer muon",
        insert_after("seed", key="opt_name", value="muon"),
        "constant",
        "TR Hyperparameters",
    ),
    (
        LORA,
        "sequences of 4096",
        insert_after("seed", key="max_sequence_length", value=4096),
        "constant",
        "TR Hyperparameters",
    ),
    (LORA, "clip 5", put("opt_gradient_clip_norm", 5.0), "constant", "TR Hyperparameters"),
    (LORA, "alpha 64", put("lora_alpha", 64), "constant", "TR Hyperparameters"),
    (LORA, "decay 0.1", put("opt_adamw_weight_decay", 0.1), "constant", "TR Hyperparameters"),
    (LORA, "rank 8", put("lora_rank", 8), "value", "closed_llama2_70b_lora.yaml"),
    (LORA, "3900 sequences", put("train_samples", 3900), "constant", "TR Hyperparameters"),
    (LORA, "170 sequences evaluated", put("eval_samples", 170), "constant", "TR Hyperparameters"),
]
CASES = [(benchmark, *row) for benchmark in BENCHMARKS for row in MUTATIONS] + [
    (*row, ERROR) for row in OF_ONE
]
IDS = [f"{benchmark.rules.BENCHMARK}: {name}" for benchmark, name, *_ in CASES]


def spoiled(tmp_path, benchmark, dialect, spoil):
    """Return the findings (line, rule, severity, source) on a mutated log, and the mutated line."""
    change, options = DIALECTS[dialect]
    log = change(records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED)))
    line = spoil(log)
    path = write(tmp_path / "result_0.txt", log, **options)
    found = examine(path, project_root=project_root(tmp_path)).findings
    return line, [
        (finding.line, finding.rule, finding.severity, finding.source) for finding in found
    ]


@pytest.mark.parametrize("dialect", ["ours", "srun"])
@pytest.mark.parametrize(
    ("benchmark", "name", "spoil", "rule", "source", "severity_of_others"), CASES, ids=IDS
)
def test_a_spoiled_log_is_refused_or_warned_about(
    tmp_path, dialect, benchmark, name, spoil, rule, source, severity_of_others
):
    line, found = spoiled(tmp_path, benchmark, dialect, spoil)
    severity = NOTE if name in ALWAYS_NOTE else ERROR
    if dialect != "ours":
        severity = severity_of_others
    elif name == "run_start twice, same value":
        rule, source = "once", OWN  # the official checker warns
    assert any(row[:3] == (line, rule, severity) and source in row[3] for row in found), found


# How line n of the file becomes another one; the rule in our logs and those of others, None where
# they may write so.
LINES = [
    ("text after the JSON", "{line} done", "line_format", "line_format", ERROR),
    ("text before the token", "rank 0: {line}", "line_format", None, None),
    ("a second event on the line", "{line}{line}", "line_format", "line_format", WARNING),
    ("cut in the middle", "{cut}", "line_format", "line_format", ERROR),
    (
        "the token before something else",
        TOKEN + " load_state_dict",
        "line_format",
        "line_format",
        ERROR,
    ),
]


@pytest.mark.parametrize("dialect", ["ours", "srun"])
@pytest.mark.parametrize("benchmark", BOTH, ids=lambda benchmark: benchmark.rules.BENCHMARK)
@pytest.mark.parametrize(
    ("spoil", "rule", "rule_of_others", "severity_of_others"),
    [row[1:] for row in LINES],
    ids=[row[0] for row in LINES],
)
@pytest.mark.parametrize("key", ["eval_stop", "run_stop"])
def test_a_spoiled_line_is_found(
    tmp_path, dialect, benchmark, key, spoil, rule, rule_of_others, severity_of_others
):
    change, options = DIALECTS[dialect]
    log = change(records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED)))
    path = write(tmp_path / "result_0.txt", log, **options)
    lines, index = path.read_text().splitlines(), find(log, key)
    lines[index] = spoil.format(line=lines[index], cut=lines[index][:60])
    path.write_text("\n".join(lines) + "\n")
    found = [
        (f.line, f.rule, f.severity)
        for f in examine(path, project_root=project_root(tmp_path)).findings
    ]
    ours = WARNING if spoil.startswith("rank 0") else ERROR
    expected = (
        (index + 1, rule, ours)
        if dialect == "ours"
        else (index + 1, rule_of_others, severity_of_others)
    )
    assert expected in found if expected[1] else found == []


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_the_good_log_is_clean_in_every_dialect(tmp_path, benchmark, dialect):
    _, found = spoiled(tmp_path, benchmark, dialect, lambda log: 0)
    assert [row for row in found if row[1] != "repeated"] == [] and all(
        row[2] == WARNING for row in found
    )
