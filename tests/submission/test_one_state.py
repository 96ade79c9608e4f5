"""Test that `runs`, its series view, `report` and `score` show one state and one duration."""

import json
import re

import pytest
import synthetic_run
import synthetic_series as synthetic
from synthetic_run import LORA

from common.records.run_states import words
from submission import report, run_list, score

# State, what the log claims at run_stop (and whether it reaches the target), the exit code in the
# ledger (None: no end), and what failed after run_stop.
ROWS = {
    "killed launcher": ("lost", "aborted", None, ""),
    "missed target": ("target_missed", "aborted", 10, ""),
    "findings": ("check_failed", "success", 20, ""),
    "SIGTERM": ("interrupted", "aborted", 143, ""),
    "out of memory": ("out_of_memory", "aborted", 12, ""),
    "NaN": ("non_finite", "aborted", 11, ""),
    "failed save": ("success", "success", 0, "the model could not be saved: disk full"),
    "killed checker": ("success", "success", 0, "the log could not be checked: killed"),
}


@pytest.fixture(params=ROWS.values(), ids=ROWS)
def attempt(request, tmp_path):
    """The directory of the only attempt of a series, its state, minutes and late error."""
    state, status, code, late = request.param
    plan = synthetic.plans([3], fails="missed" if status == "aborted" else "")
    folder = synthetic.write(tmp_path, LORA, plan, goal=2)
    (run,) = folder.glob("*/")
    (run / "failure.json").unlink(missing_ok=True)
    log = synthetic_run.records(run / "result.txt")
    assert log[-1]["metadata"]["status"] == status
    times = {
        each["key"]: each["time_ms"] for each in log if each["key"] in ("run_start", "run_stop")
    }
    minutes = (times["run_stop"] - times["run_start"]) / 60_000
    path = folder / "attempts.jsonl"
    *lines, end = (json.loads(line) for line in path.read_text().splitlines())
    if code is not None:
        reason = late or ("" if code == 0 else f"the reason of {state}")
        end |= {"exit_code": code, "kind": state, "reason": reason, "minutes": round(minutes, 6)}
        lines.append(end)
    if code:
        failure = {"exit_code": code, "kind": state, "what": reason, "why": "x", "do": "y"}
        (run / "failure.json").write_text(json.dumps(failure))
    synthetic_run.write_json_lines(path, lines)
    return run, state, minutes, late


def test_four_commands_show_one_state_and_one_duration(attempt, capsys):
    run, state, minutes, late = attempt
    folder = run.parent

    def printed(main, *arguments, codes=(0,)) -> str:
        assert main([*map(str, arguments)]) in codes
        return capsys.readouterr().out

    (listed,) = json.loads(printed(run_list.main, folder, "--json"))
    (status,) = json.loads(printed(run_list.main, folder, "--series", "--json"))
    scored = json.loads(printed(score.main, folder, "--json", codes=(20,)))
    found = {
        "runs": listed,
        "runs --series": status["attempts"][0],
        "score": scored["runs"][0],
    }
    assert {name: each["state"] for name, each in found.items()} == dict.fromkeys(found, state)
    assert {each["state_words"] for each in found.values()} == {words(state)}
    for each in found.values():
        assert each["minutes"] == pytest.approx(minutes, abs=1e-6)
        assert late in each["reason"] and bool(each["reason"]) == bool(late or state != "success")
    assert scored["runs"][0]["converged"] == (state in ("success", "check_failed"))

    for main, arguments in ((run_list.main, [folder]), (run_list.main, [folder, "--series"])):
        text = printed(main, *arguments)
        assert words(state) in text and f"{minutes:,.3f}" in text
    text = printed(score.main, folder, codes=(20,))
    assert f"{minutes:,.3f}" in text and f"{words(state)}: " in text

    printed(report.main, run)
    page = (run / "report.html").read_text()
    headline = re.search(r'class="banner[^>]*>\s*<strong>(.*?)</strong>', page, re.DOTALL)
    assert headline and headline[1].lower().startswith(words(state)) and late in headline[1]
    tile = re.search(r"<dt>minutes</dt>\s*<dd>(.*?)</dd>", page, re.DOTALL)
    assert tile and tile[1] == f"{minutes:,.3f}"
    printed(report.main, folder)
    assert words(state) in (folder / "report.html").read_text()
