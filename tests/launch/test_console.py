"""The lines that a user reads before a run."""

from dataclasses import replace
from pathlib import Path

import pytest
from probes import MI300X, make_visible

from common.benchmarks import rules_of
from common.gpu_kinds import GIB
from common.machine.hardware import Device, Probe
from common.records.ledger import SeriesRecord
from launch import bench, console, job, profile, run_command
from launch.selection.choose import choose
from launch.selection.machine import NO_GPUS, Machine
from launch.selection.request import Request
from launch.tune import command as tune
from llama2_70b_lora import rules as lora_rules
from llama31_8b.rules import CLOSED, MINIATURE

pytestmark = pytest.mark.quick


def print_command(command, *words: str) -> None:
    """Start a command of llama31_8b with --print."""
    options = command.parser("llama31_8b").parse_args(["--print", *words])
    assert command.start("llama31_8b", options) == 0


def test_the_header_names_config_data_and_results_and_that_a_miniature_is_no_result():
    choice = choose(Request("llama31_8b"), NO_GPUS)
    lines = console.header("llama31_8b", choice, MINIATURE, (Path("/data"), Path("/results")))
    assert lines[0] == "No GPU found." and "NOT a benchmark" in lines[1] and len(lines[1]) < 80, (
        "a line of the narrowest terminal"
    )
    text = "\n".join(lines[2:])
    assert all(
        words in text
        for words in ("llama31_8b", "CPU_1x1.toml", str(MINIATURE.target_loss), "/data", "/results")
    )
    assert "/data" not in "\n".join(console.header("llama31_8b", choice, MINIATURE, None))


@pytest.mark.parametrize(("goal", "resumes"), [(1, False), (2, True)])
def test_only_a_series_that_can_be_resumed_is_told_to(goal, resumes):
    """launch/series.py resumes no series of one run, which --max-failures may repeat."""
    record = SeriesRecord("id", goal, {})
    for attempt in (1, 2):
        start = {"event": "start", "attempt": attempt}
        record.add(start)
        missed = {"exit_code": 10, "kind": "target_missed", "reason": "missed"}
        record.add({**start, "event": "end", **missed})
    lines = console.series_closing("llama31_8b", Path("/results"), record, False)
    command = "./run_and_time.sh llama31_8b --resume"
    assert any(command in line for line in lines) == resumes
    assert lines[-1].startswith("next ")


def test_the_header_names_the_size_of_the_model():
    choice = choose(Request("llama31_8b"), NO_GPUS)
    lines = console.header("llama31_8b", choice, CLOSED, None)
    assert "model      8,030,261,248 parameters in 32 layers" in lines
    adapters = console.header("llama2_70b_lora", choice, lora_rules.CLOSED, None)
    assert any(
        "68,976,648,192 frozen parameters" in line and "rank 16" in line for line in adapters
    )


def test_the_header_says_from_what_a_config_was_derived():
    found = Probe("amd", (Device("AMD Instinct MI300X", "gfx942", 192 * GIB, 304),) * 2)
    choice = choose(Request("llama31_8b"), Machine(found))
    lines = console.header("llama31_8b", choice, CLOSED, None)
    assert (
        "config     derived for 2 x MI300X from MI300X_1x8.toml: micro_batch_size 2, because 2 x "
        "MI300X found" in lines
    )
    assert any(line.startswith("NOTE") and "not for submission" in line for line in lines)


def test_the_header_names_a_config_that_was_fitted_to_the_machine():
    path = "open_llama/examples/stdlib_10m.toml"
    request = Request("open_llama", file=path, device="cpu")
    choice = choose(request, NO_GPUS)
    lines = console.header("open_llama", choice, rules_of("open_llama", choice.config), None)
    assert any(
        "stdlib_10m.toml fitted to a CPU in fp32: micro_batch_size" in line for line in lines
    )
    in_fp8 = replace(request, overrides={"linear": "fp8"})
    assert "bf16" not in choose(in_fp8, NO_GPUS).derived, "a CPU computes in fp32"


def test_bench_profile_and_run_derive_the_kind_of_an_unknown_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    make_visible(monkeypatch, Probe("nvidia", (Device("NVIDIA R100", "sm_103", 180 * GIB),) * 2))
    for command in (bench, profile):
        print_command(command)
        assert "--config DIR/NVIDIA_R100_1x2+derived.toml --device cuda" in capsys.readouterr().out
    print_command(run_command)
    screen = capsys.readouterr()
    assert "--config-name NVIDIA_R100_1x2+derived.toml" in screen.out
    assert "derived GPU kind: NVIDIA_R100" in screen.err and "no MFU" in screen.err


def test_print_says_that_torch_is_not_built_for_the_gpus(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    make_visible(monkeypatch, Probe("amd", MI300X.devices, "6.16.13"))
    versions = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr("launch.job_command.installed", lambda driver: versions)
    for command in (run_command, bench, tune):
        print_command(command)
        printed = capsys.readouterr().err
        (note,) = [line for line in printed.splitlines() if "torch 2.13.0+cpu" in line]
        assert note.startswith("NOTE") and "not built for ROCm" in note
    versions["rocm"] = "7.2"
    print_command(run_command)
    assert "not built for ROCm" not in capsys.readouterr().err


def test_a_run_says_on_its_first_screen_that_package_would_refuse_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    make_visible(
        monkeypatch, Probe("nvidia", (Device("NVIDIA H200", "sm_90", 143771 * 2**20),) * 4)
    )
    note = "NOTE       MLPERF_SUBMISSION_ORG is not set: package will refuse these runs"
    print_command(run_command)
    assert note in capsys.readouterr().err.splitlines()
    for command, arguments in ((bench, []), (run_command, ["--device", "cpu"])):
        print_command(command, *arguments)
        assert "package will refuse" not in capsys.readouterr().err


def test_ranks_are_bound_where_the_topology_says_so_and_the_first_screen_tells(
    monkeypatch, capsys, tmp_path
):
    """Ranks are bound in a run and in a bench, but not on a CPU."""
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    make_visible(
        monkeypatch, Probe("nvidia", (Device("NVIDIA H200", "sm_90", 143771 * 2**20),) * 2)
    )
    monkeypatch.setattr(
        job,
        "cpus_of_ranks",
        lambda found, ranks: [
            f"{12 * k}-{12 * k + 11}" for k in range(min(ranks, len(found.devices)))
        ],
    )
    for command, program in ((run_command, "llama31_8b.train"), (bench, "common.measure.bench")):
        print_command(command)
        said = capsys.readouterr()
        assert f"--nproc-per-node 2 -m launch.processes.ranks 0-11/12-23 {program} " in said.out
        assert "CPUs " in said.err and " 12 " in said.err
    print_command(run_command, "--device", "cpu")
    said = capsys.readouterr()
    assert "launch.processes.ranks" not in said.out and "CPUs " not in said.err
