"""Test the survey of a small synthetic results repository."""

import json
import re

import pytest
import synthetic_series
from log_dialects import DIALECTS, write
from synthetic_run import LORA, find, records, write_good

from submission import official_tools
from tests.tools import survey

pytest.importorskip("mlperf_logging")
SETS = {  # system -> dialect, how each log is spoiled
    "good": ("srun", lambda log: None),
    "not_cleared": ("older", lambda log: log[find(log, "cache_clear")].update(value=False)),
    "two_refused": ("older", lambda log: log.pop(find(log, "submission_org"))),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    for system, (dialect, spoil) in SETS.items():
        folder = root / "Acme" / "results" / system / "llama2_70b_lora"
        folder.mkdir(parents=True)
        for number in range(10):
            good = write_good(folder / "good.txt", LORA.rules.CLOSED, evaluations=5 + number % 3)
            change, options = DIALECTS[dialect]
            log = change(records(good))
            good.unlink()
            log[find(log, "seed")]["value"] += number
            log[find(log, "run_stop")]["time_ms"] += 60_000 * (10 + number)
            if system != "two_refused" or number < 2:
                spoil(log)
            write(folder / f"result_{number}.txt", log, **options)
        (root / "Acme" / "systems").mkdir(exist_ok=True)
        text = json.dumps(
            synthetic_series.DESCRIPTION | {"submitter": "Acme", "system_name": system}
        )
        (root / "Acme" / "systems" / f"{system}.json").write_text(text)
    return root


@pytest.mark.slow
def test_one_row_per_set_with_both_verdicts_and_scores(results, capsys):
    assert survey.main(["--results", str(results), "--ruleset", "5.1.0"]) == 0
    output = capsys.readouterr().out
    rows = {
        line.split()[0].removeprefix("Acme/"): line
        for line in output.splitlines()
        if line.strip().startswith("Acme/")
    }
    assert set(rows) == set(SETS)
    scores = {name: re.findall(r"\d+\.\d{6}", row) for name, row in rows.items()}
    for name in ("good", "not_cleared"):
        assert scores[name][0] == scores[name][1] and float(scores[name][0]) > 10
    assert scores["two_refused"] == []
    assert re.search(r" passed +CLEAN .* -$", rows["good"])
    assert re.search(r" passed +ACCEPTED .* cache_clear \(warning\) 10$", rows["not_cleared"])
    assert "2 files" in rows["two_refused"] and "NOT CLEAN" in rows["two_refused"]
    assert re.search(r"3 sets, 30 logs; .* 28\b", output)
    assert "0 refused" in output and "1 NOT CLEAN" in output


def test_a_score_that_is_not_the_official_one_is_said(results, capsys, monkeypatch):
    monkeypatch.setattr(survey, "our_score", lambda folder, ruleset: 1.0)
    answer = official_tools.ToolVerdict(
        "a tool", True, (), "", {}, {("good", "llama2_70b_lora"): 1.0 + 1e-8}
    )
    monkeypatch.setattr(official_tools, "package", lambda folder, ruleset, sets: answer)
    monkeypatch.setattr(official_tools, "summary", lambda folder, ruleset, sets: answer)
    assert survey.main(["--results", str(results)]) == 20
    assert "1.000000 !" in capsys.readouterr().out


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert (
        survey.main(["--results", str(tmp_path)]) == 2 and "no results" in capsys.readouterr().err
    )
