"""The list of runs: three single runs of which one is good, a running one, and a lost one."""

import fcntl
import json
from dataclasses import replace

import pytest
from synthetic_run import LORA, records, write_good, write_records

from common.records import ledger
from common.records.run_states import WORDS, words
from submission import run_list, run_list_page

COMMIT = "0123456789abcdef"


def add_run(folder, series, kind=None, minutes=None):
    """A single run as series.py enters it: `kind` None if it has no end."""
    path = folder / ledger.NAME
    run = f"run_{series}"
    (folder / run).mkdir(parents=True)
    facts = {"config": "CPU_1x1.toml", "commit": COMMIT}
    ledger.append(path, {"event": "series", "series": series, "goal": 1, "facts": facts})
    start = {
        "series": series,
        "attempt": 1,
        "run": run,
        "seed": 7,
        "started": f"2026-11-23T10:00:{len(list(folder.iterdir())):02d}Z",
        "config": "CPU_1x1.toml",
        "commit": COMMIT,
    }
    ledger.append(path, {"event": "start"} | start)
    if kind is not None:
        code = 0 if kind == "success" else 10
        end = {"exit_code": code, "kind": kind, "reason": "" if code == 0 else "why"}
        ledger.append(path, {"event": "end"} | start | end | {"minutes": minutes, "samples": 32})


@pytest.fixture
def log_dir(tmp_path):
    folder = tmp_path / "toy"
    add_run(folder, "a", "interrupted")
    add_run(folder, "b", "success", 2.5)
    add_run(folder, "c", "target_missed", 4.0)
    add_run(folder, "d")
    return tmp_path


def test_each_run_has_its_own_state(log_dir):
    rows = run_list.rows_of(log_dir)
    assert [row.state for row in rows] == ["interrupted", "success", "target_missed", "lost"]
    assert [row.minutes for row in rows] == [None, 2.5, 4.0, None]
    assert {row.commit for row in rows} == {COMMIT}
    assert rows == run_list.rows_of(log_dir / "toy")


def test_the_order_is_that_of_the_starts_whatever_the_names_and_the_clock(tmp_path, capsys):
    """Names of earlier versions are local times, and a clock may be set back."""
    starts = {
        "b_toy": [("20261123-190000", "2026-11-23T10:00:00Z"), ("20261123-110000", "T11:00:00Z")],
        "a_toy": [("20261123-113000", "2026-11-23T11:30:00Z"), ("20261123-120000", "T10:30:00Z")],
    }
    for benchmark, runs in starts.items():
        path = tmp_path / benchmark / ledger.NAME
        for run, started in runs:
            started = started if started.startswith("2") else f"2026-11-23{started}"
            series = {"event": "series", "series": run, "goal": 1, "facts": {}}
            start = {"series": run, "attempt": 1, "run": run, "seed": 7, "started": started}
            ledger.append(path, series)
            ledger.append(path, {"event": "start"} | start)
    assert run_list.main([str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == [
        "20261123-190000",
        "20261123-110000",
        "20261123-113000",
        "20261123-120000",  # after the run before it in the ledger
    ]


def test_a_run_whose_launcher_lives_is_running(log_dir):
    with (log_dir / "toy/series_d.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run_list.rows_of(log_dir)[-1].state == "running"
    assert run_list.rows_of(log_dir)[-1].state == "lost"


def test_the_table_counts_states_in_words(log_dir, capsys):
    assert run_list.main([str(log_dir)]) == 0
    out = capsys.readouterr().out
    assert "4 runs: 1 target reached" in out and "1 interrupted" in out
    assert "run_b" in out and COMMIT[:9] in out


def set_keys(log_dir, run, **keys):
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    (log_dir / "toy" / run / "config.toml").write_text(text)


def test_a_key_in_which_runs_differ_is_a_column(log_dir, capsys):
    set_keys(log_dir, "run_a", gpu="CPU", weight_decay=0.1, schedule="cosine", max_samples=64)
    set_keys(log_dir, "run_b", gpu="H200", weight_decay=0.1, schedule="linear", max_samples=128)
    rows = run_list.rows_of(log_dir)
    columns = run_list.columns_of(rows)
    added = {column.head: column.is_text for column in columns[len(run_list.COLUMNS) :]}
    assert added == {"schedule": True, "max_samples": False}
    assert run_list.cells(rows[1], columns)[-2:] == ["linear", "128"]
    assert run_list.cells(rows[3], columns)[-2:] == ["-", "-"], "a lost run without a config"
    assert run_list.main([str(log_dir)]) == 0
    assert "max_samples" in capsys.readouterr().out
    page = run_list_page.run_list_page(rows, log_dir)
    assert "max_samples" in page and "weight_decay" not in page


def test_shipped_configs_are_told_apart_by_their_names(tmp_path):
    """A column only for keys in which runs with the same file of configs/ differ."""
    for series, config, batch in (("a", "H200_1x8", 32), ("b", "B200_1x8", 16), ("c", "mine", 8)):
        folder = tmp_path / "llama31_8b"
        add_run(folder, series)
        path = folder / ledger.NAME
        path.write_text(path.read_text().replace("CPU_1x1.toml", f"{config}.toml"))
        (folder / f"run_{series}/config.toml").write_text(f"global_batch_size = {batch}\n")
        for line in path.read_text().splitlines():
            assert "CPU_1x1" not in line
    rows = run_list.rows_of(tmp_path)
    rows = [replace(row, config=name) for row, name in zip(rows, NAMES, strict=True)]
    assert len(run_list.columns_of(rows)) == len(run_list.COLUMNS)
    rows[1] = replace(rows[1], config="H200_1x8+modified.toml")
    assert run_list.columns_of(rows)[-1].head == "global_batch_size"


NAMES = ("H200_1x8.toml", "B200_1x8.toml", "mine.toml")


@pytest.mark.parametrize("column", run_list.COLUMNS, ids=lambda column: column.head)
def test_a_column_of_numbers_is_right_aligned(log_dir, column):
    cells = [column.value(row) for row in run_list.rows_of(log_dir)]
    numbers = [cell for cell in cells if cell.replace(".", "").replace(",", "").isdecimal()]
    if numbers and column.head != "commit":
        assert not column.is_text


def test_json(log_dir, capsys):
    assert run_list.main([str(log_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[1]["state_words"] == words("success") and rows[1]["minutes"] == 2.5


def test_no_runs_and_no_directory(tmp_path, capsys):
    assert run_list.main([str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out
    assert run_list.main([str(tmp_path / "absent")]) == 2


def test_every_kind_of_failure_has_words():
    from common import errors

    kinds = {error.kind for error in errors.RunError.__subclasses__()} | {"internal"}
    assert kinds <= WORDS.keys()


def test_runs_of_an_archive_are_found_through_links(log_dir, tmp_path, capsys):
    rows = run_list.rows_of(log_dir)
    (log_dir / "toy/run_b").rename(tmp_path / "moved")
    (log_dir / "toy/run_b").symlink_to(tmp_path / "moved")
    assert run_list.rows_of(log_dir) == rows
    (tmp_path / "other/archive/2026").mkdir(parents=True)
    (tmp_path / "other/archive/2026/toy").symlink_to(log_dir / "toy")
    (tmp_path / "other/archive/2026/loop").symlink_to(tmp_path / "other")
    found = run_list.rows_of(tmp_path / "other")
    assert [(row.run, row.state) for row in found] == [(row.run, row.state) for row in rows]


def test_runs_without_a_ledger_are_listed_by_their_files(tmp_path, capsys):
    for name in ("good", "failed", "killed"):
        (tmp_path / "archive" / name).mkdir(parents=True)
        log = write_good(tmp_path / "archive" / name / "result.txt", LORA.rules.CLOSED)
        if name != "good":
            write_records(log, records(log)[:-1])
    (tmp_path / "archive/failed/failure.json").write_text('{"kind": "hang", "what": "no beat"}')
    folder = tmp_path / "results/llama2_70b_lora"
    folder.mkdir(parents=True)
    for path in (tmp_path / "archive").iterdir():
        (folder / path.name).symlink_to(path)
    for directory in (folder, folder.parent):
        assert run_list.main([str(directory), "--json"]) == 0
        rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
        states = {name: row["state"] for name, row in rows.items()}
        assert states == {"good": "success", "failed": "hang", "killed": "lost"}
        assert rows["good"]["seed"] == 3_123_456_789 and rows["good"]["started"][:2] == "20"
        assert "no beat" in rows["failed"]["reason"]
    for argument in (folder / "good", folder / "good/result.txt"):
        assert run_list.main([str(argument), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == [rows["good"]]
