"""The command: what it takes, what it prints, how it ends."""

import errno
import gzip
import json
import math
import os
import re
import subprocess
import sys

import pytest
from log_dialects import DIALECTS, dated, write
from synthetic_run import (
    BENCHMARKS,
    LORA,
    PRETRAINING,
    find,
    project_root,
    records,
    write_good,
    write_records,
)

from common.command_line import PIPE_CLOSED
from common.errors import PreflightError, StorageError
from common.paths import ROOT
from submission import check, official_tools, score
from submission.examined_log import CLEAN, examine, verdict_of
from submission.log_rules import DISCLOSURE_KEYS

pytestmark = pytest.mark.quick

pytest.importorskip("mlperf_logging")
EACH = pytest.mark.parametrize(
    "benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK
)


def dialect(path, name, benchmark=PRETRAINING, spoil=None):
    change, options = DIALECTS[name]
    good = write_good(path.parent / f"good_{path.name}", benchmark.rules.CLOSED)
    log = change(records(good))
    good.unlink()
    if spoil:
        spoil(log)
    return write(path, log, **options)


def run(*paths, **options) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "submission.check", *map(str, paths)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, **options
    )


def test_a_finding_names_severity_file_line_rule_and_source(tmp_path, capsys):
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: log[find(log, "seed")].update(value="x"),
    )
    assert check.main([str(path)]) == 20
    output = capsys.readouterr().out
    assert re.search(r"error +result_0.txt:\d+ +seed +seed is 'x'.*\[SEED.*\]", output)
    for words in ("llama31_8b", "closed", "6.1.0", "official checker: passed"):
        assert words in output
    assert "NOT CLEAN: 1 error, 0 warnings" in output


def test_what_the_tools_accept_against_the_text_is_accepted_with_breaks(tmp_path, capsys):
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: log[find(log, "cache_clear")].update(value=False),
    )
    assert check.main([str(path)]) == 0
    output = capsys.readouterr().out
    assert re.search(
        r"warning +result_0.txt:1 +cache_clear +.*restarted.*\[TR Data State.*\]", output
    )
    assert re.search(r"ACCEPTED.* 1 warning", output)
    assert (
        check.main([str(path), "--werror"]) == 20
        and "NOT CLEAN: 1 error" in capsys.readouterr().out
    )


def test_a_note_leaves_a_log_clean(tmp_path, capsys):
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: [log[find(log, key)].update(value=value) for key, value in RATES],
    )
    assert check.main([str(path), "--werror"]) == 0
    output = capsys.readouterr().out
    assert (
        re.search(r"note +result_0.txt:\d+ +learning_rate", output)
        and "  CLEAN: 0 errors, 0 warnings" in output
    )


RATES = (("opt_base_learning_rate", 1e-3), ("opt_end_learning_rate", 1e-4))


def test_findings_for_programs(tmp_path, capsys):
    bad = dialect(
        tmp_path / "result_0.txt",
        "ours",
        spoil=lambda log: log[find(log, "cache_clear")].update(value=False),
    )
    good = dialect(tmp_path / "result_1.txt", "srun")
    accepted = dialect(
        tmp_path / "result_2.txt",
        "srun",
        spoil=lambda log: log[find(log, "cache_clear")].update(value=False),
    )
    assert check.main([str(bad), str(good), str(accepted), "--json"]) == 20
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["verdict"] for each in found] == ["NOT CLEAN", "CLEAN", "ACCEPTED"] and found[1][
        "path"
    ] == str(good)
    assert [each["clean"] for each in found] == [False, True, True]
    row = next(each for each in found[0]["findings"] if each["rule"] == "cache_clear")
    assert (row["line"], row["severity"], row["warning"]) == (1, "error", False)
    assert [(each["line"], each["severity"]) for each in found[2]["findings"]] == [(1, "warning")]


def test_a_good_log_is_clean(tmp_path, capsys):
    assert check.main([str(dialect(tmp_path / "result_0.txt", "srun"))]) == 0
    assert "  CLEAN: 0 errors, 0 warnings" in capsys.readouterr().out


# Dialect, keys that are left out, day of the run, and the round that keys and day show.
ROUNDS = [
    ("ours", (), "2026-03-01", "6.1.0"),
    ("ours", DISCLOSURE_KEYS[:4], "2026-03-01", "6.1.0"),
    ("srun", (), "2025-07-01", "6.1.0"),
    ("srun", DISCLOSURE_KEYS[:4], "2025-07-01", "6.0.0"),
    ("srun", DISCLOSURE_KEYS[:4], "2026-06-01", "6.1.0"),
    ("srun", DISCLOSURE_KEYS, "2024-05-10", "4.0.0"),  # the days of the deadlines
    ("srun", DISCLOSURE_KEYS, "2024-05-11", "4.1.0"),
    ("srun", DISCLOSURE_KEYS, "2025-05-02", "5.0.0"),
    ("srun", DISCLOSURE_KEYS, "2025-05-03", "5.1.0"),
    ("srun", DISCLOSURE_KEYS, "2025-10-10", "5.1.0"),
    ("srun", DISCLOSURE_KEYS, "2025-11-20", "6.0.0"),
    ("srun", DISCLOSURE_KEYS, "2026-05-15", "6.0.0"),
    ("srun", DISCLOSURE_KEYS, "2026-05-16", "6.1.0"),
    ("srun", DISCLOSURE_KEYS, "2026-11-23", "6.1.0"),
]


@pytest.mark.parametrize(("name", "without", "day", "ruleset"), ROUNDS)
def test_keys_and_date_show_the_round_unless_it_is_asked_for(tmp_path, name, without, day, ruleset):
    def spoil(log):
        log[:] = dated([record for record in log if record["key"] not in without], day)

    path = dialect(tmp_path / "result_0.txt", name, LORA, spoil)
    assert examine(path, project_root=None).verdict.rules == ruleset
    assert examine(path, "5.0.0", project_root=None).verdict.rules == "5.0.0"


@pytest.mark.parametrize("time_ms", [-1e12, 5, 1e300])
def test_a_log_without_a_plausible_date_shows_the_oldest_round_of_both_benchmarks(
    tmp_path, time_ms
):
    def spoil(log):
        log[find(log, "run_start")]["time_ms"] = time_ms

    path = dialect(tmp_path / "result_0.txt", "older", LORA, spoil)
    assert examine(path, project_root=None).verdict.rules == "5.1.0"
    # It does not decide the ruleset of a set.
    older = examine(path, project_root=None, set_rounds=["4.1.0"])
    assert older.verdict.rules == "4.1.0"


def test_a_run_after_all_deadlines_is_held_to_the_newest_ruleset(tmp_path):
    def after_all(log):
        log[:] = dated(log, "2026-11-23")

    done = run(dialect(tmp_path / "result_0.txt", "older", PRETRAINING, after_all))
    assert done.returncode == 20 and "Traceback" not in done.stderr
    assert all(f"{key} is missing" in done.stdout for key in DISCLOSURE_KEYS)
    assert "6.1.0" in done.stdout and "2026-10-16" in done.stdout and "past" in done.stdout
    before = run(dialect(tmp_path / "result_1.txt", "older", PRETRAINING))
    assert before.returncode == 0 and "past" not in before.stdout


def test_a_result_set_is_held_to_the_newest_round_of_its_logs(tmp_path, capsys):
    for number in range(10):
        good = write_good(tmp_path / "good.txt", LORA.rules.CLOSED, evaluations=5 + number % 3)
        log = dated(DIALECTS["srun"][0](records(good)), f"2026-05-{number + 1:02}")
        good.unlink()
        if number in (3, 7):  # logs of v6.0, whose deadline was on 2026-05-15
            log = [record for record in log if record["key"] not in DISCLOSURE_KEYS]
        log[find(log, "seed")]["value"] += number
        log[find(log, "run_stop")]["time_ms"] += 60_000 * (10 + number)
        write(tmp_path / f"result_{number}.txt", log)
    assert run(tmp_path / "result_3.txt").returncode == 0
    done = run(tmp_path)
    assert done.returncode == 20 and "8 clean, 0 accepted, 2 not clean" in done.stdout
    assert re.search(r"note .*round .*result_3.txt.* 6\.0\.0.* 6\.1\.0", done.stdout)
    older = run(tmp_path, "--ruleset", "6.0.0")
    assert older.returncode == 0 and "differ in round" in older.stdout
    assert score.main([str(tmp_path)]) == 20
    out = capsys.readouterr().out
    assert "differ in round" in out and "2 runs did not converge" in out
    assert score.main([str(tmp_path), "--ruleset", "6.0.0"]) == 0
    assert "differ in round" in capsys.readouterr().out


def test_werror_is_asked_for_and_said(tmp_path, capsys):
    path = dialect(
        tmp_path / "result_0.txt",
        "processes",
        spoil=lambda log: log.append(dict(log[find(log, "run_start")])),
    )
    assert check.main([str(path)]) == 0
    assert "1 warning" in capsys.readouterr().out
    assert check.main([str(path), "--werror"]) == 20
    assert "FAILED, 1 warning" in capsys.readouterr().out


@EACH
def test_a_miniature_is_held_to_its_own_rules_unless_asked_otherwise(tmp_path, capsys, benchmark):
    log = records(write_good(tmp_path / "good.txt", benchmark.rules.MINIATURE))
    log[find(log, "cache_clear")]["value"] = False  # honest: no root, nothing dropped
    path = write_records(tmp_path / "result.txt", log)
    assert check.main([str(path)]) == 0 and "a miniature" in capsys.readouterr().out
    assert check.main([str(path), "--ruleset", "6.1.0"]) == 20
    out = capsys.readouterr().out
    assert "6.1.0 has no rules for the miniature division" in out and "crashed" not in out
    assert "without --ruleset" in out
    closed = {(finding.line, finding.rule) for finding in examine(path, "6.1.0", None).findings}
    assert {(find(log, "submission_division") + 1, "constant"), (1, "cache_clear")} <= closed
    assert (find(log, "eval_accuracy") + 1, "eval_interval") in closed


def test_a_ruleset_without_the_benchmark_is_named(tmp_path, capsys):
    path = write_good(tmp_path / "result.txt", PRETRAINING.rules.CLOSED)
    assert check.main([str(path), "--ruleset", "4.0.0"]) == 20
    out = capsys.readouterr().out
    assert "4.0.0 has no rules for llama31_8b in the closed division" in out


def test_folders_and_several_logs(tmp_path, capsys):
    for run_name in ("a", "b"):
        (tmp_path / run_name).mkdir()
        dialect(tmp_path / run_name / "result.txt", "srun")
    other = dialect(
        tmp_path / "b" / "result_10.txt",
        "older",
        spoil=lambda log: log[find(log, "seed")].update(value="x"),
    )
    assert check.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 20
    output = capsys.readouterr().out
    assert (
        output.count("  CLEAN") == 2
        and output.count("NOT CLEAN: ") == 1
        and "3 logs: 2 clean, 0 accepted, 1 not clean" in output
    )
    other.write_bytes(gzip.compress(b"x"))
    assert check.main([str(tmp_path)]) == 2  # the others are still looked at
    said = capsys.readouterr()
    assert "compressed (gzip)" in said.err and said.out.count("  CLEAN") == 2


def test_a_power_folder_is_named_as_unchecked(tmp_path, capsys):
    dialect(tmp_path / "result_0.txt", "srun")
    (tmp_path / "power").mkdir()
    check.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert f"{tmp_path / 'power'} is not checked" in out and "By hand" in out


def test_logs_in_linked_folders_are_found_once(tmp_path, capsys):
    (tmp_path / "archive").mkdir()
    dialect(tmp_path / "archive" / "result.txt", "srun")
    (tmp_path / "results").mkdir()
    for name in ("run", "again"):
        (tmp_path / "results" / name).symlink_to(tmp_path / "archive")
    (tmp_path / "results/loop").symlink_to(tmp_path / "results")
    assert check.main([str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out.count("  CLEAN") == 1


JUNK = {
    "empty": (b"", "is empty"),
    "gzip": (gzip.compress(b":::MLLOG {}"), "compressed (gzip)"),
    "binary": (b"\x7fELF\0\0\0" * 99, "not an MLPerf log"),
    "text": (b"hello\n", "not an MLPerf log"),
}


@pytest.mark.parametrize("name", JUNK)
def test_what_is_no_log_is_one_clear_error(tmp_path, name):
    content, said = JUNK[name]
    path = tmp_path / "result_0.txt"
    path.write_bytes(content)
    done = run(path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


def test_deep_nesting_is_a_finding(tmp_path):
    # Python 3.12 reads 3,000.
    (tmp_path / "result_1.txt").write_text(":::MLLOG " + "[" * 40_000 + "\n")
    done = run(tmp_path)
    assert done.returncode == 20 and "Traceback" not in done.stderr
    assert "RecursionError" in done.stdout


@pytest.mark.parametrize("name", ["cr", "crlf"])
def test_a_byte_order_mark_and_other_line_ends_change_nothing(tmp_path, name):
    path = dialect(tmp_path / "result_0.txt", name)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert examine(path, project_root=None).findings == ()


def test_junk_never_crashes(tmp_path):
    counted = {
        "time_ms": 1,
        "event_type": "POINT_IN_TIME",
        "value": {"a": 1},
        "metadata": {"samples_count": "x", "status": 1},
    }
    keys = (
        "eval_accuracy",
        "block_start",
        "run_stop",
        "global_batch_size",
        "seed",
        "opt_base_learning_rate",
        "init_start",
        "init_stop",
    )
    keys += (
        "opt_learning_rate_decay_steps",
        "opt_learning_rate_training_steps",
        "opt_learning_rate_warmup_factor",
        "lora_rank",
        "lora_alpha",
    )
    for benchmark in BENCHMARKS:
        events = [[], 1, None, {"key": "seed"}, *({**counted, "key": key} for key in keys)]
        events += [{**counted, "key": "submission_benchmark", "value": benchmark.rules.BENCHMARK}]
        events += [
            {**counted, "key": "submission_division", "value": "closed"},
            {**counted, "key": "config_filename", "value": "A_1x8.toml"},
        ]
        path = write_records(tmp_path / "junk.txt", events)
        assert examine(path).errors()


def test_a_nul_byte_is_no_reason_to_refuse_what_the_official_tools_read(tmp_path):
    path = dialect(tmp_path / "result_0.txt", "srun")
    path.write_bytes(b"\0\0 a progress bar\n" + path.read_bytes())
    assert examine(path, project_root=None).findings == ()


@pytest.mark.parametrize("metadata", ["", None, [], 7])
def test_metadata_that_is_no_object_is_read_as_empty(tmp_path, metadata):
    """The official parser reads it in the same way: the record and its round count."""
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: log[find(log, "tensor_parallelism")].update(metadata=metadata),
    )
    examined = examine(path, project_root=None)
    assert examined.verdict.rules == "6.1.0" and examined.findings == ()


@pytest.mark.parametrize("time_ms", ["123", True, math.nan, math.inf])
@pytest.mark.parametrize("key", ["run_start", "run_stop", "init_start"])
def test_a_time_that_is_no_number_is_an_error_although_the_official_parser_takes_it(
    tmp_path, key, time_ms
):
    log = records(write_good(tmp_path / "good.txt", LORA.rules.CLOSED))
    log[find(log, "config_filename")]["value"] = "config.sh"  # a log of others
    log[find(log, key)]["time_ms"] = time_ms
    found = examine(write_records(tmp_path / "result_0.txt", log), project_root=None).errors()
    line = find(log, key) + 1
    assert [finding.line for finding in found if finding.rule == "line_format"] == [line]


def test_a_line_that_the_official_parser_refuses_is_reported_once(tmp_path):
    path = dialect(tmp_path / "result_0.txt", "srun")
    with path.open("a") as file:
        file.write(":::MLLOG {cut of\n")
    (finding,) = examine(path, project_root=None).errors()
    assert finding.rule == "line_format"


def test_an_evaluation_without_its_count_is_a_finding(tmp_path):
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: log[find(log, "eval_accuracy")].update(metadata=""),
    )
    assert "count" in [finding.rule for finding in examine(path, project_root=None).errors()]


def test_the_label_of_a_launcher_is_one_warning_in_a_log_of_ours(tmp_path, capsys):
    path = dialect(tmp_path / "result.txt", "ours", LORA)
    path.write_text("".join(f"0: {line}\n" for line in path.read_text().splitlines()))
    found = examine(path, project_root=None).findings
    assert [(finding.rule, finding.severity) for finding in found] == [
        ("line_format", "warning")
    ] and " more " in found[0].message


def test_two_swapped_lines_are_one_finding_each_with_a_count(tmp_path):
    def swap(log):
        first = find(log, "init_stop")
        log[first], log[first + 1] = log[first + 1], log[first]

    path = dialect(tmp_path / "result.txt", "ours", LORA, swap)
    rules = [finding.rule for finding in examine(path, project_root=None).findings]
    assert rules.count("order") == 1


def test_a_misnamed_disclosure_key_gets_the_nearest_name(tmp_path):
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: log[find(log, "tensor_parallelism")].update(key="tensor_paralelism"),
    )
    messages = [
        finding.message
        for finding in examine(path, project_root=None).findings
        if finding.rule == "disclosure"
    ]
    assert len(messages) == 1
    assert "tensor_paralelism" in messages[0] and "tensor_parallelism" in messages[0]


def test_disclosure_keys_that_the_round_does_not_require_are_notes(tmp_path):
    """Primus logged the precision of v6.0 under another name, and not that of the others."""

    def spoil(log):
        log[find(log, "lowest_numerical_precision_in_linear")]["key"] = (
            "lowest_numerical_precision_linear"
        )
        missing = ("lowest_numerical_precision_in_attn", "lowest_numerical_precision_in_comm")
        log[:] = dated([row for row in log if row["key"] not in missing], "2026-05-01")

    examined = examine(dialect(tmp_path / "result_0.txt", "srun", LORA, spoil), project_root=None)
    assert examined.verdict.rules == "6.0.0" and verdict_of(examined.findings) == CLEAN
    listing, hint = (finding.message for finding in examined.findings)
    assert all(f"lowest_numerical_precision_in_{each}" in listing for each in ("attn", "comm"))
    assert "did you mean lowest_numerical_precision_in_linear" in hint


def test_a_closed_pipe_is_no_traceback(tmp_path):
    for number in range(3):
        dialect(
            tmp_path / f"result_{number}.txt", "older", LORA, lambda log: log.extend([log[0]] * 400)
        )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "submission.check", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (
        "Traceback" not in said
        and "closed the output" in said
        and process.returncode == PIPE_CLOSED
    )


def test_check_imports_no_torch(tmp_path):
    path = dialect(tmp_path / "result_0.txt", "srun")
    code = (
        f"import sys; from submission import check; code = check.main([{str(path)!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60
        ).returncode
        == 0
    )


@pytest.mark.parametrize("ruleset", ["3.1.0", "9.1"])
def test_an_unknown_ruleset_is_a_usage_error_with_the_list(tmp_path, capsys, ruleset):
    assert check.main([str(tmp_path / "x.txt"), "--ruleset", ruleset]) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in (ruleset, *official_tools.RULESETS))


def test_what_is_not_there_is_a_usage_error(tmp_path, capsys):
    assert (
        check.main([str(tmp_path / "nothing.txt")]) == 2
        and "cannot read" in capsys.readouterr().err
    )
    assert check.main([str(tmp_path)]) == 2 and "no log" in capsys.readouterr().err


@pytest.mark.parametrize("unreadable", ["result.txt", "events.jsonl", "the official checker's"])
def test_a_disk_error_is_neither_a_finding_nor_a_usage_error(
    tmp_path, monkeypatch, capsys, unreadable
):
    from mlperf_logging.compliance_checker import mlp_compliance

    path = write_good(tmp_path / "result.txt")
    (tmp_path / "events.jsonl").write_text("{}\n")

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    if "checker" in unreadable:
        monkeypatch.setattr(mlp_compliance, "main", fail)
    else:
        (tmp_path / unreadable).unlink()
        (tmp_path / unreadable).symlink_to("/proc/self/mem")  # whose first byte gives EIO
    assert check.main([str(path)]) == StorageError.exit_code
    assert str(tmp_path) in capsys.readouterr().err


def test_without_the_official_checker_it_ends_with_its_own_code(tmp_path, monkeypatch, capsys):
    def missing():
        raise PreflightError("the official compliance checker is not installed", "", "")

    monkeypatch.setattr(official_tools, "checker_version", missing)
    assert check.main([str(write_good(tmp_path / "result.txt"))]) == PreflightError.exit_code


def test_an_unknown_benchmark_is_left_to_the_official_checker(tmp_path):
    path = dialect(
        tmp_path / "result_0.txt",
        "srun",
        spoil=lambda log: log[find(log, "submission_benchmark")].update(value="flux1"),
    )
    examined = examine(path, project_root=None)
    assert ("benchmark", "note") in {
        (finding.rule, finding.severity) for finding in examined.findings
    } and not examined.verdict.passed


def test_the_config_that_a_log_of_ours_names_must_be_in_the_project(tmp_path):
    path = write_good(tmp_path / "result.txt")
    assert examine(path, project_root=project_root(tmp_path)).findings == ()
    # A_TEST_1x8.toml.
    assert [finding.rule for finding in examine(path).findings] == ["config_filename"]
