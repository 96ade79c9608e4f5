"""Test the rule for more than ten runs with twelve patterns computed by hand.

The rules ("Scoring") say: a set of ten consecutive runs that would be invalid counts as infinite in
the median. If the median set is invalid, so is the result. A failed run, missed or killed, counts
as infinite and may be the one run that is dropped.
"""

import json
import math

import pytest
import synthetic_run
import synthetic_series as synthetic
from synthetic_run import LORA

from common.errors import CheckFailed
from common.records import windows
from launch.console import runs_still_needed
from submission import package, package_checks, report, score
from submission.run import GOOD, LOST
from submission.series import read_series, ten_runs

NAME = LORA.rules.BENCHMARK
# g good, m missed its target, k killed after run_start. -> windows of ten, valid ones among them,
# whether there is a result.
PATTERNS = {
    "gggggggggg": (1, 1, True),
    "mggggggggg": (1, 1, True),
    "kggggggggg": (1, 1, True),  # the killed run is the one that is dropped
    "mmgggggggg": (1, 0, False),
    "mkgggggggg": (1, 0, False),
    "mmggggggggg": (2, 1, False),  # the slower of the two in the middle is infinite
    "kkgggggggggg": (3, 2, True),
    "mmmmggggggggg": (4, 1, False),
    "mmmmgggggggggg": (5, 2, False),
    "mmmmgggggggggggg": (7, 4, True),
    "gggggmggggkggggg": (7, 2, False),  # the two failures stand together in five windows
    "gggggggggkggggggggg": (10, 10, True),
}
FAILS = {"g": "", "m": "missed", "k": "killed"}


def good(pattern: str) -> list[bool]:
    return [letter == "g" for letter in pattern]


@pytest.mark.parametrize(("pattern", "answer"), PATTERNS.items())
def test_the_rule(pattern, answer):
    slices = windows.windows(good(pattern))
    assert (
        len(slices),
        sum(map(windows.is_valid, slices)),
        windows.has_result(good(pattern)),
    ) == answer
    assert (windows.good_runs_needed(good(pattern)) == 0) == answer[2]


def test_fewer_than_ten_runs_are_no_result():
    assert not windows.has_result(good("g" * 9)) and windows.good_runs_needed(good("g" * 9)) == 1
    assert windows.good_runs_needed([]) == 10


def test_of_two_windows_in_the_middle_the_slower_one_counts():
    assert windows.median([3.0, 1.0, 2.0, 4.0]) == 0
    assert windows.median([3.0, math.inf, math.inf]) == 1


@pytest.fixture(scope="module")
def series_of(tmp_path_factory):
    """Pattern -> folder of a series."""

    def write(pattern: str):
        needed = synthetic.evaluations_near_reference(LORA)
        plans = synthetic.plans([needed[index % 10] for index in range(len(pattern))])
        for plan, letter in zip(plans, pattern, strict=True):
            plan.fails = FAILS[letter]
        return synthetic.write(tmp_path_factory.mktemp(pattern), LORA, plans)

    return write


QUICK_PATTERNS = ["kggggggggg", "mkgggggggg", "mmggggggggg"]


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        pytest.param(*item, marks=[] if item[0] in QUICK_PATTERNS else pytest.mark.slow)
        for item in PATTERNS.items()
    ],
)
def test_score_gives_the_answer_of_the_rule(pattern, answer, series_of, capsys):
    count, valid, has_result = answer
    assert score.main([str(series_of(pattern)), "--json"]) == (0 if has_result else 20)
    found = json.loads(capsys.readouterr().out)
    assert (found["result"]["score"] is not None) == has_result
    assert [window["invalid"] is None for window in found["windows"]].count(True) == valid and len(
        found["windows"]
    ) == count


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("kggggggggg", marks=pytest.mark.slow),
        pytest.param("mmggggggggg", marks=pytest.mark.slow),
        "kkgggggggggg",
        pytest.param("mmmmggggggggg", marks=pytest.mark.slow),
    ],
)
def test_report_and_package_give_the_same_answer(pattern, series_of, tmp_path, capsys):
    folder = series_of(pattern)
    has_result = PATTERNS[pattern][2]
    ten = ten_runs(read_series([folder]))
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert (f"{ten.score:.3f} minutes" in page) if has_result else ("no score" in page)
    capsys.readouterr()

    system = tmp_path / f"{synthetic.SYSTEM}.json"
    system.write_text(json.dumps(synthetic.DESCRIPTION))
    with pytest.raises(
        CheckFailed
    ) as refused:  # if the series is good, then because no repository has its commit
        package.package(
            package_checks.PackageRequest({NAME: folder}, system, tmp_path / "out", synthetic.ORG)
        )
    assert ("commit" in refused.value.what) == has_result
    assert has_result or "windows" in refused.value.why or "did not converge" in refused.value.why


def test_a_killed_run_counts_as_the_slowest_and_the_official_mean_agrees(series_of):
    ten = ten_runs(read_series([series_of("kggggggggg")]))
    assert [run.counts_as for run in ten.runs] == [LOST] + [GOOD] * 9
    fastest = min(run.minutes for run in ten.runs if run.counts_as == GOOD)
    assert len(ten.counted) == 8 and fastest not in [run.minutes for run in ten.counted]
    assert ten.verdict.passed and ten.verdict.message == "RCP found"


def test_a_killed_run_without_a_log_still_counts_in_its_window(series_of):
    folder = series_of("kggggggggg")
    first = read_series([folder]).runs[0]
    first.path.unlink()
    lines = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    kept = [line for line in lines if (line["event"], line.get("attempt")) != ("end", 1)]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    ten = ten_runs(read_series([folder]))
    assert ten.runs[0].counts_as == LOST and not ten.invalid and ten.verdict.passed


def test_a_start_before_the_clock_is_no_run(series_of):
    folder = series_of("mggggggggg")
    path = read_series([folder]).runs[0].path
    records = synthetic_run.records(path)
    synthetic_run.write_records(path, records[: synthetic_run.find(records, "run_start")])
    ten = ten_runs(read_series([folder]))
    assert len(ten.runs) == 9 and "10 runs" in ten.invalid


def test_the_launcher_says_what_another_failure_would_mean():
    assert runs_still_needed(good("m")) == ""  # one of ten may fail
    text = runs_still_needed(good("mm"))
    assert "10 more good runs" in text and "a third failure" in text and "11" in text
    assert "already a result" in runs_still_needed(good("g" * 10 + "mm"))
