"""Rules about the clock, and about a result set as a whole, on logs of others and of ours."""

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

from submission import check, result_set
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


@pytest.mark.parametrize(
    ("late_s", "ours", "expected"), [(60, None, None), (61, None, "warning"), (61, True, "error")]
)
def test_a_pause_before_the_clock(tmp_path, late_s, ours, expected):
    def change(log):
        begin = find(log, "run_start")
        for record in log[begin:]:
            record["time_ms"] += late_s * 1000 - (
                log[begin]["time_ms"] - log[find(log, "init_stop")]["time_ms"]
                if record is log[begin]
                else 0
            )

    assert found(of_others(tmp_path, change), ours).get("late_start") == expected


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


@pytest.mark.parametrize(
    ("key", "value"), [("global_batch_size", 16), ("submission_benchmark", "llama31_8b")]
)
def test_a_set_of_two_benchmarks_or_batches_fails(tmp_path, capsys, key, value):
    folder = write_set(tmp_path / "set", range(10))
    log = records(folder / "result_4.txt")
    log[find(log, key)]["value"] = value
    write_records(folder / "result_4.txt", log)
    examined = [examine(path, project_root=None) for path in sorted(folder.glob("result_*.txt"))]
    (finding,) = result_set.findings(examined)
    assert key in finding.message


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
