"""Test the score of a series, against the official tools and on logs of other submitters."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import synthetic_run
from synthetic_run import LORA, PRETRAINING, Timed

from common.errors import ConfigError
from common.gpu_kinds import KINDS
from common.paths import ROOT
from common.records import published
from llama31_8b import rules
from submission import describe, official_tools, published_results, rcp, report, score, series
from submission.run import FAILED, read_run
from submission.series import TenRuns, read_series, ten_runs
from tests.tools import survey

# The older rulesets are slow tests; test_package.py has the official tools accept a submission for
# all three.
RULESETS = (
    *(pytest.param(ruleset, marks=pytest.mark.slow) for ruleset in ("5.1.0", "6.0.0")),
    "6.1.0",
)

# AMD's MI355X result of v5.1: minutes of the ten runs, to two decimals, and samples to the target.
AMD_MINUTES = (95.97, 102.68, 95.74, 109.44, 102.66, 102.65, 102.74, 95.89, 95.90, 95.99)
AMD_SAMPLES = (
    172_032,
    184_320,
    172_032,
    196_608,
    184_320,
    184_320,
    184_320,
    172_032,
    172_032,
    172_032,
)
AMD_RUNS = [
    Timed(samples, 30.679, 9.88, 0.0, minutes)
    for samples, minutes in zip(AMD_SAMPLES, AMD_MINUTES, strict=True)
]
for dropped in (
    2,
    3,
):  # the fastest and the slowest, in which 9.88 s, the mean over all evaluations, would not fit
    AMD_RUNS[dropped] = replace(AMD_RUNS[dropped], evaluation_s=9.7)
MIXED = [Timed(172_032)] * 7 + [Timed(184_320)] * 3


def evaluate(capsys, *arguments, code=0) -> dict:
    """The JSON of the command, which must end with `code`."""
    return json.loads(text(capsys, *arguments, "--json", code=code))


def text(capsys, *arguments, code=0) -> str:
    capsys.readouterr()
    assert score.main([*map(str, arguments)]) == code
    return capsys.readouterr().out


def read(folder: Path) -> TenRuns:
    return ten_runs(read_series([folder]))


def change(path: Path, edit) -> None:
    """Rewrite each record of the log at `path` with what `edit` makes of it."""
    synthetic_run.write_records(path, [edit(record) for record in synthetic_run.records(path)])


def one_step_short(record: dict) -> dict:
    """Rewrite eval_accuracy to lag one optimizer step, as in AMD's 8B logs."""
    if record["key"] == "eval_accuracy":
        record["metadata"]["samples_count"] -= 32
    return record


@pytest.fixture(scope="module")
def amd(tmp_path_factory) -> Path:
    folder = synthetic_run.write_timed_series(
        tmp_path_factory.mktemp("amd") / "results/MI355X/llama31_8b", PRETRAINING, AMD_RUNS
    )
    for path in folder.glob("result_*.txt"):
        change(path, one_step_short)
    return folder


# The official tools.


def write_system(path: Path, model: str = "AMD Instinct MI355X") -> None:
    system = dict.fromkeys(describe.KEYS, "text") | {
        "division": "closed",
        "status": "Available on-premise",
    }
    system |= {
        "number_of_nodes": "1",
        "host_processors_per_node": "2",
        "accelerators_per_node": "8",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(system | {"accelerator_model_name": model}))


def official(folder: Path, module: str, *arguments) -> str:
    pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed")
    command = [sys.executable, "-m", f"mlperf_logging.{module}", *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def organisation(tmp_path_factory) -> Path:
    """Both benchmarks, ten runs each; one run of the LoRA series did not converge."""
    folder = tmp_path_factory.mktemp("submission") / "Org"
    write_system(folder / "systems/sys.json")
    pretraining = [replace(run, samples_per_s=30 + index / 7) for index, run in enumerate(MIXED)]
    synthetic_run.write_timed_series(folder / "results/sys/llama31_8b", PRETRAINING, pretraining)
    lora = [Timed(2688, 5.8 + index / 9, 12.3) for index in range(3)] + [
        Timed(3072, 5.8 - index / 90, 12.3) for index in range(6)
    ]
    synthetic_run.write_timed_series(
        folder / "results/sys/llama2_70b_lora",
        LORA,
        [*lora, Timed(3840, 5.9, 12.3, converged=False)],
    )
    return folder


@pytest.mark.parametrize("ruleset", RULESETS)
def test_package_checker_and_summarizer_find_our_numbers(organisation, ruleset, tmp_path):
    assert "FOUND NO ERRORS, SUCCESS" in official(
        tmp_path, "package_checker", organisation, "training", ruleset
    )
    expected = {}
    for folder in (organisation / "results/sys").iterdir():
        found = read(folder)
        expected[folder.name] = found.score
        assert json.loads((folder / "scaling.json").read_text())["scaling_factor"] == found.factor
    official(tmp_path, "result_summarizer", organisation, "training", ruleset, "--csv", "out.csv")
    rows = json.loads((tmp_path / "out_detailed.json").read_text())
    for benchmark, ours in expected.items():
        theirs = [
            value
            for row in rows
            for key, value in flat(row)
            if benchmark in key and "time_to_train" in key
        ]
        assert theirs == [round(ours, 10)], rows  # ten decimals are what it writes


def flat(value, key="") -> list:
    if isinstance(value, dict):
        return [pair for name, inner in value.items() for pair in flat(inner, f"{key}/{name}")]
    return [(key, value)]


def test_rcp_checker_prints_our_numbers(organisation, tmp_path):
    folder = organisation / "results/sys/llama31_8b"
    printed = official(
        tmp_path, "rcp_checker", folder, "--rcp_version", "6.1.0", "--rcp_pass", "pruned_rcps"
    )
    ten, point = read(folder), rcp.point_at("llama31_8b", 32, "6.1.0")
    assert "RCP found, RCP test PASSED" in printed
    assert f"Submission mean epochs: {ten.samples:.4f}" in printed
    assert f"factor of {point.mean} / {ten.samples} = {ten.factor}" in printed
    for number in (point.mean, point.minimum):
        assert f"np.float64({number})" in printed


# What was published.


def test_amd_v51_mi355x(amd):
    """Score 99.709, raw 99.310, factor 1.00401.

    Minutes are rounded to 0.01, so the score is known to 0.001.
    """
    found = read(amd)
    assert found.minutes == pytest.approx(99.310, abs=5e-4)
    assert found.score == pytest.approx(99.709, abs=1e-3)
    assert found.samples == 178_144 and found.factor == 178_858.66666666666 / 178_144
    assert round(found.factor, 5) == 1.00401


def test_split_of_a_published_result_against_itself_is_nothing(amd, capsys):
    found = evaluate(capsys, amd, "--gpu", "MI355X", "--gpus", 8)["against"]
    assert found["name"] == "v5.1 AMD MI355X_EPYC_9575F_pytorch" and found[
        "speedup"
    ] == pytest.approx(1, abs=1e-5)
    for part in found["split"]:
        assert part["minutes"] == pytest.approx(0, abs=0.03) and part["factor"] == pytest.approx(
            1, abs=3e-4
        )


def pace_of(submitter: str) -> published.Pace:
    return next(
        e.pace
        for e in published.published("llama31_8b", "MI355X")
        if (e.round, e.submitter) == ("5.1", submitter)
    )


def test_dell_against_amd():
    """107.46 against 99.31 minutes: more than half of it is throughput, the rest mostly samples."""
    ours, theirs = pace_of("Dell"), pace_of("AMD")
    parts = {part.name: part for part in published.split(ours, theirs)}
    assert (ours.minutes, theirs.minutes) == (
        pytest.approx(107.462, abs=1e-3),
        pytest.approx(99.310, abs=1e-3),
    )
    assert sum(part.minutes for part in parts.values()) == pytest.approx(
        ours.minutes - theirs.minutes, abs=1e-9
    )
    assert math.prod(part.factor for part in parts.values()) == pytest.approx(
        ours.minutes / theirs.minutes, rel=1e-12
    )
    assert parts["throughput"].minutes == pytest.approx(4.42, abs=0.01)
    assert parts["samples to the target"].minutes == pytest.approx(3.49, abs=0.01)
    assert parts["time per evaluation"].minutes == pytest.approx(0.18, abs=0.01)
    back = {part.name: part for part in published.split(theirs, ours)}
    for name, part in parts.items():
        assert (back[name].minutes, back[name].factor) == (
            pytest.approx(-part.minutes),
            pytest.approx(1 / part.factor),
        )


def test_without_evaluation_times_the_split_still_adds_up():
    ours, theirs = replace(pace_of("Dell"), evaluations=None, evaluation_s=None), pace_of("AMD")
    parts = published.split(ours, theirs)
    assert [part.name for part in parts] == [
        "throughput",
        "samples to the target",
        "evaluation and other",
    ]
    assert sum(part.minutes for part in parts) == pytest.approx(
        ours.minutes - theirs.minutes, abs=1e-9
    )


@pytest.mark.parametrize(
    "entry", [e for e in published.RESULTS if e.runs == 10], ids=lambda e: f"{e.benchmark}-{e.name}"
)
def test_published_table_agrees_with_itself(entry):
    """Score over minutes is the RCP factor of the samples, and the parts add up to the minutes.

    Some logs count one step short. The rest is negative if the first block, which the rate leaves
    out, is the fastest: LoRA in NVFP4 continues in FP8.
    """
    point = rcp.point_at(entry.benchmark, entry.batch, "6.1.0")
    factors = [max(1.0, point.mean / (entry.samples - short)) for short in (0, entry.batch)]
    assert any(entry.score / entry.minutes == pytest.approx(factor, abs=1e-6) for factor in factors)
    rest = entry.minutes - entry.pace.training_minutes - entry.pace.evaluation_minutes
    assert -0.11 < rest / entry.minutes < 0.1


GENERATIONS = [
    ("AMD MI355X 5.1 lora", "AMD MI300X 5.1", 2.75, 10.185, 27.969),
    ("AMD MI355X 5.1 lora", "AMD MI325X 5.1", 2.07, 10.185, 21.049),
    ("AMD MI355X 5.1 lora", "NVIDIA tyche_ngpu8 5.0", 1.094, 10.185, 11.145),
]


@pytest.mark.parametrize(("mine", "other", "times", "score_", "others"), GENERATIONS)
def test_two_published_results_of_any_gpu_are_compared_by_one_command(
    mine, other, times, score_, others, capsys
):
    found = evaluate(capsys, mine, "--against", other)
    assert found["speedup"] == pytest.approx(times, abs=0.005) and found["score"] == pytest.approx(
        others, abs=1e-3
    )
    parts = {part["name"]: part["minutes"] for part in found["split"]}
    printed = text(capsys, mine, "--against", other)
    assert (
        f"{score_:.3f}" in printed
        and f"{others:.3f}" in printed
        and f"{times:.2f} times as fast" in printed
    )
    assert min(parts, key=parts.get) == "throughput"
    for name in (found["name"], score.find(mine).name):
        assert printed.count(name) >= 2
    assert "yours" not in printed and "theirs" not in printed


def name_of(submitter: str, gpu: str, gpus: int) -> str:
    return next(
        row.name
        for row in published.RESULTS
        if (row.submitter, row.gpu, row.gpus) == (submitter, gpu, gpus)
    )


def test_words_of_a_published_result_match_whole_words():
    """NVIDIA published B200 and GB200; "B200" is a part of both names."""
    like = next(row for row in published.RESULTS if row.gpu == "H200" and "lora" in row.benchmark)
    assert score.find("NVIDIA B200", like=like).gpu == "B200"
    assert all(row.gpu == "B200" for row in published_results.matching("b200"))
    assert published_results.matching("VIDIA") == published_results.matching("MI35") == []
    assert published_results.matching("nvidia nyx") and published_results.matching(
        "NVIDIA LORA v5.0"
    )


def test_words_that_match_several_results_are_an_error_that_lists_them(capsys):
    assert score.main(["NVIDIA GB200", "--against", "AMD MI300X 5.1"]) == 2
    error = capsys.readouterr().err
    for gpus in (8, 72, 512):
        assert name_of("NVIDIA", "GB200", gpus) in error
    with pytest.raises(ConfigError) as caught:
        score.find("lora")
    assert "more" in caught.value.why and len(caught.value.why.split(";")) < 20


def test_the_name_of_each_published_result_finds_it():
    for row in published.RESULTS:
        assert score.find(f"{row.name} {row.benchmark}") == row


def test_a_published_result_of_the_same_system_is_preferred(amd, capsys):
    found = evaluate(capsys, amd, "--gpu", "MI355X", "--gpus", 8, "--against", "AMD 5.1")
    assert found["against"]["gpu"] == "MI355X" and found["against"]["gpus"] == 8


@pytest.mark.parametrize("gpu", ["", "H200", "mi300x"])
def test_published_results_are_listed(gpu, capsys):
    rows = evaluate(capsys, "--list", *([gpu] if gpu else []))
    wanted = [row for row in published.RESULTS if gpu.upper() in ("", row.gpu)]
    assert len(rows) == len(wanted) > 1
    printed = text(capsys, "--list", *([gpu] if gpu else []))
    assert all(row.name in printed and f"{row.gpus} x {row.gpu}" in printed for row in wanted)


def test_the_list_of_an_unknown_gpu_names_the_known_ones(capsys):
    assert score.main(["--list", "H20"]) == 2
    error = capsys.readouterr().err
    assert "did you mean H200" in error and "GB200" in error


def test_two_directories_are_compared_whatever_their_gpus(amd, tmp_path, capsys):
    """The other run trains twice as fast, evaluates half as fast, and needs as many sequences."""
    slow = [replace(run, minutes=None, samples_per_s=20.0, evaluation_s=10.0) for run in MIXED]
    fast = [replace(run, minutes=None, samples_per_s=40.0, evaluation_s=20.0) for run in MIXED]
    ours, theirs = (
        synthetic_run.write_timed_series(tmp_path / name, PRETRAINING, runs)
        for name, runs in (("a", slow), ("b", fast))
    )
    found = evaluate(capsys, ours, "--gpu", "H200", "--gpus", 4, "--against", theirs)["against"]
    assert (found["name"], found["gpu"], found["gpus"], found["minutes"] / found["speedup"]) == (
        "b",
        None,
        None,
        pytest.approx(read(ours).minutes),
    )
    parts = {part["name"]: part for part in found["split"]}
    assert parts["throughput"]["minutes"] > 60 and parts["time per evaluation"]["minutes"] < -2
    assert parts["samples to the target"]["minutes"] == 0
    printed = text(capsys, ours, "--gpu", "H200", "--gpus", 4, "--against", theirs)
    assert re.search(r"yours +a: 4 x H200", printed) and re.search(r"theirs +b: unknown", printed)


@pytest.mark.parametrize(
    ("wish", "said"),
    [("nobody at all", "no result"), ("AMD MI300X lora 5.1", "no result"), ("", "--against")],
)
def test_what_cannot_be_compared_is_refused(amd, wish, said, capsys):
    assert score.main([str(amd), "--against", wish]) == 2
    assert said in capsys.readouterr().err


def test_logs_of_two_benchmarks_cannot_be_compared(amd, tmp_path, capsys):
    lora = synthetic_run.write_timed_series(tmp_path / "lora", LORA, [Timed(3072, 5.8, 12.0)] * 10)
    assert score.main([str(amd), "--against", str(lora)]) == 2
    assert "llama2_70b_lora" in capsys.readouterr().err
    assert score.main(["AMD MI355X 5.1", "--against", "AMD MI300X"]) == 2
    error = capsys.readouterr().err
    assert "llama31_8b" in error and "llama2_70b_lora" in error


def test_words_of_a_published_result_need_another_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    assert score.main(["AMD MI355X 5.1"]) == 2
    error = capsys.readouterr().err
    assert "published result" in error and '"AMD MI355X 5.1" --against' in error
    for path in (PRETRAINING.rules.BENCHMARK, "results/missing"):
        assert score.main([path]) == 2
        assert "does not exist" in capsys.readouterr().err


def test_the_table_of_published_results_is_made_of_logs(organisation, tmp_path, capsys):
    results = tmp_path / "results"
    shutil.copytree(organisation, results / "Org")
    (results / "Bad/results/sys/llama31_8b").mkdir(parents=True)
    table = tmp_path / "table.json"
    for round_ in ("9.9", "9.8", "9.9"):
        assert survey.main(["--results", str(results), "--round", round_, "--out", str(table)]) == 0
        assert "Bad/results/sys/llama31_8b" in capsys.readouterr().err
    rows = published.load(table)
    assert [(row.round, row.benchmark) for row in rows] == [
        (r, b) for r in ("9.8", "9.9") for b in ("llama2_70b_lora", "llama31_8b")
    ]
    found = read(organisation / "results/sys/llama31_8b")
    row = rows[1]
    assert (row.gpu, row.gpus, row.submitter, row.system, row.batch, row.runs) == (
        "MI355X",
        8,
        "Org",
        "sys",
        32,
        10,
    )
    assert (row.score, row.minutes) == (pytest.approx(found.score), pytest.approx(found.minutes))
    assert row.pace.samples_per_s == pytest.approx(series.pace(found).samples_per_s)
    assert (
        survey.main(["--results", str(tmp_path / "none"), "--round", "1", "--out", str(table)]) == 2
    )


# What counts.


def test_one_run_that_did_not_converge_is_the_slowest(tmp_path, capsys):
    runs = [Timed(172_032 if index < 5 else 184_320, 35, minutes=100 + index) for index in range(9)]
    runs.append(Timed(196_608, 80, converged=False, minutes=50))
    folder = synthetic_run.write_timed_series(tmp_path / "logs", PRETRAINING, runs)
    found = read(folder)
    assert found.samples == (172_032 + 184_320) / 2
    assert found.minutes == sum(100 + index for index in range(1, 9)) / 8 and found.passed
    assert "did not converge" in text(capsys, folder)
    synthetic_run.write_timed(
        folder / "result_0.txt", PRETRAINING, Timed(184_320, converged=False), seed=1
    )
    printed = text(capsys, folder, code=20)
    assert (
        "INVALID         2 runs did not converge" in printed
        and "RCP test        FAILED (Insufficient convergence)" in printed
    )
    assert "125,0" not in printed
    assert evaluate(capsys, folder, code=20)["result"]["score"] is None


def test_one_of_equal_runs_is_the_fastest_and_another_the_slowest(tmp_path, capsys):
    runs = [Timed(184_320, 35, minutes=100)] * 10
    printed = text(capsys, synthetic_run.write_timed_series(tmp_path, PRETRAINING, runs))
    assert printed.count("dropped: fastest") == printed.count("dropped: slowest") == 1


def test_success_without_an_evaluation_at_the_target_did_not_converge(tmp_path):
    path = synthetic_run.write_timed(tmp_path / "log", PRETRAINING, Timed(172_032), seed=1)
    change(
        path,
        lambda record: record | {"value": 3.31} if record["key"] == "eval_accuracy" else record,
    )
    run = read_run(path)
    assert run.counts_as == FAILED and "no evaluation" in run.reason


def test_a_batch_without_reference_is_not_blamed_on_fast_runs(tmp_path, capsys):
    runs = [Timed(40 * 12_288)] * 10
    folder = synthetic_run.write_timed_series(
        tmp_path / "results", PRETRAINING, runs, global_batch_size=256
    )
    printed = text(capsys, str(folder), code=20)
    assert "Missing RCP" in printed and "NO SCORE" in printed and "faster" not in printed


def test_a_ruleset_without_the_benchmark_is_no_missing_file(amd, capsys):
    found = evaluate(capsys, str(amd), "--ruleset", "5.0.0", code=20)
    assert found["result"]["score"] is None
    assert "no rules for llama31_8b" in found["runs"][0]["reason"]


@pytest.mark.parametrize("number", ["-1", "0", "1" + "0" * 400])
def test_a_number_of_gpus_that_no_system_has_is_unknown(tmp_path, number, capsys):
    folder = tmp_path / "results" / "S" / LORA.rules.BENCHMARK
    synthetic_run.write_timed_series(folder, LORA, [Timed(3072)])
    system = tmp_path / "systems" / "S.json"
    write_system(system)
    system.write_text(
        json.dumps(json.loads(system.read_text()) | {"accelerators_per_node": number})
    )
    assert evaluate(capsys, str(folder), code=20)["gpus"] is None


def test_series_is_refused_for_logs_that_have_no_ledger(amd, capsys):
    assert score.main([str(amd), "--series", "2026"]) == 2
    assert "--series" in capsys.readouterr().err


def test_rcp_failure_is_exit_code_20_and_no_score(tmp_path, capsys):
    folder = synthetic_run.write_timed_series(tmp_path / "logs", PRETRAINING, [Timed(172_032)] * 10)
    assert "RCP test        FAILED (RCP found)" in text(capsys, folder, code=20)
    found = evaluate(capsys, folder, code=20)["result"]
    assert found["score"] is None and found["rcp"]["passed"] is False


def test_a_bypassed_result_has_the_official_score(tmp_path, capsys):
    folder = synthetic_run.write_timed_series(
        tmp_path / "Acme/results/S/llama31_8b", PRETRAINING, [Timed(159_744)] * 10
    )
    (folder / "package_checker_params").write_text("rcp-bypass\n")
    assert "NO SCORE" in text(capsys, folder, code=20), "the official checker sees no such line"
    (folder / "package_checker_params").write_text("rcp-bypass")
    found = evaluate(capsys, folder)["result"]
    assert found["factor"] == 1.0 and "rcp_bypass" in found["rcp"]["message"]
    write_system(tmp_path / "Acme/systems/S.json")
    submitter = tmp_path / "Acme"
    assert official_tools.package(submitter, "6.1.0", 1).passed
    official = official_tools.summary(submitter, "6.1.0", 1).scores["S", "llama31_8b"]
    assert found["score"] == pytest.approx(official, rel=1e-12)


def test_each_window_is_judged_once(tmp_path, capsys, monkeypatch):
    runs = [Timed(184_320, 35, minutes=100 + index) for index in range(12)]
    folder = synthetic_run.write_timed_series(tmp_path, PRETRAINING, runs)
    judge = mock.Mock(side_effect=rcp.judge)
    monkeypatch.setattr(rcp, "judge", judge)
    text(capsys, folder)
    assert judge.call_count == 3


def test_a_chosen_log_without_a_clock_is_the_run_that_failed(tmp_path, capsys):
    folder = synthetic_run.write_timed_series(tmp_path, PRETRAINING, [Timed(184_320)] * 10)
    path = folder / "result_3.txt"
    log = synthetic_run.records(path)
    synthetic_run.write_records(path, log[: synthetic_run.find(log, "run_start")])
    assert read_run(path).counts_as == FAILED
    assert evaluate(capsys, folder)["result"]["score"] is not None


def test_of_thirteen_runs_the_median_window_counts(tmp_path, capsys):
    minutes = [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 95, 130, 130]
    folder = synthetic_run.write_timed_series(
        tmp_path / "logs", PRETRAINING, [Timed(184_320, 35, minutes=m) for m in minutes]
    )
    found = read_series([folder])
    windows = found.windows
    # 10 comes after 9.
    assert [window.runs[0].name for window in windows] == [
        f"result_{index}.txt" for index in range(4)
    ]
    assert [window.score for window in windows] == [104.5, 104.5, 105.5, 109.0]
    assert ten_runs(found).runs == windows[2].runs  # of two in the middle the slower
    printed = text(capsys, folder)
    assert printed.count("not in the median") == 3 and "4 windows of 10" in printed
    assert evaluate(capsys, folder)["result"]["score"] == 105.5


def test_a_window_that_is_no_result_is_not_in_the_middle(tmp_path):
    failed = [Timed(184_320, minutes=200, converged=False)]
    runs = [Timed(184_320, 35, minutes=100 + index) for index in range(10)]
    found = read_series(
        [synthetic_run.write_timed_series(tmp_path, PRETRAINING, [*runs, *failed, *failed])]
    )
    windows = found.windows
    assert [bool(window.invalid) for window in windows] == [False, False, True]
    assert ten_runs(found).runs == windows[1].runs


def test_too_few_runs_are_scored_and_called_invalid(tmp_path, capsys):
    synthetic_run.write_timed_series(
        tmp_path / "logs", PRETRAINING, [Timed(184_320, 37, minutes=90)]
    )
    printed = text(capsys, tmp_path / "logs", "--gpu", "MI355X", "--gpus", 8, code=20)
    assert "10 runs" in printed and "together" in printed
    assert "NEXP=10 ./run_and_time.sh llama31_8b --resume" in printed
    assert "90.0000, of one run" in printed and "1 runs" not in printed


# Other people's logs.


def test_eight_ranks_a_prefix_another_order_of_keys_and_epochs_change_nothing(amd, tmp_path):
    """Log every line eight times, each rank two seconds after the one before.

    The last rank's training block ends after the first rank's next one has begun. Other output is
    mixed in, and epoch_num replaces samples_count where the official tools accept it.
    """
    wanted = read(amd)
    for path in amd.glob("result_*.txt"):
        lines = [(0, "+ echo ':::DLPAL image 123 1 node'")]
        for record in synthetic_run.records(path):
            if record["key"] in ("eval_start", "eval_stop"):
                record["metadata"]["epoch_num"] = record["metadata"].pop("samples_count")
            for rank in range(
                8
                if record["key"] not in ("init_start", "init_stop", "run_start", "run_stop")
                else 1
            ):
                late = dict(reversed(record.items())) | {"time_ms": record["time_ms"] + 2000 * rank}
                lines.append((late["time_ms"], f"{rank}: :::MLLOG {json.dumps(late)}"))
        lines.sort(key=lambda line: line[0])
        (tmp_path / path.name).write_text(
            "\n".join(line for _, line in lines) + "\n0: RESULT,LLM_FINETUNING,,1733\n"
        )
    found = read(tmp_path)
    assert [run.reason for run in found.runs] == [""] * 10
    assert (found.score, found.verdict) == (wanted.score, wanted.verdict)
    for name in ("samples", "samples_per_s", "evaluations", "evaluation_s"):
        assert getattr(series.pace(found), name) == pytest.approx(
            getattr(series.pace(wanted), name), rel=1e-5
        )


def test_torn_and_repeated_lines_are_read_as_the_official_tools_do(tmp_path):
    """The last token of a line counts.

    So do the last run_start before the first run_stop and the last evaluation before a run_stop.
    """
    path = synthetic_run.write_timed(
        tmp_path / "log", PRETRAINING, Timed(172_032, 35, minutes=90), seed=1
    )
    records = synthetic_run.records(path)
    start, stop = synthetic_run.find(records, "run_start"), synthetic_run.find(records, "run_stop")
    again = [records[start] | {"time_ms": records[start]["time_ms"] + 60_000}]
    late = [records[stop - 2] | {"metadata": {"samples_count": 999_999}, "value": 3.0}]
    ended_ms = records[stop]["time_ms"]
    restart = [
        records[start] | {"time_ms": ended_ms},
        records[stop] | {"time_ms": ended_ms + 120_000},
    ]
    synthetic_run.write_records(
        path, [*records[: start + 1], *again, *records[start + 1 :], *restart, *late]
    )
    torn = path.read_text().replace(":::MLLOG", ':::MLLOG {"key": "train_los:::MLLOG', 1)
    path.write_text(torn + ":::MLLOG cut shor\n")
    run = read_run(path)
    assert (run.minutes, run.samples, run.reached) == (89, 172_032, True)
    assert len(run.notes) == 1 and "not one JSON object" in run.notes[0]
    assert run.counts_as == FAILED and "not one JSON" in run.reason  # as the official checker does


def test_an_epoch_around_everything_stands_for_blocks(tmp_path):
    path = synthetic_run.write_timed(
        tmp_path / "log", PRETRAINING, Timed(184_320, 25.0, 10.0, first_block_s=0), seed=1
    )
    records = [
        record for record in synthetic_run.records(path) if not record["key"].startswith("block")
    ]
    start, stop = synthetic_run.find(records, "run_start"), synthetic_run.find(records, "run_stop")
    whole = {"metadata": {"samples_count": 184_320, "file": "x", "lineno": 1}}
    records.insert(stop, records[stop] | {"key": "epoch_stop"} | whole)
    records.insert(
        start + 1, records[start] | {"key": "epoch_start", "metadata": {"samples_count": 0}}
    )
    run = read_run(synthetic_run.write_records(path, records))
    assert run.samples_per_s == pytest.approx(25.0, rel=1e-4) and run.evaluation_s == pytest.approx(
        150.0
    )


def test_one_step_behind_is_noted(amd):
    run = read_run(amd / "result_0.txt")
    assert (run.samples, run.trained) == (172_000, 172_032)
    (note,) = run.notes
    assert "172,000" in note and "172,032" in note


def test_the_first_block_of_a_run_is_not_in_the_steady_throughput(tmp_path):
    found = read(
        synthetic_run.write_timed_series(
            tmp_path, PRETRAINING, [Timed(184_320, 30.0, first_block_s=60)] * 10
        )
    )
    assert series.pace(found).samples_per_s == pytest.approx(30.0, rel=1e-6)
    assert found.runs[0].samples_per_s == pytest.approx(184_320 / (184_320 / 30 + 60), rel=1e-6)


def test_gpus_from_the_system_description_or_the_platform(amd, organisation, tmp_path, capsys):
    run = read_run(organisation / "results/sys/llama31_8b/result_0.txt")
    assert (run.gpu, run.gpus) == ("MI355X", 8)
    change_platform = tmp_path / "log"
    change_platform.write_bytes(
        (amd / "result_0.txt").read_bytes().replace(b'"8 GPUs"', b'"DGX-H200 x8"')
    )
    assert (read_run(change_platform).gpu, read_run(change_platform).gpus) == ("H200", None)
    assert "unknown GPU" in text(capsys, amd)


@pytest.mark.parametrize("model", ["NVIDIA R100-SXM-288GB", "8xr100"])
def test_a_new_gpu_kind_is_found_in_a_system_description(tmp_path, monkeypatch, capsys, model):
    """The new kind of CONTRIBUTING.md, in the score, the comparison and the report."""
    write_system(tmp_path / "systems/sys.json", model)
    folder = synthetic_run.write_timed_series(
        tmp_path / "results/sys/llama31_8b", PRETRAINING, [Timed(172_032)]
    )
    assert read_run(folder / "result_0.txt").gpu == model
    monkeypatch.setitem(KINDS, "R100", replace(KINDS["B200"], name="R100"))
    assert "on 8 x R100" in text(capsys, folder, code=20)
    assert evaluate(capsys, folder, code=20)["gpu"] == "R100"
    (folder / "result_0.txt").rename(folder / "result.txt")
    assert report.main([str(folder)]) == 0
    assert "8 x R100" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("platform", "gpu"),
    [
        ("4xXE9712x4GB200", "GB200"),
        ("hpg.dgxb200x8.n16", "B200"),
        ("1xXE9680x8MI300X", "MI300X"),
        ("NVIDIA GH200 144G", "GH200"),
        ("AMD Instinct MI300A", None),
        ("NVIDIA H2000", None),
    ],
)
def test_a_gpu_kind_is_found_within_the_words_of_a_platform(amd, tmp_path, platform, gpu):
    log = (amd / "result_0.txt").read_bytes().replace(b'"8 GPUs"', b'"%s"' % platform.encode())
    (tmp_path / "log").write_bytes(log)
    assert read_run(tmp_path / "log").gpu == gpu


def test_no_published_result_is_said(amd, capsys):
    printed = text(capsys, amd, "--gpu", "h200", "--gpus", 8)
    assert (
        "no published result" in printed and "64 GPUs: 37.753 min, 11,573 tokens/s/GPU" in printed
    )
    assert evaluate(capsys, amd, "--gpu", "H200", "--gpus", 8)["against"] is None


def test_against_another_submitter(amd, capsys):
    found = evaluate(capsys, amd, "--gpu", "MI355X", "--gpus", 8, "--against", "dell 5.1")[
        "against"
    ]
    assert found["name"] == "v5.1 Dell XE9785L_8xMI355X"
    assert sum(part["minutes"] for part in found["split"]) == pytest.approx(
        99.310 - 107.462, abs=1e-3
    )
    assert score.main([str(amd), "--gpu", "MI355X", "--gpus", "8", "--against", "Nobody"]) == 2
    assert "--list MI355X" in capsys.readouterr().err


@pytest.mark.parametrize("dialect", ["size of the block", "count at its start"])
def test_blocks_that_do_not_carry_the_count_so_far_end_at_the_evaluation_after_them(
    dialect, tmp_path
):
    """mlperf_common logs the size, others the count at the start, on both lines of a block."""
    path = synthetic_run.write_timed(tmp_path / "log", LORA, Timed(3072, 5.8, 12.0), seed=1)
    wanted, records, start = read_run(path), synthetic_run.records(path), 0
    for record in records:
        if record["key"] == "block_start":
            start = record["metadata"]["samples_count"]
        if record["key"] in ("block_start", "block_stop"):
            record["metadata"]["samples_count"] = (
                start if dialect.startswith("count") else (1536 if start == 0 else 384)
            )
    found = read_run(synthetic_run.write_records(path, records))
    assert (found.blocks, found.evaluations, found.trained) == (
        wanted.blocks,
        wanted.evaluations,
        3072,
    )
    assert found.samples_per_s == wanted.samples_per_s and found.converged and found.notes == []


# What is judged at all.


def spoilt(folder: Path, index: int, edit) -> Path:
    records = synthetic_run.records(folder / f"result_{index}.txt")
    edit(records)
    synthetic_run.write_records(folder / f"result_{index}.txt", records)
    return folder


def clip_norm(records: list[dict]) -> None:
    records[synthetic_run.find(records, "opt_gradient_clip_norm")]["value"] = 5.0


def no_org(records: list[dict]) -> None:
    records[synthetic_run.find(records, "submission_org")]["value"] = ""


def forty_minutes_of_init(records: list[dict]) -> None:
    for record in records[: synthetic_run.find(records, "init_stop")]:
        record["time_ms"] -= 40 * 60_000


@pytest.mark.parametrize(
    "edit",
    [
        clip_norm,
        pytest.param(no_org, marks=pytest.mark.slow),
        pytest.param(forty_minutes_of_init, marks=pytest.mark.slow),
    ],
)
def test_a_log_that_the_official_checker_refuses_counts_as_in_the_official_summarizer(
    edit, tmp_path, capsys
):
    """Such a log counts as the slowest run. Two of them leave no score."""
    system = tmp_path / "Org/results/sys"
    write_system(tmp_path / "Org/systems/sys.json")
    runs = [replace(run, minutes=100 + index) for index, run in enumerate(MIXED)]
    folder = spoilt(
        synthetic_run.write_timed_series(system / "llama31_8b", PRETRAINING, runs), 2, edit
    )
    found = evaluate(capsys, folder)
    assert (
        found["runs"][2]["state"] == "check_failed"
        and "refuses its log" in found["runs"][2]["reason"]
    )
    assert "result_2.txt" in text(capsys, folder)
    official(tmp_path, "package_checker", tmp_path / "Org", "training", "6.1.0")
    official(
        tmp_path, "result_summarizer", tmp_path / "Org", "training", "6.1.0", "--csv", "out.csv"
    )
    rows = json.loads((tmp_path / "out_detailed.json").read_text())
    theirs = [
        value
        for row in rows
        for key, value in flat(row)
        if "llama31_8b" in key and "time_to_train" in key
    ]
    assert theirs == [round(found["result"]["score"], 10)]
    spoilt(folder, 5, edit)
    assert "INVALID         2 runs did not converge" in text(capsys, folder, code=20)


def test_a_clock_that_stops_before_it_starts_is_no_run(tmp_path, capsys):
    def run_stop_first(records: list[dict]) -> None:
        records.insert(synthetic_run.find(records, "run_start"), records.pop())

    folder = spoilt(
        synthetic_run.write_timed_series(tmp_path, PRETRAINING, MIXED), 2, run_stop_first
    )
    assert "run_stop is before" in text(capsys, folder, code=20)
    # The official RCP checker breaks off at it.
    assert read(folder).runs[2].counts_as == FAILED and read(folder).score is None


@pytest.mark.parametrize(
    "what", ["a log twice", "a directory twice", "a copied log", "two submitters"]
)
def test_what_cannot_be_one_series_is_refused(what, tmp_path, capsys):
    folder = synthetic_run.write_timed_series(tmp_path / "a", PRETRAINING, MIXED)
    arguments = [folder]
    if what == "a log twice":
        arguments = [folder / "result_0.txt", folder / "result_1.txt", folder / "result_0.txt"]
    elif what == "a directory twice":
        arguments = [folder, folder]
    elif what == "a copied log":
        shutil.copy(folder / "result_3.txt", folder / "result_7.txt")
    else:
        spoilt(
            folder,
            4,
            lambda records: records[synthetic_run.find(records, "submission_org")].update(
                value="Somebody Else"
            ),
        )
    assert score.main([*map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert (
        "org: An Organisation, Somebody Else" if what == "two submitters" else "same run"
    ) in said
    assert len(said.splitlines()) == 3


def test_one_seed_for_two_runs_is_said(tmp_path, capsys):
    folder = synthetic_run.write_timed_series(tmp_path, PRETRAINING, MIXED)
    synthetic_run.write_timed(
        folder / "result_4.txt", PRETRAINING, replace(MIXED[4], samples_per_s=31.0), seed=1000
    )
    assert "same seed 1000" in text(capsys, folder)
    change(
        folder / "result_4.txt",
        lambda record: record | {"value": 1000.5} if record["key"] == "seed" else record,
    )
    assert "same seed 1000" in text(capsys, folder), "the seed checker converts it with int()"


# Our own folders.


def test_a_run_directory_and_a_folder_without_a_ledger(tmp_path):
    for name in ("20260102_b", "20260101_a"):
        synthetic_run.write_timed(
            tmp_path / name / "result.txt", LORA, Timed(3072, 5.8, 12.0), seed=1
        )
        (tmp_path / name / "config.toml").write_text(
            'gpu = "MI300X"\nnodes = 1\ngpus_per_node = 8\n'
        )
    found = read_series([tmp_path])
    assert [run.name for run in found.runs] == [
        "20260101_a",
        "20260102_b",
    ] and "no ledger" in found.notes[0]
    assert (found.runs[0].gpu, found.runs[0].gpus) == ("MI300X", 8)
    assert [run.name for run in read_series([tmp_path / "20260102_b"]).runs] == ["20260102_b"]


def test_a_miniature_is_no_result(tmp_path, capsys):
    miniature = rules.MINIATURE
    runs = [Timed(4096, 100.0, 1.0, 0.5)] * 10
    folder = synthetic_run.write_timed_series(
        tmp_path, PRETRAINING, runs, rules_=miniature, global_batch_size=8
    )
    printed = text(capsys, folder)
    assert "no score" in printed and "against" not in printed
    mine = replace(series.result(read_series([folder]), read(folder)), gpus=2)
    assert miniature.sequence_length < rules.CLOSED.sequence_length
    rate = mine.samples_per_s
    assert published_results.tokens_per_gpu(mine) == pytest.approx(
        rate * miniature.sequence_length / mine.gpus
    )
    found = evaluate(capsys, folder)
    assert (
        found["result"]["score"] is None
        and found["result"]["rcp"] is None
        and found["result"]["minutes"] > 0
    )
    assert found["against"] is None


@pytest.mark.parametrize(
    ("good", "failed", "code"), [(1, 0, 0), (3, 0, 0), (3, 1, 0), (3, 2, 20), (0, 1, 20)]
)
def test_a_miniature_series_passes_if_its_runs_converged(good, failed, code, tmp_path, capsys):
    run = Timed(4096, 100.0, 1.0, 0.5)
    runs = [run] * good + [replace(run, converged=False)] * failed
    folder = synthetic_run.write_timed_series(
        tmp_path, PRETRAINING, runs, rules_=rules.MINIATURE, global_batch_size=8
    )
    printed = text(capsys, folder, code=code)
    assert "miniature" in printed and "INVALID" not in printed


@pytest.mark.parametrize(
    "what", ["nothing there", "no log", "two benchmarks", "two batches", "empty folder"]
)
def test_wrong_usage_is_exit_code_2(what, tmp_path, capsys):
    logs = [tmp_path / "a", tmp_path / "b"]
    synthetic_run.write_timed(logs[0], PRETRAINING, Timed(24_576), seed=1)
    if what == "no log":
        logs[1].write_text("hello\n:::MLLOG nonsense\n")
    elif what == "two benchmarks":
        synthetic_run.write_timed(logs[1], LORA, Timed(3072), seed=1)
    elif what == "two batches":
        synthetic_run.write_timed(logs[1], PRETRAINING, Timed(24_576), seed=1, global_batch_size=16)
    elif what == "empty folder":
        logs[1].mkdir()
    assert score.main([str(path) for path in logs]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "content", [b"", b"\x1f\x8b\x08 gzip", b"\0\1\2", b":::MLLOG " + b"[" * 100_000]
)
def test_a_file_that_is_no_log_is_one_error(content, tmp_path, capsys):
    (tmp_path / "result_0.txt").write_bytes(content)
    for argument in (tmp_path, tmp_path / "result_0.txt"):
        assert score.main([str(argument)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 3


WITHOUT_TORCH = """
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("no torch here")

sys.meta_path.insert(0, Forbid())
from submission.score import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_runs_without_torch(amd):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(amd)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "99.7" in done.stdout, done.stderr


def test_a_closed_pipe_ends_it_without_a_traceback(amd):
    command = f"{sys.executable} -m submission.score {amd} | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
