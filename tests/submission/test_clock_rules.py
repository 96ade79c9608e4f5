"""Rules about the clock, and about a result set as a whole, on logs of others and of ours."""

import json
import re

import pytest
from log_dialects import srun
from synthetic_run import (
    BENCHMARKS,
    LORA,
    PRETRAINING,
    evaluate,
    find,
    records,
    start,
    write_good,
    write_records,
)

from submission import check, official_tools, result_set
from submission.examined_log import examine

pytest.importorskip("mlperf_logging")


def of_others(tmp_path, change=lambda log: None, benchmark=LORA, name="result_0.txt"):
    log = srun(records(write_good(tmp_path / f"good_{name}", benchmark.rules.CLOSED)))
    (tmp_path / f"good_{name}").unlink()
    change(log)
    return write_records(tmp_path / name, log)


def found(path, ours=None) -> dict[str, str]:
    return {
        finding.rule: finding.severity
        for finding in examine(path, project_root=None, ours=ours).findings
    }


def stop_first(log):
    stop = log.pop(find(log, "run_stop"))
    log.insert(find(log, "eval_accuracy", 3), stop)


def stop_earlier(log):
    log[find(log, "run_stop")]["time_ms"] = log[find(log, "eval_accuracy", 3)]["time_ms"] - 1001


def start_again(log):
    first = find(log, "run_start")
    log.insert(first + 1, {**log[first], "time_ms": log[first]["time_ms"] + 5})


def seconds(log):
    log[find(log, "run_start")]["time_ms"] /= 1000


def other_target(log):
    log.append({**log[find(log, "seed")], "key": "target_accuracy", "value": 0.95})


def again_until_it_passes(log):
    last = find(log, "eval_accuracy", 3)
    log.insert(last, {**log[last], "value": 0.99})


BREAKS = {
    "run_stop": (stop_first, stop_earlier),
    "run_start": (start_again,),
    "clock": (seconds,),
    "constant": (other_target,),
    "repeated": (again_until_it_passes,),
}


@pytest.mark.parametrize(
    ("rule", "change"), [(rule, change) for rule, changes in BREAKS.items() for change in changes]
)
def test_a_break_of_the_clock_is_an_error_in_anybody_s_log(tmp_path, rule, change):
    assert found(of_others(tmp_path)) == {}
    path = of_others(tmp_path, change)
    assert found(path)[rule] == "error" and check.main([str(path)]) == 20


def test_lines_within_a_second_of_each_other_are_no_break(tmp_path):
    def change(log):
        log[find(log, "run_stop")]["time_ms"] = log[find(log, "eval_accuracy", 3)]["time_ms"] - 999

    assert found(of_others(tmp_path, change)) == {}


def later_start(late_s):
    """Move run_start, and all after it, to `late_s` seconds after init_stop."""

    def change(log):
        begin = find(log, "run_start")
        moved_ms = log[find(log, "init_stop")]["time_ms"] + late_s * 1000 - log[begin]["time_ms"]
        for record in log[begin:]:
            record["time_ms"] += moved_ms

    return change


@pytest.mark.parametrize(("late_s", "expected"), [(60, None), (61, "note"), (1700, "note")])
@pytest.mark.parametrize("ours", [None, True])
def test_a_pause_before_the_clock_is_a_note(tmp_path, late_s, ours, expected):
    severities = found(of_others(tmp_path, later_start(late_s)), ours)
    assert severities.get("pause") == expected and "late_start" not in severities


def test_the_initialization_ends_with_the_start_of_the_clock(tmp_path):
    """init_stop alone is within the 30 minutes, which is all that the official checker tests."""

    def change(log):
        stop = find(log, "init_stop")
        for record in log[stop:]:
            record["time_ms"] += 1_799_000
        later_start(2)(log)

    path = of_others(tmp_path, change)
    assert found(path) == {"late_start": "error"} and found(path, True)["late_start"] == "error"
    assert check.main([str(path)]) == 20


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.rules.BENCHMARK)
def test_breaks_of_the_text_that_were_accepted_are_warnings_for_others_and_errors_for_us(
    tmp_path, benchmark
):
    batch = 32 if benchmark is PRETRAINING else 8

    def short(log):
        for record in log:
            if record["key"] == "eval_accuracy":
                record["metadata"]["samples_count"] -= batch

    def short_and_one_before(log):
        short(log)
        first = find(log, "eval_accuracy")
        log.insert(first, {**log[first], "value": 9.0, "metadata": {"samples_count": batch}})

    for change in (short, short_and_one_before):
        path = of_others(tmp_path, change, benchmark)
        assert found(path) == {"samples_count": "warning"}
        assert found(path, ours=True)["samples_count"] == "error"


def test_a_wrong_interval_says_what_it_may_gain(tmp_path):
    for counts, words in (((384, 768), "earlier"), ((3072, 3456), "saves 4 evaluations")):
        path = tmp_path / f"result_{counts[0]}.txt"
        log = start(path, LORA.rules.CLOSED)
        before = 0
        for count in counts:
            log.block_start(before)
            log.block_stop(count)
            evaluate(log, count, 0.9 if count == counts[-1] else 1.0)
            before = count
        log.run_stop(before, "success")
        others = write_records(path, srun(records(path)))
        (finding,) = examine(others, project_root=None).findings
        assert (finding.rule, finding.severity) == (
            "eval_interval",
            "warning",
        ) and words in finding.message


# A result set.


def test_a_second_run_stop_that_the_rcp_checker_reads_is_an_error(tmp_path):
    def abort_again(log):
        stop = log[find(log, "run_stop")]
        log.append({**stop, "metadata": {**stop["metadata"], "status": "aborted"}})

    assert found(of_others(tmp_path, abort_again)).get("status") == "error"


def seeded(seed):
    def change(log):
        log[find(log, "seed")]["value"] = seed

    return change


def write_set(folder, seeds):
    folder.mkdir()
    for index, seed in enumerate(seeds):
        of_others(folder, seeded(seed), name=f"result_{index}.txt")
    return folder


def test_a_set_of_ten_with_ten_seeds_is_clean(tmp_path, capsys):
    assert check.main([str(write_set(tmp_path / "set", range(10)))]) == 0
    assert "10 logs: 10 clean" in capsys.readouterr().out


def test_equal_seeds_and_a_wrong_number_of_logs_fail_the_set(tmp_path, capsys):
    folder = write_set(tmp_path / "set", [1, 2, 3, 2])
    assert check.main([str(folder)]) == 20
    printed = capsys.readouterr().out
    assert "4 logs" in printed
    assert re.search(r"result_1\.txt and result_3\.txt .*seed 2\b", printed)
    assert check.main([str(folder / "result_0.txt")]) == 0, "a log by name is no set"


def change_log(folder, number, change):
    path = folder / f"result_{number}.txt"
    log = records(path)
    change(log)
    write_records(path, log)


def set_findings(folder):
    examined = [examine(path, project_root=None) for path in sorted(folder.glob("result_*.txt"))]
    return result_set.findings(examined)


def put(key, value):
    return lambda log: log[find(log, key)].update(value=value)


DIFFERENT = [
    ("global_batch_size", 16, "error"),
    ("submission_benchmark", "llama31_8b", "error"),
    ("opt_base_learning_rate", 1e-4, "error"),
    ("gradient_accumulation_steps", 2, "error"),
    ("lowest_numerical_precision_in_linear", "fp8", "error"),
    ("config_filename", "other.sh", "error"),
    ("submission_platform", "another system", "warning"),
]


@pytest.mark.parametrize(("key", "value", "severity"), DIFFERENT)
def test_logs_of_a_set_that_differ_are_found(tmp_path, key, value, severity):
    folder = write_set(tmp_path / "set", range(10))
    change_log(folder, 4, put(key, value))
    (finding,) = set_findings(folder)
    assert (finding.rule, finding.severity) == ("different", severity)
    assert key in finding.message and "result_4.txt" in finding.message


def miss(log):
    log[find(log, "eval_accuracy", 3)]["value"] = 1.0
    log[find(log, "run_stop")]["metadata"]["status"] = "aborted"


def never_end(log):
    del log[find(log, "run_stop") :]


def name_no_organization(log):
    log.pop(find(log, "submission_org"))


@pytest.mark.parametrize("fail", [miss, never_end, name_no_organization])
def test_one_of_ten_runs_may_fail(tmp_path, capsys, fail):
    folder = write_set(tmp_path / "set", range(10))
    change_log(folder, 3, fail)
    assert check.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "1 of 10" in out and "not converged" in out and "(result_3.txt)" in out
    assert check.main([str(folder / "result_3.txt")]) == 20, "alone, it is no result"
    capsys.readouterr()
    change_log(folder, 5, fail)
    assert check.main([str(folder), "--json"]) == 20
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verdict["verdict"] == "NOT CLEAN"
    assert verdict["not_converged"] == ["result_3.txt", "result_5.txt"]


def test_a_run_that_the_official_tools_count_may_break_no_rule(tmp_path):
    folder = write_set(tmp_path / "set", range(10))
    change_log(folder, 3, put("lora_alpha", 64))
    assert check.main([str(folder)]) == 20


def refused_by_seed_checker(folder):
    """Return whether the official seed checker refuses the logs in `folder`."""
    from mlperf_logging.package_checker.seed_checker import SeedChecker

    checker = SeedChecker("6.1.0")
    with official_tools.silent():
        return bool(checker._assert_unique_seed_per_run(sorted(folder.glob("result_*.txt"))))


@pytest.mark.parametrize("seeds", [(5, 5.0), (5, 5.9), (1, True), ("5", 5), (5, "x"), (5, 6.9)])
def test_seeds_are_compared_as_the_seed_checker_compares_them(tmp_path, seeds):
    folder = write_set(tmp_path / "set", [*range(100, 108), *seeds])
    refused = [finding for finding in set_findings(folder) if finding.rule == "seed"]
    assert bool(refused) == refused_by_seed_checker(folder) == (seeds != (5, 6.9))


@pytest.mark.parametrize("spoil", ["each rank", "no seed", "two line numbers"])
def test_one_log_that_the_seed_checker_refuses_fails_the_set(tmp_path, spoil):
    def change(log):
        index = find(log, "seed")
        if spoil == "each rank":
            log[index:index] = [log[index]] * 7
        elif spoil == "no seed":
            log.pop(index)
        else:
            log[index]["metadata"]["lineno"] = [1, 2]

    folder = write_set(tmp_path / "set", range(10))
    change_log(folder, 3, change)
    if spoil != "two line numbers":  # there it crashes
        assert refused_by_seed_checker(folder)
    (finding,) = set_findings(folder)
    assert finding.rule == "seed" and "result_3.txt" in finding.message
    assert check.main([str(folder)]) == 20


def test_a_bypass_file_is_named(tmp_path):
    folder = write_set(tmp_path / "set", range(10))
    params = folder / "package_checker_params"
    params.write_text("seed-checker-bypass\n")
    assert set_findings(folder) == [], "the official checker does not see this line"
    params.write_text("seed-checker-bypass")
    (finding,) = set_findings(folder)
    assert finding.severity == "note" and "seed-checker-bypass" in finding.message


# Accumulation steps, micro batch, tensor parallelism, GPUs of the system description; severity.
FACTORS = [
    (1, 1, 1, 8, None),
    (1.0, 1, 1, 8, None),
    (2, 1, 2, 8, None),
    (8, 1, 1, 8, "warning"),
    (1, 1, 2, 8, "warning"),
    (1, 3, 1, None, "warning"),
    (4, 2, 1, None, "note"),
    (4, 1, 1, None, None),
]


@pytest.mark.parametrize(("steps", "size", "tensor", "gpus", "severity"), FACTORS)
def test_a_batch_is_the_product_of_its_factors(tmp_path, steps, size, tensor, gpus, severity):
    def change(log):
        put("gradient_accumulation_steps", steps)(log)
        put("micro_batch_size", size)(log)
        put("tensor_parallelism", tensor)(log)
        assert log[find(log, "global_batch_size")]["value"] == 8

    folder = tmp_path / "results" / "S" / "llama2_70b_lora"
    folder.mkdir(parents=True)
    (tmp_path / "systems").mkdir()
    system = {"number_of_nodes": 1, "accelerators_per_node": gpus, "accelerator_model_name": "X"}
    if gpus:
        (tmp_path / "systems/S.json").write_text(json.dumps(system))
    assert found(of_others(folder, change)).get("batch") == severity


def test_a_log_by_name_beside_a_folder_is_no_set(tmp_path, capsys):
    folder = write_set(tmp_path / "set", range(10))
    other = write_set(tmp_path / "other", [1])
    assert check.main([str(folder), str(other / "result_0.txt")]) == 0


def test_a_line_that_the_seed_checker_refuses_fails_the_set(tmp_path):
    folder = write_set(tmp_path / "set", range(10))
    with (folder / "result_3.txt").open("a") as file:
        file.write(":::MLLOG {cut of\n")
    examined = [examine(path, project_root=None) for path in sorted(folder.glob("result_*.txt"))]
    (finding,) = result_set.findings(examined)
    assert finding.rule == "seed" and "result_3.txt" in finding.message
