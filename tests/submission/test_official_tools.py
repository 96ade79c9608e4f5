"""Test the compliance checker in this process: its findings by line and rule, and its crashes."""

import importlib.metadata
import importlib.resources
import json
import logging
import subprocess
import sys

import pytest
from log_dialects import DIALECTS, write
from synthetic_run import (
    BENCHMARKS,
    LORA,
    PRETRAINING,
    find,
    records,
    write_evaluations,
    write_good,
    write_records,
)

from common import benchmarks
from common.errors import PreflightError
from llama31_8b import rules
from submission import compliance_checker, official_tools
from submission.examined_log import examine
from submission.log_rules import DISCLOSURE_KEYS

pytestmark = pytest.mark.quick

pytest.importorskip("mlperf_logging")
yaml = pytest.importorskip("yaml")


def miniature_rules(benchmark):
    """Return the text of the rule file of the benchmark's miniature."""
    return compliance_checker.rule_file(benchmark.rules.BENCHMARK, benchmark.rules.MINIATURE)


def miniature_verdict(path, name):
    """Return the verdict on a log by the rules of the miniature of the benchmark `name`."""
    return compliance_checker.own_verdict(path, name, benchmarks.divisions(name)["miniature"])


@pytest.mark.parametrize("ruleset", official_tools.CLOSED_RULESETS)
@pytest.mark.parametrize(
    ("benchmark", "global_batch_size"),
    [(PRETRAINING, 16), (PRETRAINING, 32), (LORA, 8), (LORA, 16)],
)
def test_a_good_log_passes_all_rounds(tmp_path, ruleset, benchmark, global_batch_size):
    path = write_good(tmp_path / "result.txt", benchmark.rules.CLOSED, global_batch_size)
    assert compliance_checker.closed_verdict(path, ruleset) == compliance_checker.LogVerdict(
        ruleset, True
    )


EACH = pytest.mark.parametrize(
    "benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK
)


@EACH
def test_a_miniature_passes_its_own_rules_and_no_closed_ones(tmp_path, benchmark):
    path = write_good(tmp_path / "result.txt", benchmark.rules.MINIATURE)
    assert miniature_verdict(path, benchmark.rules.BENCHMARK).passed
    verdict = compliance_checker.closed_verdict(path, "6.1.0")
    assert not verdict.passed and [complaint.rule for complaint in verdict.complaints] == [
        "broke_off"
    ]


@pytest.mark.parametrize(("benchmark", "own"), [(PRETRAINING, ["max_steps"]), (LORA, [])])
def test_a_closed_log_is_no_miniature(tmp_path, benchmark, own):
    path = write_good(tmp_path / "good.txt", benchmark.rules.CLOSED)
    messages = " ".join(miniature_verdict(path, benchmark.rules.BENCHMARK).messages)
    for key in ("submission_division", "max_sequence_length", "eval_samples", *own):
        assert f"{key} is" in messages


def test_the_miniature_of_one_benchmark_is_not_that_of_the_other(tmp_path):
    path = write_good(tmp_path / "result.txt", LORA.rules.MINIATURE)
    assert "submission_benchmark is" in " ".join(
        miniature_verdict(path, PRETRAINING.rules.BENCHMARK).messages
    )


@pytest.mark.parametrize(
    ("benchmark", "closed_keys", "ours"), [(PRETRAINING, 38, 0), (LORA, 31, 7)]
)
def test_the_miniature_rules_demand_every_key_of_the_log_and_no_other(
    tmp_path, benchmark, closed_keys, ours
):
    """So that a key which the closed rules demand cannot be forgotten in the miniature.

    `closed_keys` of the official 6.1.0 rules, the pair of eval_start and eval_stop, which is
    optional there, and `ours`, which the closed division fixes for LoRA but no checker wants:
    sequence length, optimizer, betas, epsilon, warm-up factor, dropout.
    """
    logged = {
        record["key"]
        for record in records(write_good(tmp_path / "result.txt", benchmark.rules.MINIATURE))
    }
    entries = yaml.safe_load(miniature_rules(benchmark))
    demanded = [entry["KEY"]["NAME"] for entry in entries if "KEY" in entry]
    assert set(demanded) == logged - {
        "seed",
        "submission_status",
        "target_accuracy",
        "tracked_stats",
    }
    assert len(demanded) == len(set(demanded)) == closed_keys + 2 + ours


@EACH
def test_the_miniature_template_has_no_constant_of_its_own(benchmark):
    names = set(
        compliance_checker.rule_template(benchmark.rules.BENCHMARK, "miniature").get_identifiers()
    )
    own = {"max_steps"} if benchmark is PRETRAINING else {"lora_rank", "lora_alpha", "lora_dropout"}
    assert {"sequence_length", "eval_samples", "target_loss", "init_limit_ms", *own} <= names
    assert f"v['value'] <= {benchmark.rules.MINIATURE.target_loss}" in miniature_rules(benchmark)


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
    assert not miniature_verdict(
        write_records(tmp_path / "changed.txt", log), benchmark.rules.BENCHMARK
    ).passed


def as_a_program(path, ruleset, folder) -> bool:
    command = [
        sys.executable,
        "-m",
        "mlperf_logging.compliance_checker",
        "--ruleset",
        ruleset,
        str(path),
    ]
    return subprocess.run(command, capture_output=True, cwd=folder, timeout=60).returncode == 0


def spoil_none(log):
    pass


def spoil_key(log):
    log[find(log, "opt_gradient_clip_norm")]["value"] = "high"


def spoil_metadata(log):
    log[find(log, "run_stop")].pop("metadata")


def spoil_division(log):
    log[find(log, "submission_division")]["value"] = "Closed"


def repeat(log):
    log.append(dict(log[find(log, "run_start")]))


@pytest.mark.parametrize("dialect", ["ours", "processes", "cr"])
@pytest.mark.parametrize("spoil", [spoil_none, spoil_key, spoil_metadata, spoil_division, repeat])
def test_the_verdict_is_that_of_the_program(tmp_path, dialect, spoil):
    change, options = DIALECTS[dialect]
    log = change(records(write_good(tmp_path / "good.txt")))
    spoil(log)
    path = write(tmp_path / "result_0.txt", log, **options)
    assert compliance_checker.closed_verdict(path, "6.0.0").passed is as_a_program(
        path, "6.0.0", tmp_path
    )


@pytest.mark.parametrize("dialect", ["ours", "processes"])
def test_a_complaint_names_the_line_of_the_file(tmp_path, dialect):
    change, options = DIALECTS[dialect]
    log = change(records(write_good(tmp_path / "good.txt")))
    log[find(log, "max_steps")]["value"] = 7
    path = write(tmp_path / "result_0.txt", log, **options)
    (complaint,) = [
        c for c in compliance_checker.closed_verdict(path, "6.0.0").complaints if not c.warning
    ]
    line = next(
        number
        for number, text in enumerate(path.read_bytes().decode().split("\n"), start=1)
        if '"max_steps"' in text
    )
    assert (
        (complaint.line, complaint.rule) == (line, "value")
        and "max_steps is 7" in complaint.message
        and "1200000" in complaint.message
    )
    assert complaint.source == "CC training_6.0.0/closed_llama31_8b.yaml"


@pytest.mark.slow
def test_a_recursion_error_in_the_checker_is_its_refusal(tmp_path):
    path = write_good(tmp_path / "result_0.txt")
    deep = (
        '{"namespace": "", "time_ms": 1, "event_type": "", "key": "x", "value": '
        + "[" * 40_000
        + "]" * 40_000
        + ', "metadata": {}}'
    )
    path.write_text(path.read_text() + ":::MLLOG " + deep + "\n")
    examined = examine(path, project_root=None)
    assert not examined.verdict.passed and "RecursionError" in examined.verdict.messages[0]
    good = write_good(tmp_path / "result_1.txt")
    assert compliance_checker.closed_verdict(good, "6.1.0").passed  # nothing is left of the crash


def test_the_checker_prints_nothing_and_leaves_the_root_logger_as_it_was(tmp_path, capfd):
    before = list(logging.getLogger().handlers)
    log = records(write_good(tmp_path / "good.txt"))
    capfd.readouterr()
    del log[find(log, "max_steps")]
    path = write_records(tmp_path / "result_0.txt", log)
    path.write_text(path.read_text() + ":::MLLOG no record\n")
    assert {
        complaint.rule for complaint in compliance_checker.closed_verdict(path, "6.1.0").complaints
    } == {"missing", "line_format"}
    assert capfd.readouterr() == ("", "") and logging.getLogger().handlers == before


def test_only_6_1_demands_the_nine_keys(tmp_path):
    log = records(write_good(tmp_path / "good.txt"))
    path = write_records(
        tmp_path / "changed.txt", [record for record in log if record["key"] not in DISCLOSURE_KEYS]
    )
    verdicts = [
        compliance_checker.closed_verdict(path, ruleset)
        for ruleset in official_tools.CLOSED_RULESETS
    ]
    assert [verdict.passed for verdict in verdicts] == [True, True, False]
    assert [complaint.rule for complaint in verdicts[-1].complaints] == ["missing"] * len(
        DISCLOSURE_KEYS
    )


WRONG_EVALUATIONS = [  # global batch, evaluations
    ("first one too early", 8, [384, 768, 1152, 1536]),
    ("first one too late", 8, [1920, 2304]),
    ("first one at the sample of a smaller batch", 16, [1536, 1920, 2304]),
    ("interval of 768", 8, [1536, 2304, 3072]),
    ("interval of 192", 8, [1536, 1728, 1920]),
]


@pytest.mark.parametrize(
    ("global_batch_size", "counts"),
    [row[1:] for row in WRONG_EVALUATIONS],
    ids=[row[0] for row in WRONG_EVALUATIONS],
)
def test_only_we_see_that_lora_evaluates_at_wrong_samples(tmp_path, global_batch_size, counts):
    path = write_evaluations(tmp_path / "result.txt", LORA.rules.CLOSED, counts, global_batch_size)
    examined = examine(path, project_root=None)
    assert examined.verdict.passed and [finding.rule for finding in examined.findings] == [
        "eval_interval"
    ]


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_the_reference_schedules_are_those_of_the_installed_files(benchmark):
    from mlperf_logging import rcp_checker

    name = benchmark.rules.BENCHMARK
    folder = importlib.resources.files(rcp_checker)
    for ruleset in official_tools.CLOSED_RULESETS:
        points = json.loads(
            (folder / f"training_{ruleset}" / f"rcps_{name}.json").read_text()
        ).values()
        keys = {point["BS"]: point["Hyperparams"] for point in points}
        rates = {batch: own["opt_base_learning_rate"] for batch, own in keys.items()}
        assert rates == benchmark.rules.CLOSED.reference_learning_rates
        warmup = "opt_learning_rate_warmup_samples"
        samples = {batch: own[warmup] for batch, own in keys.items() if warmup in own}
        assert samples == benchmark.rules.CLOSED.reference_warmup_samples


def test_without_the_official_checker_nothing_passes(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    path = write_good(tmp_path / "good.txt")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(PreflightError, match="not installed") as caught:
        compliance_checker.closed_verdict(path, "6.1.0")
    assert "pip install mlperf-logging" in caught.value.do


def test_an_official_checker_from_before_6_1_is_refused(tmp_path, monkeypatch):
    path = write_good(tmp_path / "good.txt")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.1.59")
    with pytest.raises(PreflightError, match="too old"):
        compliance_checker.closed_verdict(path, "6.1.0")
