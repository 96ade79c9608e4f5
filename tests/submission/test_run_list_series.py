"""`runs --series`, read from another process than the launcher of the series."""

import fcntl
import json
import shutil
import sys
from datetime import datetime, timedelta

import pytest
import synthetic_series as synthetic
from synthetic_run import PRETRAINING, step_event, write_json_lines

from common.records import ledger
from submission import run_list

NAME = PRETRAINING.rules.BENCHMARK


def at(minutes: float) -> str:
    began = datetime(2026, 10, 1, 12)
    return (began + timedelta(minutes=minutes)).strftime(ledger.TIME)


def start_line(number: int, minutes: float) -> dict:
    return {
        "event": "start",
        "series": synthetic.SERIES,
        "attempt": number,
        "run": f"run{number}",
        "seed": 1000 + number,
        "started": at(minutes),
    }


@pytest.fixture
def folder(tmp_path):
    """A series of ten wanted runs: one good, one failed, and one that runs, started every hour."""
    folder = tmp_path / NAME
    path = folder / ledger.NAME
    facts = {"config": synthetic.CONFIG}
    lines = [{"event": "series", "series": synthetic.SERIES, "goal": 10, "facts": facts}]
    lines += [start_line(number, 60 * (number - 1)) for number in (1, 2, 3)]
    good = {"exit_code": 0, "kind": "success", "reason": "", "minutes": 55.5, "samples": 4096}
    missed = {"exit_code": 10, "kind": "target_missed", "reason": "the target was not reached"}
    lines.append({**lines[1], "event": "end", **good})
    lines.append({**lines[2], "event": "end", **missed, "minutes": None, "samples": None})
    for line in lines:
        ledger.append(path, line)
    (folder / "run2").mkdir()
    evaluation = {"event": "eval", "samples": 9216, "loss": 4.75}
    write_json_lines(folder / "run2/events.jsonl", [step_event(1, 32), evaluation])
    (folder / "run3").mkdir()
    write_json_lines(
        folder / "run3/events.jsonl", [step_event(1, 32), step_event(9, 288, loss=2.5)]
    )
    return folder


@pytest.fixture
def locked(folder):
    """The lock that a living launcher holds."""
    with (folder / f"series_{synthetic.SERIES}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def printed(capsys, *arguments, code: int = 0) -> str:
    assert run_list.main(["--series=", *map(str, arguments)]) == code
    return capsys.readouterr().out


def as_json(capsys, *arguments) -> dict:
    (only,) = json.loads(printed(capsys, *arguments, "--json"))
    return only


def test_a_running_series(locked, capsys):
    found = as_json(capsys, locked)
    assert (found["good"], found["failed"], found["goal"], found["running"]) == (1, 1, 10, True)
    states = [(attempt["state"], attempt["samples"]) for attempt in found["attempts"]]
    assert states == [("success", 4096), ("target_missed", 9216), ("running", 288)]
    losses = [attempt["loss"] for attempt in found["attempts"]]
    assert losses == [None, 4.75, 2.5], "the first one's directory is gone"
    text = printed(capsys, locked)
    assert "1 of 10" in text and "run3" in text and "target" in text


def test_a_python_without_packages_prints_the_same_table(locked, capsys, monkeypatch):
    with_rich = printed(capsys, locked)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("common.terminal.has_rich", lambda: False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert printed(capsys, locked).split() == with_rich.split()


def test_the_time_that_is_left(locked):
    """Nine runs of an hour each, of which the running one has been going for half an hour."""
    (record,) = ledger.read(locked / ledger.NAME)
    now = datetime.fromisoformat(at(150))
    assert run_list.read_status(locked, record, now).seconds_left == 8.5 * 3600


def test_a_series_whose_launcher_was_killed(folder, capsys):
    (folder / f"series_{synthetic.SERIES}.lock").touch()  # a killed launcher leaves it behind
    found = as_json(capsys, folder)
    assert not found["running"] and found["seconds_left"] is None
    assert found["attempts"][2]["state"] == "lost"
    text = printed(capsys, folder)
    assert "NEXP=10" in text and "--resume" in text


def test_a_single_run_that_failed_cannot_be_resumed(tmp_path, capsys):
    series = {"event": "series", "series": synthetic.SERIES, "goal": 1, "facts": {}}
    start = start_line(1, 0)
    missed = {"exit_code": 10, "kind": "target_missed", "reason": "the target was not reached"}
    for line in (series, start, {**start, "event": "end", **missed}):
        ledger.append(tmp_path / ledger.NAME, line)
    text = printed(capsys, tmp_path)
    assert "0 of 1" in text and "not running" in text and "--resume" not in text


def test_a_finished_series(tmp_path, capsys, monkeypatch):
    synthetic.write(tmp_path, PRETRAINING, synthetic.plans([4] * 3), goal=3)
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    found = as_json(capsys)
    assert (found["benchmark"], found["good"], found["goal"]) == (NAME, 3, 3)
    assert "finished" in printed(capsys)


def test_nothing_is_written(locked, capsys):
    before = {path: path.stat().st_mtime_ns for path in locked.rglob("*")}
    printed(capsys, locked)
    assert {path: path.stat().st_mtime_ns for path in locked.rglob("*")} == before


def test_a_wrong_directory_or_id(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "logs" / NAME)
    assert printed(capsys, tmp_path / "logs", "--series", synthetic.SERIES[:8])
    assert not printed(capsys, tmp_path / "logs", "--series", "1999", code=2)
    assert not printed(capsys, tmp_path / "empty", code=2)


@pytest.mark.parametrize("line", ["DIR --series", "DIR --series --json", "--series --json DIR"])
def test_the_id_may_be_left_out(folder, capsys, line):
    words = [str(folder) if word == "DIR" else word for word in line.split()]
    assert run_list.main(words) == 0
    assert "1 of 10" in (out := capsys.readouterr().out) or json.loads(out)[0]["good"] == 1


def test_a_directory_is_no_id(folder, capsys):
    assert run_list.main(["--series", str(folder)]) == 2
    assert "directory" in capsys.readouterr().err


def test_an_id_selects_its_ledger_of_several(folder, tmp_path, capsys):
    other = {"event": "series", "series": "20270101-000000-f", "goal": 1, "facts": {}}
    ledger.append(tmp_path / "other" / ledger.NAME, other)
    for name, series in ((NAME, synthetic.SERIES), ("other", "2027")):
        assert as_json(capsys, tmp_path, "--series", series)["benchmark"] == name
    assert len(json.loads(printed(capsys, tmp_path, "--json"))) == 2
