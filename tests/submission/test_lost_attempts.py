"""Test that score, package and report count the same attempts (table in docs/submission.md)."""

import json

import pytest
import synthetic_run
import synthetic_series as synthetic
from synthetic_run import LORA

from common.errors import CheckFailed
from submission import check, describe, package, package_checks, report, score
from submission.run import FAILED, GOOD, LOST, NOT_STARTED
from submission.series import read_series, ten_runs

NAME = LORA.rules.BENCHMARK
FIFTH = 4  # the attempt that something happens to


def cut_before(path, key: str) -> None:
    """Cut the log as if the run had been killed before it logged `key`."""
    records = synthetic_run.records(path)
    synthetic_run.write_records(path, records[: synthetic_run.find(records, key)])


def ledger_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def killed_launcher(folder, run) -> None:
    """The ledger has a start, and nobody was left to write an end."""
    kept = [
        line
        for line in ledger_lines(folder)
        if (line["event"], line.get("attempt")) != ("end", FIFTH + 1)
    ]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def resumed(folder, run) -> None:
    """--resume entered the attempt as lost."""
    change_end(
        folder, {"exit_code": 14, "kind": "lost", "reason": "its launcher ended without a word"}
    )


def failed_early(folder, run) -> None:
    change_end(
        folder, {"exit_code": 18, "kind": "preflight", "reason": "a GPU is away", "clock": False}
    )


def missed(folder, run) -> None:
    change_end(
        folder, {"exit_code": 10, "kind": "target_missed", "reason": "missed", "clock": True}
    )


def change_end(folder, changes: dict) -> None:
    lines = [
        line | changes if (line["event"], line.get("attempt")) == ("end", FIFTH + 1) else line
        for line in ledger_lines(folder)
    ]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def log_without(key: str):
    return lambda folder, run: cut_before(run / "result.txt", key)


def no_log(folder, run) -> None:
    (run / "result.txt").unlink()


def nothing(folder, run) -> None:
    pass


def in_vain(folder, run) -> None:
    records = synthetic_run.records(run / "result.txt")
    records[-1]["metadata"]["status"] = "aborted"
    for record in records:
        if record["key"] == "eval_accuracy":
            record["value"] = 0.95
    synthetic_run.write_records(run / "result.txt", records)


def against_the_rules(folder, run) -> None:
    records = synthetic_run.records(run / "result.txt")
    records[synthetic_run.find(records, "lora_rank")]["value"] = 8
    synthetic_run.write_records(run / "result.txt", records)


# What became of the log, what the ledger knows, and the state of the attempt. One of ten may be
# lost: it counts as the slowest.
CASES = {
    "a whole log and a start without an end": (nothing, killed_launcher, GOOD),
    "a whole log that --resume calls lost": (nothing, resumed, GOOD),
    "no run_stop and a start without an end": (log_without("run_stop"), killed_launcher, LOST),
    "no run_stop and lost by --resume": (log_without("run_stop"), resumed, LOST),
    "killed in init, and a start without an end": (
        log_without("init_stop"),
        killed_launcher,
        NOT_STARTED,
    ),
    "killed in init, and lost by --resume": (log_without("init_stop"), resumed, NOT_STARTED),
    "no log, and a start without an end": (no_log, killed_launcher, LOST),
    "no log, and lost by --resume": (no_log, resumed, LOST),
    "no log, and the launcher says why": (no_log, failed_early, NOT_STARTED),
    "no log of a run that the ledger calls good": (no_log, nothing, LOST),
    "no log of a run that missed its target": (no_log, missed, LOST),
    "a log cut in init of a run that missed": (log_without("init_stop"), missed, LOST),
    "aborted, and a start without an end": (in_vain, killed_launcher, FAILED),
    "a log that the official checker refuses": (against_the_rules, nothing, FAILED),
}


QUICK_CASES = [
    "killed in init, and a start without an end",
    "no log, and lost by --resume",
    "no log of a run that missed its target",
    "aborted, and a start without an end",
    "a log that the official checker refuses",
]


@pytest.fixture(
    params=[
        pytest.param(case, id=name, marks=[] if name in QUICK_CASES else pytest.mark.slow)
        for name, case in CASES.items()
    ]
)
def case(request, tmp_path):
    """Folder of twelve attempts, each slower than the last, and the state of the fifth."""
    plans = synthetic.plans(
        [evaluations for evaluations in synthetic.evaluations_near_reference(LORA)] + [7, 8]
    )
    folder = synthetic.write(tmp_path, LORA, plans)
    spoil, forget, state = request.param
    run = folder / ledger_lines(folder)[1 + 2 * FIFTH]["run"]
    spoil(folder, run)
    forget(folder, run)
    return folder, state


def test_score_package_and_report_give_one_answer(case, tmp_path, capsys):
    folder, state = case
    series = read_series([folder])
    chosen = ten_runs(series)
    assert series.runs[FIFTH].counts_as == state and len(series.runs) == 12
    assert not chosen.invalid
    capsys.readouterr()

    code = score.main([str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][FIFTH]["counts_as"] == state and found["result"]["score"] == chosen.score
    assert code == 0 and found["result"]["invalid"] is None

    assert report.main([str(folder)]) == 0
    assert f"{chosen.score:.3f} minutes" in (folder / "report.html").read_text()
    capsys.readouterr()

    system = tmp_path / f"{synthetic.SYSTEM}.json"
    system.write_text(json.dumps(synthetic.DESCRIPTION))
    assert describe.problems(synthetic.DESCRIPTION) == []
    request = package_checks.PackageRequest({NAME: folder}, system, tmp_path / "out", synthetic.ORG)
    with pytest.raises(
        CheckFailed
    ) as refused:  # this repository has no such commit: the last thing that is looked at
        package.package(request)
    printed = capsys.readouterr().out
    no_log = state == LOST and not (series.runs[FIFTH].path).exists()
    assert ("left no log" in refused.value.what) == no_log
    taken = tuple(run.number for run in chosen.runs)
    assert f"attempts {taken[0]} to {taken[-1]}, {chosen.rank:.4f} min" in printed
    marked = [
        int(line.split()[2]) for line in printed.splitlines() if line.startswith("  * attempt")
    ]
    assert marked == list(taken)
    assert (FIFTH + 1 in taken) == (state != NOT_STARTED)
    # Of two windows the slower one.
    assert state != NOT_STARTED or taken == (
        2,
        3,
        4,
        *range(6, 13),
    )


def test_the_logs_alone_give_the_verdicts_and_the_number_of_the_directory(tmp_path, capsys):
    plans = synthetic.plans(synthetic.evaluations_near_reference(LORA))
    folder = synthetic.write(tmp_path / "series", LORA, plans)
    alone = tmp_path / "alone"
    alone.mkdir()
    for index, run in enumerate(read_series([folder]).runs):
        (alone / f"result_{index}.txt").write_bytes(run.path.read_bytes())
    capsys.readouterr()
    found = []
    for directory in (folder, alone):
        code = score.main([str(directory), "--json"])
        scored = json.loads(capsys.readouterr().out)
        runs = [(run["state"], run["minutes"], run["converged"]) for run in scored["runs"]]
        codes = code, check.main([str(directory), "--json"])
        checked = map(json.loads, capsys.readouterr().out.splitlines())
        verdicts = [log["verdict"] for log in checked if "path" in log]
        found.append((codes, scored["result"], runs, verdicts))
    assert found[0] == found[1] and found[0][1]["score"] and len(found[0][3]) == 10


def test_a_copy_of_a_log_beside_the_ledger_does_not_hide_the_series(tmp_path):
    folder = synthetic.write(tmp_path, LORA, synthetic.plans([3, 4]))
    log = next(folder.glob("*/result.txt"))
    (folder / "result_0.txt").write_bytes(log.read_bytes())
    assert [run.number for run in read_series([folder]).runs] == [1, 2]
    assert len(read_series([folder], synthetic.SERIES).runs) == 2
