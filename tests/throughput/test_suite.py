"""`throughput suite`: parts in processes of their own, a crash is a row, and it goes on where it was interrupted."""

import argparse
import json
import os

import pytest

from common.command_line import Parser
from common.errors import ConfigError, DataError, Interrupted
from launch.processes.supervise import Ending
from throughput import suite
from throughput.__main__ import MEASUREMENTS
from throughput.suite import Part

pytestmark = pytest.mark.quick

MLP = "mlp --steps 1 --warmup 1 --batch 2"


def asked(folder, quick=False) -> argparse.Namespace:
    return argparse.Namespace(out=folder, quick=quick, device="cpu", gpus=None)


@pytest.fixture
def commands(monkeypatch):
    """Commands that the suite started; each ends with the code that `codes` holds for its measurement, else with 0."""
    started, codes = [], {}

    def pretend(command, environment, folder):
        started.append(command[3:])
        folder.mkdir()
        code = codes.get(command[3], 0)
        return Ending(-15, signal_number=15) if code == "signal" else Ending(code)

    monkeypatch.setattr(suite, "supervise", pretend)
    monkeypatch.setattr(
        suite,
        "PARTS",
        (
            Part("a", "gemm --x {gpus}", "gemm", 60, 5),
            Part("b", "mlp", "", 120, 0),
            Part("c", "copy", "copy", 9, 9),
        ),
    )
    return started, codes


def test_a_part_that_breaks_is_a_row_and_the_others_are_measured(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(
        suite,
        "PARTS",
        (Part("broken", "gemm --shape 0x0x0", "", 1, 1), Part("mlp", MLP, MLP, 1, 1)),
    )
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    assert suite.main(asked(tmp_path / "s")) == 2
    table = (tmp_path / "s" / "table.md").read_text()
    assert "| broken | failed, exit code 2 |" in table and "| mlp | ended |" in table
    assert "## mlp: Training steps of an MLP" in table and "MI350X" in table
    assert (tmp_path / "s" / "page.html").is_file() and (
        tmp_path / "s" / "mlp" / "page.html"
    ).is_file()
    assert "error: --shape 0x0x0" in capfd.readouterr().err


def test_it_goes_on_after_the_last_part_that_ended(tmp_path, commands, capsys):
    started, codes = commands
    codes["mlp"] = "signal"
    with pytest.raises(Interrupted):
        suite.main(asked(tmp_path / "s"))
    assert [words[0] for words in started] == ["gemm", "mlp"]
    del codes["mlp"]
    started.clear()
    assert suite.main(asked(tmp_path / "s")) == 0
    assert [words[0] for words in started] == ["mlp", "copy"]
    names = sorted(path.name for path in (tmp_path / "s").iterdir() if path.is_dir())
    assert names[:2] == ["a", "b"] and names[2].startswith("b.interrupted-") and names[3:] == ["c"]
    assert "part 2 of 3, b" in capsys.readouterr().out
    started.clear()
    assert suite.main(asked(tmp_path / "s")) == 0 and started == []


def test_it_repeats_what_failed(tmp_path, commands):
    started, codes = commands
    codes["mlp"] = 1
    assert suite.main(asked(tmp_path / "s")) == 1 and len(started) == 3
    del codes["mlp"]
    started.clear()
    assert suite.main(asked(tmp_path / "s")) == 0
    assert [words[0] for words in started] == ["mlp"]
    names = sorted(path.name for path in (tmp_path / "s").iterdir() if path.is_dir())
    assert names[:2] == ["a", "b"] and names[2].startswith("b.failed-") and names[3:] == ["c"]
    table = (tmp_path / "s" / "table.md").read_text()
    assert "failed, exit code" not in table and table.index("| a | ended") < table.index(
        "| b | ended"
    ) < table.index("| c | ended")


def test_quick_leaves_parts_out(tmp_path, commands):
    started, _ = commands
    assert suite.main(asked(tmp_path / "s", quick=True)) == 0
    assert [words[0] for words in started] == ["gemm", "copy"] and started[0][1:] == [
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "s" / "a"),
    ]


def test_a_signal_that_ends_a_part_is_its_exit_code(tmp_path, commands):
    started, codes = commands
    codes["gemm"] = -11
    assert suite.main(asked(tmp_path / "s")) == 139
    assert len(started) == 3 and "signal 11" in (tmp_path / "s" / "table.md").read_text()


def test_it_refuses_other_options_another_directory_and_a_spoilt_file(tmp_path, commands):
    suite.main(asked(tmp_path / "s"))
    with pytest.raises(ConfigError, match="holds another suite"):
        suite.main(asked(tmp_path / "s", quick=True))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds files"):
        suite.main(asked(tmp_path / "other"))
    (tmp_path / "s" / "suite.json").write_text(json.dumps({"quick": False}))
    with pytest.raises(DataError):
        suite.main(asked(tmp_path / "s"))


def test_time_left_is_corrected_by_the_time_spent(commands):
    assert suite.time_left({}, quick=False) == "; about 3 min left"  # 189 s
    assert (
        suite.time_left({"a": {"seconds": 240.0}}, quick=False) == "; about 9 min left"
    )  # 129 s, four times as slow
    assert suite.time_left({"a": {"seconds": 60.0}, "b": {"seconds": 120.0}}, quick=False) == ""


def test_gpus_are_doubled_up_to_all():
    assert [suite.doubled(count) for count in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


@pytest.mark.parametrize("part", suite.PARTS, ids=lambda part: part.name)
def test_the_commands_of_the_parts_are_understood(part):
    import importlib

    for words in filter(None, (part.words, part.quick)):
        what, *rest = words.format(gpus="1,2").split()
        assert what in MEASUREMENTS
        parser = Parser("throughput x")
        importlib.import_module(f"throughput.{what}").add_arguments(parser)
        parser.parse_args(rest)


def test_the_suite_measures_everything():
    assert {part.words.split()[0] for part in suite.PARTS} == set(MEASUREMENTS)
