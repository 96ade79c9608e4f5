"""profile --with TOOL: what it prints, the command that it starts, and what it refuses."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, PreflightError
from common.paths import ROOT
from launch import job_command, profile, profilers

TORCHRUN = [
    sys.executable,
    "-m",
    "launch.processes.torchrun",
    "DIR",
    "--nproc-per-node",
    "2",
    "-m",
    "common.measure.bench",
    "--device",
    "cuda",
]
EXPECTED = {
    "nsys": (
        "nsys profile --trace=cuda,nvtx,cublas,cudnn --sample=none --cpuctxsw=none "
        "--capture-range=cudaProfilerApi --capture-range-end=stop "
        "--output=/out/nsys --stats=true"
    ),
    "ncu": (
        "ncu --profile-from-start off --nvtx --target-processes all --set detailed "
        "--export /out/ncu --stats=true"
    ),
    "rocprofv3": (
        "rocprofv3 --kernel-trace --memory-copy-trace --rccl-trace --marker-trace --stats "
        "--output-format pftrace csv "
        "--output-directory /out --output-file rocprofv3 --stats=true --"
    ),
}


@pytest.mark.parametrize("name", profilers.TOOLS)
def test_rank_0_becomes_the_tool_and_the_others_the_program(name):
    command = profilers.wrapped(TORCHRUN, f"{name} --stats=true", Path("/out"))
    start = len(TORCHRUN) - 4
    assert command[:start] == TORCHRUN[:start]
    assert command[start : start + 3] == ["--no-python", "sh", "-c"]
    assert command[start + 4 :] == ["sh", sys.executable, *TORCHRUN[start:]]
    assert (
        command[start + 3]
        == f'if [ "$RANK" = 0 ]; then exec {EXPECTED[name]} "$@"; else exec "$@"; fi'
    )
    told = profilers.guide(name, Path("/out"))
    assert (
        "/out: " in told
        and profilers.TOOLS[name].result in told
        and profilers.TOOLS[name].opens in told
    )


@pytest.mark.parametrize(("name", "last"), [("nsys", "nsys"), ("ncu", "ncu"), ("rocprofv3", "")])
def test_a_directory_may_be_named_like_the_placeholders(name, last):
    out = Path("/LOGDIR/OUT")
    shell_command = profilers.wrapped(TORCHRUN, name, out)[len(TORCHRUN) - 4 + 3]
    assert str(out / last) in re.split("[ =]", shell_command)


def test_what_cannot_be_profiled_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="nsis") as refused:
        profilers.require("nsis", 1)
    assert "nsys" in refused.value.do
    with pytest.raises(ConfigError, match="2 ranks"):
        profilers.require("ncu", 2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PreflightError, match="rocprofv3") as refused:
        profilers.require("rocprofv3 --pmc SQ_WAVES", 8)
    assert "rocprofiler-sdk" in refused.value.do
    profilers.require("rocprofv3", 8, installed=False)  # --print


# Writes what it was called with, and becomes the program behind its last own option.
FAKE = """#!{python}
import json, os, sys
json.dump(sys.argv[1:], open(os.environ["FAKE_OUT"], "w"))
start = sys.argv.index({python!r})
os.execv(sys.argv[start], sys.argv[start:])
"""


# Leaves a file where a rank's interpreter is torn down, which gloo's threads now and then end with
# std::terminate.
WATCH = """
import atexit, os, sys
if "RANK" in os.environ and "common.measure.bench" in sys.orig_argv:
    atexit.register(open, "torn_down", "w")
"""


def test_a_tool_on_path_is_called_around_rank_0(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    fake = tmp_path / "nsys"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    small = [
        "--layers",
        "1",
        "--steps",
        "1",
        "--warmup",
        "1",
        "--set",
        "micro_batch_size=2",
        "--set",
        "gpus_per_node=2",
    ]
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "FAKE_OUT": f"{tmp_path}/argv.json",
    }
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "profile",
        "--device",
        "cpu",
        "--out",
        f"{tmp_path}/out",
        *small,
    ]
    command += ["--with", "nsys --stats=true"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    called = json.loads((tmp_path / "argv.json").read_text())
    assert shlex.join(["nsys", *called]).startswith(
        EXPECTED["nsys"].replace("/out/", f"{tmp_path}/out/")
    )
    assert called[called.index("-m") + 1] == "common.measure.bench" and called[-2:] == [
        "--of",
        "outside",
    ]
    assert done.stdout.count("BENCH llama31_8b") == 1 and "nsys-ui" in done.stderr
    assert not (tmp_path / "torn_down").exists()


@pytest.fixture
def profile_command(tmp_path, monkeypatch):
    """The command in this process."""
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    return lambda *arguments, out="out": profile.main(
        ["llama31_8b", "--device", "cpu", "--out", str(tmp_path / out), *arguments]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--memory"], 2, "profile --memory needs a GPU"),
        (["--memory", "--with", "nsys"], 2, "cannot be combined with --memory"),
        (["--with", "nsis"], 2, "did you mean nsys?"),
        (["--with", ""], 2, "--with is empty"),
        (["--with", "nsys '"], 2, "close the quote"),
        (["--with", "rocprofv3"], 18, "rocprofv3 is not on PATH"),
    ],
)
def test_invalid_arguments_start_nothing(tmp_path, profile_command, capsys, arguments, code, words):
    assert (
        profile_command(*arguments) == code
        and words in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


def test_the_error_names_the_option_of_a_directory_that_cannot_be_made(
    tmp_path, profile_command, capsys
):
    (tmp_path / "file").write_text("")
    assert profile_command(out="file/out") == 17
    message = capsys.readouterr().err
    assert "--out" in message and "LOGDIR" not in message


def test_print_shows_a_command_that_a_shell_takes(profile_command, capsys):
    assert profile_command("--with", "rocprofv3", "--print") == 0
    words = shlex.split(capsys.readouterr().out)
    assert (
        words[words.index("-c") + 1].startswith(
            'if [ "$RANK" = 0 ]; then exec rocprofv3 --kernel-trace'
        )
        and words[-1] == "outside"
    )
