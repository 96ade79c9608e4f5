"""Test the command line of `throughput`: names, options, directories, and declared columns."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from common.command_line import Parser
from common.errors import ConfigError
from common.machine.hardware import Device, Probe
from common.measure import published
from common.paths import ROOT
from launch.cli import read
from throughput import shared_options
from throughput.__main__ import MEASUREMENTS, SUBCOMMANDS, main, parser

pytestmark = pytest.mark.quick

MLP = ["mlp", "--device", "cpu", "--steps", "1", "--warmup", "1", "--batch", "2"]


def three_lines(capsys) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert [line[:7] for line in lines] == ["error: ", "  why: ", "  do:  "]
    return lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "none"),
        (["mlp", "--steps", "0"], "--steps"),
        (["mlp", "--none"], "--none"),
        (["mlp", "--device", "tpu"], "tpu"),
        (["gemm", "--precision", "fp4"], "fp4"),
        (["gemm", "--device", "cpu", "--shape", "12x0x3"], "--shape: '12x0x3'"),
        (["gemm", "--device", "cpu", "--shape", f"{'9' * 5000}x1x1"], "--shape: '99"),
        (["suite", "--device", "cpu", "--gpus", "1,99999"], "--gpus 99999"),
        (["gpt", "--device", "cpu", "--batch", "max"], "--batch max"),
        (["flux", "--device", "cpu", "--batch", "max"], "--batch max"),
        (["llama", "--device", "cpu", "--batch", "max"], "--batch max"),
        (["tiles", "--out", "ignored"], "--out"),
    ],
)
def test_bad_input_is_one_error_in_three_lines(capsys, tmp_path, arguments, said):
    assert (
        main([*arguments, *(["--out", str(tmp_path / "out")] if "--device" in arguments else [])])
        == 2
    )
    assert said in three_lines(capsys)[0]


def test_without_torch_a_measurement_ends_with_what_to_do(tmp_path):
    """A package torch that holds nothing, as beside a driver without a fitting wheel."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "throughput", "scaling"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 18 and "Traceback" not in done.stderr
    assert "throughput scaling" in done.stderr and "torch" in done.stderr
    done = subprocess.run([*command, "--help"], env=environment, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "new"), [(["settings"], "tiles"), (["llama", "--tune", "1"], "--search")]
)
def test_a_word_of_earlier_versions_is_refused_with_the_new_one(capsys, words, new):
    assert main(words) == 2
    what, why, do = three_lines(capsys)
    assert words[:2][-1] in what and new in why + do


def test_without_words_it_lists_the_measurements(capsys):
    assert main([]) == 2 and "measurement" in three_lines(capsys)[0]
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in SUBCOMMANDS)


def parser_of(what: str) -> Parser:
    return parser()._subparsers._group_actions[0].choices[what]


def test_the_launcher_checks_it_without_a_benchmark():
    assert read(["throughput", "gemm", "--precision", "fp8"])[1] == [
        "throughput.__main__",
        "gemm",
        "--precision",
        "fp8",
    ]
    with pytest.raises(ConfigError, match="--precison"):
        read(["throughput", "gemm", "--precison", "fp8"])
    with pytest.raises(ConfigError, match="benchmark"):
        read(["llama31_8b", "throughput"])


def test_a_result_is_written_once(tmp_path, capsys):
    assert main([*MLP, "--out", str(tmp_path / "a")]) == 0
    before = (tmp_path / "a" / "result.json").read_bytes()
    data = json.loads(before)
    assert (
        data["status"] == "finished"
        and data["machine"]
        and data["versions"]["torch"]
        and data["command"].startswith("python3 -m throughput")
    )
    assert (tmp_path / "a" / "table.md").is_file() and (tmp_path / "a" / "page.html").is_file()
    capsys.readouterr()
    assert main([*MLP, "--out", str(tmp_path / "a")]) == 2
    assert "contains files" in three_lines(capsys)[0]
    assert (tmp_path / "a" / "result.json").read_bytes() == before


def test_a_directory_without_a_measured_row_can_be_named_again(tmp_path, capsys):
    out = ["--out", str(tmp_path / "a")]
    assert main(["gpt", "--device", "cpu", "--batch", "2", "--sweep", *out]) == 2
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["failure.json"]
    capsys.readouterr()
    assert main([*MLP, *out]) == 0
    assert not (tmp_path / "a" / "failure.json").exists()


def test_a_signal_ends_it_in_three_lines_and_keeps_what_was_measured(tmp_path):
    command = [
        sys.executable,
        "-m",
        "throughput",
        "gemm",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "a"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode == 143
        and err.startswith("error: stopped by signal 15 (SIGTERM)\n")
        and "Traceback" not in err
    )
    data = json.loads((tmp_path / "a" / "result.json").read_text())
    assert data["status"] == "running" and data["rows"]


def test_without_out_it_goes_to_logdir(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    assert main(MLP) == 0
    assert [path.parent.name[:4] for path in tmp_path.glob("throughput/*/result.json")] == ["mlp-"]


@pytest.mark.parametrize("what", MEASUREMENTS)
def test_what_a_measurement_declares_fits_together(what):
    """Keys of tables and plots are columns, and published tables have the columns to match."""
    module = importlib.import_module(f"throughput.{what}")
    for table in module.TABLES:
        keys = [column.key for column in table.columns]
        assert len(keys) == len(set(keys)) and {
            *table.keys,
            table.value,
            *filter(None, [table.sort]),
        } <= set(keys)
        assert {
            key for plot in table.plots for key in (*plot.x.split(", "), plot.y, plot.by)
        } <= set(keys)
        assert isinstance(table.formulas, tuple)
        for wanted in table.published:
            columns = {column.key for column in published.tables()[wanted.table].columns}
            assert {*wanted.match, wanted.value} <= columns and set(wanted.match) <= set(keys)


# --- options --------------------------------------------------------------------------------------


def test_options_of_all_measurements():
    parser = Parser("throughput x")
    shared_options.add(parser, "precision", "steps", seq={"default": 1024}, batch={}, gpus={})
    chosen = parser.parse_args(["--batch", "max", "--gpus", "1,2,4"])
    assert (chosen.precision, chosen.steps, chosen.seq, chosen.batch, chosen.gpus) == (
        "bf16",
        20,
        1024,
        "max",
        [1, 2, 4],
    )
    assert parser.parse_args(["--batch", "8"]).batch == 8
    for words in (
        ["--batch", "some"],
        ["--gpus", "1,,2"],
        ["--gpus", "0"],
        ["--precision", "int8"],
    ):
        with pytest.raises(ConfigError):
            parser.parse_args(words)


@pytest.mark.parametrize("what", MEASUREMENTS)
def test_the_help_of_batch_names_max_only_if_it_is_accepted(what):
    (batch,) = [
        action for action in parser_of(what)._actions if "--batch" in action.option_strings
    ] or [None]
    if batch is not None:
        assert ("max" in batch.help) == (batch.type is shared_options.count_or_max)


@pytest.mark.parametrize(("device", "steps"), [("cuda", 100), ("cpu", 5)])
def test_a_default_may_depend_on_the_device(device, steps):
    mlp = parser_of("mlp")
    assert "100, on a CPU 5" in mlp.format_help()
    chosen = mlp.parse_args(["--device", device])
    shared_options.use_defaults(chosen)
    assert chosen.steps == steps
    chosen = mlp.parse_args(["--device", device, "--steps", "7"])
    shared_options.use_defaults(chosen)
    assert chosen.steps == 7


def test_gpus_and_device_must_be_there():
    two = Probe("nvidia", (Device("NVIDIA H200", "sm_90", 2**37),) * 2)
    shared_options.check_gpus([1, 2], "cuda", two)
    with pytest.raises(ConfigError, match="--gpus 4"):
        shared_options.check_gpus([1, 4], "cuda", two)
    assert shared_options.device_of(None, two) == "cuda"
    assert shared_options.device_of("cpu", two) == "cpu"
    assert shared_options.device_of(None, Probe("none")) == "cpu"
    with pytest.raises(ConfigError):
        shared_options.device_of("cuda", Probe("none"))
