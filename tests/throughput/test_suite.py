"""Test `throughput suite`: separate processes, rows for failed parts, and continuation."""

import argparse
import importlib
import json
import os
import sys
import time

import pytest
from pseudo_terminal import PseudoTerminal

from common.errors import CheckFailed, ConfigError, DataError, Interrupted
from launch.processes.supervise import Ending
from throughput import baseline, llama_case, options, result, suite
from throughput.__main__ import MEASUREMENTS, parser
from throughput.suite import SuitePart

pytestmark = pytest.mark.quick

MLP = "mlp --steps 1 --warmup 1 --batch 2"


def asked(folder, quick=False, **more) -> argparse.Namespace:
    options = {"save_baseline": None, "against": None, "tolerance": None} | more
    return argparse.Namespace(out=folder, quick=quick, device="cpu", gpus=None, **options)


@pytest.fixture
def commands(monkeypatch):
    """Commands that the suite started. Each ends with its code in `codes` (default: 0)."""
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
            SuitePart("a", "gemm --x {gpus}", "gemm", 60, 5),
            SuitePart("b", "mlp", "", 120, 0),
            SuitePart("c", "copy", "copy", 9, 9),
        ),
    )
    return started, codes


@pytest.mark.slow
def test_a_part_that_breaks_is_a_row_and_the_others_are_measured(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(
        suite,
        "PARTS",
        (SuitePart("broken", "gpt --sweep --batch 1", "", 1, 1), SuitePart("mlp", MLP, MLP, 1, 1)),
    )
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    assert suite.main(asked(tmp_path / "s")) == 2
    table = (tmp_path / "s" / "table.md").read_text()
    assert "| broken | failed, exit code 2: --batch and --sweep" in table, "the page says why"
    assert "| mlp | succeeded |" in table and "Date" in table
    assert "## mlp:" in table
    assert "MI350X" not in table, "nothing is published for a CPU"
    assert (tmp_path / "s" / "page.html").is_file() and (
        tmp_path / "s" / "mlp" / "page.html"
    ).is_file()
    assert "error: --batch and --sweep" in capfd.readouterr().err


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
    assert "failed, exit code" not in table
    places = [table.index(f"| {name} | succeeded") for name in "abc"]
    assert places == sorted(places)


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
    with pytest.raises(ConfigError, match="another suite"):
        suite.main(asked(tmp_path / "s", quick=True))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains files"):
        suite.main(asked(tmp_path / "other"))
    (tmp_path / "s" / "suite.json").write_text(json.dumps({"quick": False}))
    with pytest.raises(DataError):
        suite.main(asked(tmp_path / "s"))


def test_time_left_is_corrected_by_the_time_spent(commands):
    assert suite.time_left({}, quick=False) == "; about 3 min left"  # 189 s
    # 129 s, four times as slow.
    assert suite.time_left({"a": {"seconds": 240.0}}, quick=False) == "; about 9 min left"
    assert suite.time_left({"a": {"seconds": 60.0}, "b": {"seconds": 120.0}}, quick=False) == ""


def test_gpus_are_doubled_up_to_all():
    assert [suite.doubled(count) for count in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_the_quick_parts_of_a_cpu_ask_for_layers_that_its_model_has(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        suite, "supervise", lambda command, *_: started.append(command) or Ending(0)
    )
    suite.main(asked(tmp_path / "s", quick=True))
    words = next(command for command in started if "llama" in command)[3:]
    assert llama_case.model_of(parser().parse_args(words)).shape.num_layers == 4
    part = next(part for part in suite.PARTS if part.name == "llama_full")
    gpu = {"quick": True, "device": "cuda", "gpus": [1]}
    assert "--layers 8" in suite.run(part, tmp_path, gpu)["command"]


# --- headline and baseline ------------------------------------------------------------------------

PRODUCT = {"table": "gemm", "shape": "8x8x8", "call": "matmul", "library": "cublas"}
STEP = {
    "table": "llama",
    "model": "llama3.1-8b",
    "mode": "full",
    "precision": "fp8",
    "layers": 32,
    "gpus": 2,
}
REDUCTION = {"table": "collectives", "name": "all-reduce, 2 ranks", "mib": 1024.0}


def rows_of(what: str, rate: float) -> list[dict]:
    """Rows as the measurement `what` would add them on two GPUs whose products reach `rate`."""
    if what == "gemm":
        bf16 = PRODUCT | {"precision": "bf16", "tflops": rate}
        return [bf16, PRODUCT | {"precision": "fp8", "tflops": 2 * rate}]
    if what == "llama":
        return [STEP | {"tokens_per_s_per_gpu": 10 * rate, "tokens_per_s": 20 * rate}]
    return [REDUCTION | {"bus_gb_per_s": rate / 2}]


@pytest.fixture
def on_gpus(monkeypatch):
    """Return a function that runs a suite whose products reach `rate` TFLOP/s.

    `again`: the rate of a part that is measured a second time (default: the same).
    """
    parts = tuple(SuitePart(name, name, name, 1, 1) for name in ("gemm", "llama", "scaling"))
    monkeypatch.setattr(suite, "PARTS", parts)

    def start(folder, rate, fails="", kind="H200", again=None, **options):
        def pretend(command, environment, run_dir):
            what = command[3]
            second = run_dir.name.endswith(suite.AGAIN)
            tables = importlib.import_module(f"throughput.{what}").TABLES
            facts = {"gpu": f"NVIDIA {kind}", "kind": kind}
            made = result.Result(what, tables, run_dir, "cuda", facts, {"commit": "abc"})
            for row in rows_of(what, again if again and second else rate):
                made.add(row | ({"error": "out of memory"} if what == fails else {}))
            return Ending(0)

        monkeypatch.setattr(suite, "supervise", pretend)
        return suite.main(asked(folder, **options))

    return start


def test_the_headline_holds_best_products_the_8b_and_all_reduce(tmp_path, on_gpus, capsys):
    assert on_gpus(tmp_path / "s", 100.0) == 0
    table = (tmp_path / "s" / "table.md").read_text()
    page = (tmp_path / "s" / "page.html").read_text()
    for text in ("100 TFLOP/s", "200 TFLOP/s", "2,000 tokens/s", "50 GB/s", "NVIDIA H200"):
        assert text in table and text in page
    assert table.index("llama3.1-8b") < table.index("## Machine and software")
    assert time.strftime("%Y-") in table.splitlines()[0] and 'class="tiles"' in page
    assert "200 TFLOP/s" in capsys.readouterr().out


def test_a_slower_row_fails_against_a_saved_baseline(tmp_path, on_gpus):
    file = tmp_path / "base.json"
    assert on_gpus(tmp_path / "first", 100.0, save_baseline=file) == 0
    against = {"against": str(file)}
    assert on_gpus(tmp_path / "same", 98.0, **against) == 0, "2 % below, of 3 % tolerated"
    with pytest.raises(CheckFailed, match="2 rows") as caught:
        on_gpus(tmp_path / "slow", 96.0, **against)
    for words in ("llama3.1-8b", "960 (-4.0%)", "all-reduce"):
        assert words in caught.value.why
    assert f"{tmp_path}/slow/page.html" in caught.value.do
    assert on_gpus(tmp_path / "wide", 96.0, **against, tolerance=0.05) == 0
    assert on_gpus(tmp_path / "faster", 300.0, **against) == 0
    slow = (tmp_path / "slow" / "table.md").read_text()
    assert "FAIL: 2 of 2 rows, 2 more not judged" in slow and "-4.0%" in slow
    # The finished suite can be compared again without measuring.
    with pytest.raises(CheckFailed):
        suite.main(asked(tmp_path / "slow", **against))


def test_a_row_that_failed_here_fails_and_one_that_was_not_measured_does_not(tmp_path, on_gpus):
    file = tmp_path / "base.json"
    on_gpus(tmp_path / "first", 100.0, save_baseline=file)
    data = json.loads(file.read_text())
    data["rows"].append({"table": "mlp", "keys": {"batch": 1}, "column": "ms", "value": 1.0})
    file.write_text(json.dumps(data))
    assert on_gpus(tmp_path / "same", 100.0, against=str(file)) == 0
    assert "not measured" in (tmp_path / "same" / "table.md").read_text()
    with pytest.raises(CheckFailed, match="1 row ") as caught:
        on_gpus(tmp_path / "fails", 100.0, fails="llama", against=str(file))
    assert "llama3.1-8b" in caught.value.why and "out of memory" in caught.value.why
    assert "FAIL: 1 of 2 rows" in (tmp_path / "fails" / "table.md").read_text()
    data["rows"] = data["rows"][-1:]
    file.write_text(json.dumps(data))
    with pytest.raises(CheckFailed, match="no judged row in common"):
        on_gpus(tmp_path / "none", 100.0, against=str(file))


def test_a_single_product_is_shown_and_not_judged_unless_it_failed(tmp_path, on_gpus, monkeypatch):
    file = tmp_path / "base.json"
    on_gpus(tmp_path / "first", 100.0, save_baseline=file)
    data = json.loads(file.read_text())
    for row in data["rows"]:
        if row["table"] == "gemm":
            row["value"] *= 1.2
    file.write_text(json.dumps(data))
    assert on_gpus(tmp_path / "same", 100.0, against=str(file)) == 0
    table = (tmp_path / "same" / "table.md").read_text()
    assert "PASS: 2 rows, 2 more not judged" in table and "-16.7%" in table
    assert on_gpus(tmp_path / "strict", 100.0, against=str(file), tolerance=0.0) == 0
    with pytest.raises(CheckFailed, match="2 rows"):
        on_gpus(tmp_path / "fails", 100.0, fails="gemm", against=str(file))


def test_a_part_with_a_suspicious_row_is_measured_again_before_it_is_judged(tmp_path, on_gpus):
    file = tmp_path / "base.json"
    on_gpus(tmp_path / "first", 100.0, save_baseline=file)
    against = {"against": str(file)}
    assert on_gpus(tmp_path / "noise", 96.0, again=99.0, **against) == 0
    parts = json.loads((tmp_path / "noise" / "suite.json").read_text())["parts"]
    assert list(parts) == ["gemm", "llama", "scaling", "llama.again", "scaling.again"]
    assert on_gpus(tmp_path / "noise", 0.0, **against) == 0, "nothing is measured a third time"
    with pytest.raises(CheckFailed, match="2 rows"):
        on_gpus(tmp_path / "slow", 96.0, again=96.5, **against)
    assert "-3.5%" in (tmp_path / "slow" / "table.md").read_text(), "the better one counts"
    assert on_gpus(tmp_path / "good", 99.0, **against) == 0
    assert not list((tmp_path / "good").glob("*.again"))
    # The first measurement is saved.
    new = tmp_path / "new.json"
    assert on_gpus(tmp_path / "both", 96.0, again=99.0, save_baseline=new, **against) == 0
    assert {row.value for row in baseline.read(new).rows} == {96.0, 192.0, 960.0, 48.0}


def test_a_row_has_the_first_limit_that_agrees_with_it(tmp_path, on_gpus, monkeypatch):
    limits = tmp_path / "limits.json"
    measured = [{"table": "llama", "keys": {"precision": "fp8", "layers": 32}, "limit": 0.06}]
    declared = [
        {"table": "llama", "keys": {}, "limit": 0.01},
        {"table": "collectives", "keys": {}, "limit": None},
    ]
    limits.write_text(json.dumps({"source": "", "measured": measured, "declared": declared}))
    monkeypatch.setattr(baseline, "LIMITS", limits)
    file = tmp_path / "base.json"
    on_gpus(tmp_path / "first", 100.0, save_baseline=file)
    with pytest.raises(CheckFailed, match="2 rows") as caught:
        on_gpus(tmp_path / "s", 95.0, against=str(file))
    assert "gemm" in caught.value.why and "llama" not in caught.value.why, "gemm: TOLERANCE"
    with pytest.raises(CheckFailed, match="3 rows"):
        on_gpus(tmp_path / "t", 93.0, against=str(file))
    with pytest.raises(CheckFailed, match="3 rows"):
        on_gpus(tmp_path / "tolerance", 95.0, against=str(file), tolerance=0.02)


def recorded(reference: baseline.Baseline, factor: float, steps: float = 1.0) -> dict[str, dict]:
    """Return `reference` as the result of a part, its rows multiplied by `factor`.

    `steps`: a further factor for training steps.
    """
    rows = []
    for row in reference.rows:
        value = row.value * factor * (steps if row.table in ("llama", "gpt", "flux") else 1.0)
        rows.append({"table": row.table} | row.keys | {row.column: value})
    return {"all": {"tables": suite.declared_tables(), "rows": rows}}


def test_a_slowdown_of_recorded_results_is_caught_and_a_small_difference_is_not():
    reference = baseline.find("H200", suite.declared_tables())
    for results in (recorded(reference, 1.0), recorded(reference, 0.985)):
        verdicts = baseline.compare(reference, results, None)
        assert baseline.summary(verdicts).startswith("PASS: ")
    for results in (recorded(reference, 0.88), recorded(reference, 1.0, steps=0.88)):
        verdicts = baseline.compare(reference, results, None)
        failed = {row.name.partition(":")[0] for row in verdicts if row.verdict == baseline.FAIL}
        assert {"llama", "gpt", "flux"} <= failed and "gemm" not in failed


def test_the_shipped_limits_agree_with_rows_of_a_table():
    tables = {table.name: table for table in suite.declared_tables()}
    for entry in baseline.read_limits():
        assert entry["keys"].keys() <= set(tables[entry["table"]].keys)
        assert entry["limit"] is None or 0 < entry["limit"] <= 0.1


def test_another_kind_of_device_than_that_of_the_baseline_is_noted_first(tmp_path, on_gpus, capsys):
    file = tmp_path / "base.json"
    on_gpus(tmp_path / "first", 100.0, save_baseline=file)
    on_gpus(tmp_path / "same", 100.0, against=str(file))
    [note] = [line for line in capsys.readouterr().err.splitlines() if "NOTE" in line]
    assert "H200" in note and "CPU" in note, "these options ask for the CPU"
    file.write_text(file.read_text().replace('"gpu": "H200"', '"gpu": "CPU"'))
    on_gpus(tmp_path / "cpu", 100.0, against=str(file))
    assert "NOTE" not in capsys.readouterr().err


def test_a_kind_of_gpu_is_a_baseline(tmp_path, on_gpus):
    tables = suite.declared_tables()
    published = baseline.find("mi325x", tables)
    assert published.gpu == "MI325X" and {row.table for row in published.rows} == {"llama"}
    assert "two H200s" in baseline.find("H200", tables).source
    with pytest.raises(ConfigError, match="H201"):
        on_gpus(tmp_path / "s", 1.0, against="H201")
    assert not (tmp_path / "s").exists(), "refused before anything is measured"


def test_baseline_files_are_checked_before_anything_is_measured(tmp_path, on_gpus):
    file = tmp_path / "base.json"
    file.write_text("[]")
    with pytest.raises(DataError, match="not a baseline"):
        on_gpus(tmp_path / "s", 1.0, against=str(file))
    row = {"table": "llama", "keys": {"seq": 8192}, "column": "tokens_per_s", "value": 1.0}
    for spoilt in ({"value": 0}, {"value": None}, {"value": "1"}, {"keys": None}):
        file.write_text(json.dumps({"gpu": "H200", "source": "", "rows": [row | spoilt]}))
        with pytest.raises(DataError, match="not a baseline"):
            on_gpus(tmp_path / "s", 1.0, against=str(file))
    with pytest.raises(ConfigError, match="--save-baseline"):
        on_gpus(tmp_path / "s", 1.0, save_baseline=file)
    with pytest.raises(ConfigError, match="--save-baseline"):
        on_gpus(tmp_path / "s", 1.0, save_baseline=tmp_path / "missing" / "base.json")
    assert not (tmp_path / "s").exists()


def test_a_suite_with_a_failed_part_saves_no_baseline(tmp_path, commands):
    _, codes = commands
    codes["mlp"] = 1
    assert suite.main(asked(tmp_path / "s", save_baseline=tmp_path / "base.json")) == 1
    assert not (tmp_path / "base.json").exists()


def test_a_tolerance_without_a_baseline_is_refused(tmp_path, commands):
    with pytest.raises(ConfigError, match="--tolerance without --against"):
        suite.main(asked(tmp_path / "s", tolerance=0.05))
    assert not (tmp_path / "s").exists()


def test_a_tolerance_is_a_percentage():
    assert options.percentage("2.5%") == 0.025
    for text in ("3", "0.03", "-1%", "x%"):
        with pytest.raises(argparse.ArgumentTypeError):
            options.percentage(text)


@pytest.mark.parametrize("part", suite.PARTS, ids=lambda part: part.name)
def test_the_commands_of_the_parts_are_understood(part):
    for words in filter(None, (part.arguments, part.quick)):
        chosen = words.format(gpus="1,2", layers="--layers 8").split()
        assert parser().parse_args(chosen).name in MEASUREMENTS


def test_the_suite_measures_everything():
    assert {part.arguments.split()[0] for part in suite.PARTS} == set(MEASUREMENTS)


def test_on_a_terminal_a_part_is_one_bar_and_its_rows_go_to_a_log(tmp_path, monkeypatch):
    terminal = PseudoTerminal(60)
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setenv("TERM", "xterm")

    def rows(command, environment, folder, stop, stdout, stderr):
        folder.mkdir()
        stdout.write("row 1\nrow 2\n")
        time.sleep(0.2)
        stop()
        assert "gemm" in terminal.screen()[0] and "row" not in terminal.screen()[0]
        return Ending(3)

    monkeypatch.setattr(suite, "supervise", rows)
    part = SuitePart("gemm", "gemm", "gemm", 1, 1)
    found = suite.run(part, tmp_path, {"quick": True, "device": "cpu", "gpus": [1]})
    assert found["exit_code"] == 3 and (tmp_path / "gemm.log").read_text() == "row 1\nrow 2\n"
    assert terminal.screen()[:2] == ["row 1", "row 2"], "a failed part shows the end of its log"
