"""The ledger keeps whole lines, whatever happens while one is written."""

import json
import resource

import pytest

from common.errors import StorageError
from common.records import ledger

pytestmark = pytest.mark.quick

SERIES = {"event": "series", "series": "s", "goal": 2, "facts": {}}


def opened(path, number=1, **more):
    return {
        "event": "start",
        "series": "s",
        "attempt": number,
        "run": f"r{number}",
        "seed": number,
    } | more


def test_a_line_cut_short_spoils_itself_only(tmp_path):
    path = tmp_path / ledger.NAME
    ledger.append(path, SERIES)
    ledger.append(path, opened(path))
    with path.open("ab") as file:
        file.write(b'{"event": "end", "ser')
    ledger.append(path, opened(path, 2))
    (record,) = ledger.read(path)
    assert sorted(record.starts) == [1, 2] and not record.ends and record.seeds == {1, 2}
    assert len(record.open_starts) == 2 and not ledger.read(tmp_path / "absent")


@pytest.mark.parametrize("damage", ["", "{", '{"event": "series", "series": "s", "goal": 2}'])
def test_a_series_without_its_first_line_keeps_its_attempts(damage, tmp_path):
    path = tmp_path / ledger.NAME
    for line in (SERIES, opened(path), opened(path, 2)):
        ledger.append(path, line)
    _, *others = path.read_text().splitlines()
    path.write_text("\n".join([damage, *others, ""]))
    (record,) = ledger.read(path)
    assert (record.id, record.goal, record.identity) == ("s", 2, {})
    assert sorted(record.starts) == sorted(record.order) == [1, 2]
    assert ledger.choose(path, "s").starts == record.starts


BAD = [
    {"event": "start", "series": "s", "attempt": "1", "run": "r", "seed": 1},
    {"event": "start", "series": "s", "attempt": 1, "run": "../../etc", "seed": 1},
    {"event": "start", "series": "s", "attempt": 1, "run": "r", "seed": None},
    {"event": "start", "series": ["s"], "attempt": 1, "run": "r", "seed": 1},
    {"event": ["start"], "series": "s"},
    {"event": "end", "series": "s", "attempt": 1, "run": "r1", "kind": "lost", "reason": ""},
    {"event": "goal", "series": "s", "goal": "ten"},
    {"event": "closed", "series": "another"},
    {"event": "series", "series": "t", "goal": 2, "facts": None},
]


def test_lines_of_a_wrong_shape_are_skipped(tmp_path):
    path = tmp_path / ledger.NAME
    lines = [SERIES, *BAD, opened(path, 2), [1], None, 7]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[" * 100_000 + "\n")
    (record,) = ledger.read(path)
    assert (
        record.id == "s"
        and record.goal == 2
        and sorted(record.starts) == [2]
        and not record.ends
        and not record.closed
    )


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path):
    path = tmp_path / ledger.NAME
    ledger.append(path, SERIES)
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(StorageError, match="ledger") as caught:
            ledger.append(path, opened(path, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 17 and path.read_bytes() == before


def test_a_ledger_that_was_moved_is_not_begun_anew(tmp_path):
    """A line without its series would be lost."""
    with pytest.raises(StorageError, match="ledger"):
        ledger.append(tmp_path / ledger.NAME, opened(tmp_path))
    assert not (tmp_path / ledger.NAME).exists()


def test_a_series_whose_id_names_no_file_is_skipped(tmp_path):
    path = tmp_path / ledger.NAME
    lines = [
        {"event": "series", "series": name, "goal": 1, "facts": {}}
        for name in ("a\0b", "../a", "\ud800", "", "good-1")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [record.id for record in ledger.read(path)] == ["good-1"]


def test_a_run_whose_directory_names_no_file_is_skipped(tmp_path):
    path = tmp_path / ledger.NAME
    lines = [{"event": "series", "series": "s", "goal": 1, "facts": {}}]
    for attempt, run in enumerate(("a\0b", "../a", "\ud800", "", "..", "good-1")):
        lines.append({"event": "start", "series": "s", "attempt": attempt, "run": run, "seed": 1})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (record,) = ledger.read(path)
    assert [start["run"] for start in record.starts.values()] == ["good-1"]
