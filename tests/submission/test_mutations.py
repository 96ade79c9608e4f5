"""Every way to spoil a log that was seen to mislead an official tool, made from a good log: `check` names line, rule and source.

The official checker is told to pass everything here: what it says itself stands in test_checker.py, and our own checks must not
need its help.
"""

import pytest
from synthetic_log import BENCHMARKS, LORA, PRETRAINING, find, project_root, records, write_good, write_records

from common.training.mllog import TOKEN
from submission import check, checker, lint
from submission.lint import DISCLOSURE_KEYS


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


def status_aborted(log):
    log[-1]["metadata"]["status"] = "aborted"
    return len(log)


def evaluations_one_step_behind(log):
    step = log[find(log, "global_batch_size")]["value"]
    for record in log:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] -= step
    return find(log, "eval_accuracy") + 1


def nan_after_the_target(log):
    """One more block and evaluation after the one that reached the target."""
    first = len(log) - 1 - log[::-1].index(next(r for r in reversed(log) if r["key"] == "block_start"))
    again = [{**record, "time_ms": log[-2]["time_ms"]} for record in log[first:-1]]
    log[-1:-1] = again
    index = len(log) - 1 - next(i for i, record in enumerate(reversed(log)) if record["key"] == "eval_accuracy")
    log[index]["value"] = float("nan")
    return index + 1


def init_of_31_minutes(log):
    stop = find(log, "init_stop")
    for record in log[stop:]:
        record["time_ms"] += 31 * 60_000
    return stop + 1


def swap_seed_file(log):
    log[find(log, "seed")]["metadata"].pop("file")
    return find(log, "seed") + 1


def two_runs_in_one_file(log):
    first = len(log)
    log += [{**record, "time_ms": record["time_ms"] + 3_600_000} for record in log]
    return first + find(log[:first], "run_start") + 1


custom = {"key": "tracked_stats", "event_type": "POINT_IN_TIME", "metadata": {"samples_count": 0}}
COMMON, RCP, TR, LOG = "CC common.yaml", "RCP rcp_checker.py", "TR", "LOG"
# what, how (returns the line), rule, where the rule stands (its beginning)
MUTATIONS = [
    ("precision word bf16", put("lowest_numerical_precision_in_linear", "bf16"), "disclosure", COMMON),
    ("run_stop aborted though the target was reached", status_aborted, "status", "TR Run Results"),
    ("run_stop missing", drop("run_stop"), "missing", COMMON),
    ("NaN at the last evaluation", put("eval_accuracy", float("nan"), 3), "finite", LOG),
    ("NaN after the target", nan_after_the_target, "finite", LOG),
    ("run_start twice, same value", insert_after("run_start"), "repeated", COMMON),
    ("cache_clear false", put("cache_clear", False), "cache_clear", "TR Data State"),
    ("cache_clear absent", drop("cache_clear"), "missing", COMMON),
    ("train_samples absent", drop("train_samples"), "missing", TR),
    ("init of 31 minutes", init_of_31_minutes, "init_time", "TR Run Results"),
    ("custom key that names the batch", insert_after("run_start", **custom, value={"global_batch_size_note": 7}), "reserved_word", RCP),
    ("custom key that names the loss", insert_after("run_start", **custom, value={"best_eval_accuracy": 7}), "reserved_word", RCP),
    ("custom key of its own that names it", insert_after("run_start", **custom | {"key": "my_eval_error"}), "reserved_word", RCP),
    ("evaluation as a text", put("eval_accuracy", "3.9", 1), "eval_value", "CC eval_accuracy"),
    ("two runs in one file", two_runs_in_one_file, "repeated", COMMON),
    ("samples_count one step behind", evaluations_one_step_behind, "samples_count", "TR RCP Rules"),
    ("seed of 15 bits as a text", put("seed", "31415"), "seed", "SEED"),
    ("seed without its line of code", swap_seed_file, "seed", "SEED"),
    ("config changed with --set", put("config_filename", "A_TEST_1x8+modified.toml"), "config_filename", "TR mandatory"),
    ("config of another GPU", put("config_filename", "A_TEST_1x8+forced.toml"), "config_filename", "TR mandatory"),
    *((f"{key} absent", drop(key), "missing", COMMON) for key in DISCLOSURE_KEYS),
]
# The same for the lines of the file: how line n becomes another one.
LINES = [
    ("text after the JSON", "{line} done"),
    ("text before the token", "rank 0: {line}"),
    ("a second event on the line", "{line}{line}"),
    ("cut in the middle", "{cut}"),
    ("the token before something else", TOKEN + "load_state_dict"),
]


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Call `check` on a log in a project that has the config the log names: exit code and what it printed."""
    monkeypatch.setattr(checker, "checker_version", lambda: "4.1.68")
    monkeypatch.setattr(checker, "closed_verdict", lambda path, ruleset: checker.Verdict(ruleset, True, ()))
    ours, root = lint.lint, project_root(tmp_path)
    monkeypatch.setattr(check.lint, "lint", lambda path, division=None: ours(path, division, project_root=root))

    def call(path):
        code = check.main([str(path)])
        return code, capsys.readouterr().out

    return call


def refused(answer: tuple[int, str], line: int, rule: str, source: str) -> bool:
    """Is there a row that begins with this line and rule, and says where the rule stands?"""
    code, text = answer
    rows = [row for row in text.splitlines() if row.split()[:2] == [str(line or "-"), rule] and "(warning)" not in row]
    return code == 20 and text.endswith("NOT CLEAN\n") and any(source in row for row in rows)


EACH = pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)


@EACH
def test_the_good_log_is_accepted(tmp_path, checked, benchmark):
    code, text = checked(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED))
    assert code == 0 and "no findings" in text and text.endswith("\nCLEAN\n")


@EACH
@pytest.mark.parametrize(("spoil", "rule", "source"), [row[1:] for row in MUTATIONS], ids=[row[0] for row in MUTATIONS])
def test_a_spoiled_log_is_refused(tmp_path, checked, benchmark, spoil, rule, source):
    log = records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED))
    line = spoil(log)
    answer = checked(write_records(tmp_path / "spoiled.txt", log))
    assert refused(answer, line, rule, source), answer[1]


@EACH
@pytest.mark.parametrize("spoil", [row[1] for row in LINES], ids=[row[0] for row in LINES])
@pytest.mark.parametrize("key", ["eval_stop", "run_stop"])
def test_a_spoiled_line_is_refused(tmp_path, checked, benchmark, key, spoil):
    path = write_good(tmp_path / "spoiled.txt", benchmark.rules.CLOSED)
    lines, index = path.read_text().splitlines(), find(records(path), key)
    lines[index] = spoil.format(line=lines[index], cut=lines[index][:60])
    path.write_text("\n".join(lines) + "\n")
    answer = checked(path)
    assert refused(answer, index + 1, "line_format", "CC mlp_parser"), answer[1]


@pytest.mark.parametrize("seed", [0, 1, 42, 1234, 2**15 - 1, 1234567, 2**32 - 1])
def test_a_seed_that_looks_chosen_is_a_warning(tmp_path, checked, seed):
    log = records(write_good(tmp_path / "good.txt"))
    line = put("seed", seed)(log)
    code, text = checked(write_records(tmp_path / "spoiled.txt", log))
    assert code == 0 and [row.split()[:3] for row in text.splitlines() if "warning" in row] == [[str(line), "seed", "(warning)"]]


@pytest.mark.parametrize("benchmark", [PRETRAINING, LORA], ids=["8b", "lora"])
def test_a_changed_config_is_refused_without_a_project_to_look_into(tmp_path, benchmark):
    log = records(write_good(tmp_path / "good.txt", benchmark.rules.CLOSED))
    line = put("config_filename", "H200_1x8+modified.toml")(log)
    findings = lint.lint(write_records(tmp_path / "spoiled.txt", log), project_root=None)
    assert [(finding.line, finding.rule) for finding in findings] == [(line, "config_filename")]
