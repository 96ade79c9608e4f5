"""The official checker: what our logs get from it, and what it lets pass that our lint must catch (mlperf-logging 4.1.68)."""

import importlib.metadata

import pytest
from synthetic_log import BENCHMARKS, LORA, PRETRAINING, find, records, write_evaluations, write_good, write_records

from common.errors import ConfigError, PreflightError
from llama31_8b import rules
from submission import check, checker
from submission.lint import DISCLOSURE_KEYS, lint

pytest.importorskip("mlperf_logging")


@pytest.fixture
def good(tmp_path):
    return records(write_good(tmp_path / "good.txt"))


@pytest.mark.parametrize("ruleset", checker.CLOSED_RULESETS)
@pytest.mark.parametrize(("benchmark", "global_batch_size"), [(PRETRAINING, 16), (PRETRAINING, 32), (LORA, 8), (LORA, 16)])
def test_a_good_log_passes_all_rounds(tmp_path, ruleset, benchmark, global_batch_size):
    path = write_good(tmp_path / "result.txt", benchmark.rules.CLOSED, global_batch_size)
    assert checker.closed_verdict(path, ruleset) == checker.Verdict(ruleset, True, ())
    assert lint(path, project_root=None) == []


EACH = pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)


@EACH
def test_a_miniature_passes_its_own_rules_and_no_closed_ones(tmp_path, benchmark):
    path = write_good(tmp_path / "result.txt", benchmark.rules.MINIATURE)
    assert checker.miniature_verdict(path, benchmark.rules.BENCHMARK).passed
    verdict = checker.closed_verdict(path, "6.1.0")
    assert not verdict.passed and "broke off without a verdict" in verdict.messages[0]


@pytest.mark.parametrize(("benchmark", "own"), [(PRETRAINING, ["max_steps"]), (LORA, [])])
def test_a_closed_log_is_no_miniature(tmp_path, benchmark, own):
    path = write_good(tmp_path / "good.txt", benchmark.rules.CLOSED)
    messages = " ".join(checker.miniature_verdict(path, benchmark.rules.BENCHMARK).messages)
    for key in ("submission_division", "max_sequence_length", "eval_samples", *own):
        assert f"'{key}'" in messages


def test_the_miniature_of_one_benchmark_is_not_that_of_the_other(tmp_path):
    path = write_good(tmp_path / "result.txt", LORA.rules.MINIATURE)
    assert "'submission_benchmark'" in " ".join(checker.miniature_verdict(path, PRETRAINING.rules.BENCHMARK).messages)
    with pytest.raises(ConfigError, match="no rules for a miniature of 'resnet'"):
        checker.miniature_verdict(path, "resnet")


@pytest.mark.parametrize(("benchmark", "closed_keys", "ours"), [(PRETRAINING, 38, 0), (LORA, 31, 7)])
def test_the_miniature_rules_demand_every_key_of_the_log_and_no_other(tmp_path, benchmark, closed_keys, ours):
    """So that a key which the closed rules demand cannot be forgotten in the miniature.

    `closed_keys` of the official 6.1.0 rules, the pair of eval_start and eval_stop, which is optional there, and `ours`, which the
    closed division fixes for LoRA but no checker wants: sequence length, optimizer, betas, epsilon, warm-up factor, dropout.
    """
    logged = {record["key"] for record in records(write_good(tmp_path / "result.txt", benchmark.rules.MINIATURE))}
    rule_lines = checker.miniature_rules(benchmark.rules.BENCHMARK).splitlines()
    demanded = [line.split()[-1] for line in rule_lines if line.strip().startswith("NAME:")]
    assert set(demanded) == logged - {"seed", "submission_status", "target_accuracy", "tracked_stats"}
    assert len(demanded) == len(set(demanded)) == closed_keys + 2 + ours


@EACH
def test_the_miniature_template_has_no_constant_of_its_own(benchmark):
    names = set(checker.miniature_template(benchmark.rules.BENCHMARK).get_identifiers())
    own = {"max_steps"} if benchmark is PRETRAINING else {"lora_rank", "lora_alpha", "lora_dropout"}
    assert {"sequence_length", "eval_samples", "target_loss", "init_limit_ms", *own} <= names
    assert f"v['value'] <= {benchmark.rules.MINIATURE.target_loss}" in checker.miniature_rules(benchmark.rules.BENCHMARK)


@pytest.mark.parametrize(
    ("benchmark", "key", "occurrence", "value"),
    [
        (PRETRAINING, "eval_accuracy", 3, rules.MINIATURE.target_loss + 1e-6),
        (PRETRAINING, "max_sequence_length", 0, 8192),
        (PRETRAINING, "opt_learning_rate_decay_steps", 0, 1_199_872),
        (PRETRAINING, "opt_adamw_beta_2", 0, 0.999),
        (PRETRAINING, "lowest_numerical_precision_in_comm", 0, "bf16"),
        (LORA, "lora_rank", 0, 8),
        (LORA, "lora_alpha", 0, 64),
        (LORA, "lora_dropout", 0, 0.0),
        (LORA, "opt_adamw_beta_2", 0, 0.95),
        (LORA, "opt_learning_rate_training_steps", 0, 0),
    ],
)
def test_the_miniature_rules_refuse_a_wrong_value(tmp_path, benchmark, key, occurrence, value):
    log = records(write_good(tmp_path / "result.txt", benchmark.rules.MINIATURE))
    log[find(log, key, occurrence)]["value"] = value
    assert not checker.miniature_verdict(write_records(tmp_path / "changed.txt", log), benchmark.rules.BENCHMARK).passed


def _set(key, value, occurrence=0):
    return lambda log: log[find(log, key, occurrence)].update(value=value)


def _shift_evaluations(log):
    for record in log:
        if "samples_count" in record["metadata"]:
            record["metadata"]["samples_count"] *= 2


def _one_step_behind(log):
    for record in log:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] -= 32


def _abort(log):
    log[-1]["metadata"]["status"] = "aborted"


def _move_back(log):
    log[find(log, "eval_start", 1)]["time_ms"] -= 10_000


def _late(log):
    for record in log[find(log, "init_stop") :]:
        record["time_ms"] += 31 * 60_000


# name, how it spoils the log, does the official checker (6.1.0, warnings as errors) let it pass, our rule
SPOILED = [
    ("evaluation interval", _shift_evaluations, True, "eval_interval"),
    (
        "skipped evaluation",
        lambda log: log.__delitem__(slice(find(log, "eval_start", 1), find(log, "block_start", 2))),
        True,
        "eval_interval",
    ),
    ("end learning rate", _set("opt_end_learning_rate", 8e-6), True, "learning_rate"),
    ("aborted though reached", _abort, True, "status"),
    ("one step behind", _one_step_behind, True, "samples_count"),
    ("no seed", lambda log: log.pop(find(log, "seed")), True, "missing"),
    ("two seeds", lambda log: log.insert(9, {**log[find(log, "seed")], "value": 7}), True, "repeated"),
    ("cache_clear false", _set("cache_clear", False), True, "cache_clear"),
    ("time goes back", _move_back, True, "time"),
    ("trained after the target", _set("eval_accuracy", 3.2, 1), True, "after_target"),
    ("NaN", _set("eval_accuracy", float("nan"), 1), True, "finite"),
    ("success without target", _set("eval_accuracy", 3.31, 3), False, "status"),
    ("word bf16", _set("lowest_numerical_precision_in_linear", "bf16"), False, "disclosure"),
    ("run_start twice", lambda log: log.insert(37, dict(log[find(log, "run_start")])), False, "repeated"),
    ("init 31 min", _late, False, "init_time"),
]


@pytest.mark.parametrize(("spoil", "official_passes", "rule"), [row[1:] for row in SPOILED], ids=[row[0] for row in SPOILED])
def test_what_the_official_checker_says_and_what_we_say(tmp_path, good, spoil, official_passes, rule):
    spoil(good)
    path = write_records(tmp_path / "changed.txt", good)
    assert checker.closed_verdict(path, "6.1.0").passed is official_passes
    assert rule in {finding.rule for finding in lint(path, project_root=None)}


# The same for LoRA at global batch 8; of the values that the rules fix, the official checker tests the rank only.
SPOILED_LORA = [
    ("alpha 64", _set("lora_alpha", 64), True, "constant"),
    ("clip 5", _set("opt_gradient_clip_norm", 5), True, "constant"),
    ("decay 0.1", _set("opt_adamw_weight_decay", 0.1), True, "constant"),
    ("rank 8", _set("lora_rank", 8), False, "constant"),
    ("no dropout", _set("lora_dropout", 0.0), True, "constant"),
    ("3900 sequences", _set("train_samples", 3900), True, "constant"),
    ("170 sequences evaluated", _set("eval_samples", 170), True, "constant"),
    ("target missed", _set("eval_accuracy", 0.92501, 3), False, "status"),
    ("one step behind", _one_step_behind, True, "samples_count"),
]
WRONG_EVALUATIONS = [  # global batch, evaluations
    ("first one too early", 8, [384, 768, 1152, 1536]),
    ("first one too late", 8, [1920, 2304]),
    ("first one at the sample of a smaller batch", 16, [1536, 1920, 2304]),
    ("interval of 768", 8, [1536, 2304, 3072]),
    ("interval of 192", 8, [1536, 1728, 1920]),
]


@pytest.mark.parametrize(("spoil", "official_passes", "rule"), [row[1:] for row in SPOILED_LORA], ids=[row[0] for row in SPOILED_LORA])
def test_what_the_official_checker_says_of_lora_and_what_we_say(tmp_path, spoil, official_passes, rule):
    log = records(write_good(tmp_path / "good.txt", LORA.rules.CLOSED))
    spoil(log)
    path = write_records(tmp_path / "changed.txt", log)
    assert checker.closed_verdict(path, "6.1.0").passed is official_passes
    assert rule in {finding.rule for finding in lint(path, project_root=None)}


@pytest.mark.parametrize(("global_batch_size", "counts"), [row[1:] for row in WRONG_EVALUATIONS], ids=[row[0] for row in WRONG_EVALUATIONS])
def test_only_we_see_that_lora_evaluates_at_wrong_samples(tmp_path, global_batch_size, counts):
    path = write_evaluations(tmp_path / "result.txt", LORA.rules.CLOSED, counts, global_batch_size)
    assert checker.closed_verdict(path, "6.1.0").passed
    assert {finding.rule for finding in lint(path, project_root=None)} == {"eval_interval"}


def test_only_6_1_demands_the_nine_keys(tmp_path, good):
    path = write_records(tmp_path / "changed.txt", [record for record in good if record["key"] not in DISCLOSURE_KEYS])
    assert [checker.closed_verdict(path, ruleset).passed for ruleset in checker.CLOSED_RULESETS] == [True, True, False]
    assert len([finding for finding in lint(path, project_root=None) if finding.rule == "missing"]) == len(DISCLOSURE_KEYS) == 9


def test_text_after_the_event_is_a_parse_error_there_too(tmp_path):
    path = write_good(tmp_path / "result.txt")
    path.write_text(path.read_text().replace("}\n", "} done\n", 1))
    verdict = checker.closed_verdict(path, "6.1.0")
    assert not verdict.passed and "Log lines had parsing errors." in verdict.messages


def test_without_the_official_checker_nothing_passes(tmp_path, good, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(PreflightError, match="not installed") as caught:
        checker.closed_verdict(tmp_path / "good.txt", "6.1.0")
    assert "pip install mlperf-logging" in caught.value.do
    assert check.main([str(tmp_path / "good.txt")]) == PreflightError.exit_code


def test_an_official_checker_from_before_6_1_is_refused(tmp_path, good, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.1.59")
    with pytest.raises(PreflightError, match="too old"):
        checker.closed_verdict(tmp_path / "good.txt", "6.1.0")


def test_check_prints_verdicts_and_findings(tmp_path, good, capsys):
    path = write_records(tmp_path / "changed.txt", good)
    assert check.main([str(path)]) == 20  # the config it names is in no configs/ of this project
    output = capsys.readouterr().out
    assert output.count("passed") == 3 and "config_filename" in output and "NOT CLEAN" in output


def test_check_is_clean_for_a_good_log(tmp_path, good, capsys, monkeypatch):
    monkeypatch.setattr(check.lint, "check_config_filename", lambda log, root: iter(()))
    assert check.main([str(tmp_path / "good.txt"), "--ruleset", "6.1.0"]) == 0
    output = capsys.readouterr().out
    assert output.count("passed") == 3 and "6.1.0      passed  <- asked for" in output
    assert "no findings" in output and output.endswith("\nCLEAN\n")


@EACH
def test_check_holds_a_miniature_to_its_own_rules_unless_asked_otherwise(tmp_path, capsys, monkeypatch, benchmark):
    monkeypatch.setattr(check.lint, "check_config_filename", lambda log, root: iter(()))
    path = write_good(tmp_path / "result.txt", benchmark.rules.MINIATURE)
    assert check.main([str(path)]) == 0 and "no benchmark result" in capsys.readouterr().out
    assert check.main([str(path), "--ruleset", "6.1.0"]) == 20


def test_an_earlier_ruleset_that_is_asked_for_decides(tmp_path, good, capsys, monkeypatch):
    monkeypatch.setattr(check.lint, "check_config_filename", lambda log, root: iter(()))
    path = write_records(tmp_path / "changed.txt", [record for record in good if record["key"] not in DISCLOSURE_KEYS])
    assert check.main([str(path), "--ruleset", "5.1.0"]) == 0
    output = capsys.readouterr().out
    assert "5.1.0      passed  <- asked for" in output and "6.1.0      FAILED" in output and output.count("(warning)") >= 9


@pytest.mark.parametrize("ruleset", ["4.1.0", "5.0.0", "6.1"])
def test_an_unknown_ruleset_is_a_usage_error_with_the_list(tmp_path, good, capsys, ruleset):
    assert check.main([str(tmp_path / "good.txt"), "--ruleset", ruleset]) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in (ruleset, *checker.CLOSED_RULESETS))


def test_a_missing_log_is_a_usage_error(tmp_path, capsys):
    assert check.main([str(tmp_path / "nothing.txt")]) == 2
    assert "no such log" in capsys.readouterr().err
