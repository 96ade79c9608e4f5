"""Test whole runs of a toy benchmark that fails on request, from command line to exit code."""

import argparse
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from toy import TORCHRUN, alive, finish, launch, make_project, shorten, stub, wait_until

from common.data.manifest import Manifest, facts_of
from common.errors import ConfigError, DataError
from common.machine import hardware
from common.paths import ROOT
from launch import diagnosis, job, job_command, run_command
from launch.cli import version
from launch.job import ensure_data


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("with a blank"), torchrun=TORCHRUN)


@pytest.fixture(scope="module")
def project_with_torchrun(tmp_path_factory):
    """A project that keeps the real torchrun, which imports torch for three seconds of a core."""
    return make_project(tmp_path_factory.mktemp("with a blank"))


def without_data(project):
    """The project before the first run, which builds the miniature's data."""
    shutil.rmtree(project / "data", ignore_errors=True)
    return project


def only_run(cwd):
    (run_dir,) = [path for path in (cwd / "out" / "toy").iterdir() if path.is_dir()]
    return run_dir


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "results"), 17),
        (MemoryError(), 12),
        (DataError("no data", "it is not there", "fetch it"), 15),
        (ValueError("a defect"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_fails_before_an_attempt_is_told_by_its_family(monkeypatch, capsys, error, code):
    def job_from(*_, **__):
        raise error

    monkeypatch.setattr(run_command, "job_from", job_from)
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    if code is None:
        with pytest.raises(ValueError, match="a defect"):
            run_command.main(["llama31_8b"])
    else:
        assert (
            run_command.main(["llama31_8b"]) == code
            and len(capsys.readouterr().err.splitlines()) == 3
        )


def test_a_good_run(project_with_torchrun, tmp_path):
    code, out, err = finish(
        launch(
            without_data(project_with_torchrun),
            tmp_path,
            TOY="good",
            MLPERF_SUBMISSION_ORG="Us",
            SEED="5",
        )
    )
    assert code == 0, err
    other = [line for line in out.splitlines() if not line.startswith(":::MLLOG")]
    assert [line.partition(" AT ")[0].partition(",,")[0] for line in other] == [
        "STARTING TIMING RUN",
        "ENDING TIMING RUN",
        "RESULT,TOY",
    ]
    assert ",Us,20" in other[2]
    assert err.startswith("No GPU found.\nTHIS IS THE MINIATURE") and "32 sequences" in err
    assert err.count("progress line") == 2 and "prepared" in err
    run_dir = only_run(tmp_path)
    assert "seed5" in run_dir.name and not (run_dir / "failure.json").exists()
    assert {"config.toml", "versions.json", "result.txt", "report.html", "check.txt"} <= {
        path.name for path in run_dir.iterdir()
    }
    assert (
        json.loads((run_dir / "versions.json").read_text())["rank_cpus"] == []
        and "\nadvice of the toy\n" in err
    )
    assert "CPU_1x1.toml" in out


def test_versions_json_records_the_variables_that_settings_md_promises(project, tmp_path):
    """And no other variable, such as a token."""
    recorded = {}
    others = {"HF_TOKEN": "hf_secret", "NVTE_TOKEN": "hf_secret"}
    for line in (ROOT / "docs/settings.md").read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.split("|")][1:-1]
        if len(cells) != 7 or not cells[1].startswith("user"):
            continue
        name = cells[0].replace("*", "EXAMPLE")
        if cells[3] == "yes":
            recorded[name] = f"value of {name}"
        elif name.startswith(("CONT", "JOB_NAME", "MLFLOW", "WANDB", "MLPERF_SUBMISSION_ORG")):
            others[name] = "hf_secret"
    assert len(recorded) > 40 and len(others) > 8
    recorded |= {"ATTENTION_ENGINE": "sdpa", "MATMUL_ENGINE": "torch", "SWIGLU_ENGINE": "kernel"}
    recorded |= {"GPU_KIND": "H200", "ZERO_STREAM_PRIORITY": "0", "GLOO_SOCKET_IFNAME": "lo"}
    recorded |= {"NCCL_DEBUG_FILE": "/f", "TRITON_CACHE_DIR": "/t"}
    recorded |= {name: "-1" for name in recorded if name.endswith("_VISIBLE_DEVICES")}
    code, _, err = finish(launch(project, tmp_path, TOY="good", **recorded, **others))
    assert code == 0, err
    text = (only_run(tmp_path) / "versions.json").read_text()
    variables = json.loads(text)["variables"]
    # The launcher adds the checkout to PYTHONPATH, and a config's [env] takes precedence.
    assert "value of PYTHONPATH" in variables.pop("PYTHONPATH")
    assert variables.pop("OMP_WAIT_POLICY") == "PASSIVE"
    assert (
        variables.items()
        >= {
            name: value
            for name, value in recorded.items()
            if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")
        }.items()
    )
    assert "hf_secret" not in text


def test_a_killed_rank(project_with_torchrun, tmp_path):
    code, out, err = finish(launch(project_with_torchrun, tmp_path, TOY="kill"))
    failure = json.loads((only_run(tmp_path) / "failure.json").read_text())
    assert (code, failure["kind"], failure["rank"]) == (14, "rank_lost", 1)
    assert "error: rank 1 (process" in err and "Traceback" not in err and "FAILED" not in err
    assert "RESULT" not in out or "aborted" in out


def test_findings_are_no_success(project, tmp_path):
    code, _, err = finish(launch(project, tmp_path, TOY="good", FINDINGS="20"))
    assert code == 20 and "one finding" in err
    end = json.loads((tmp_path / "out/toy/attempts.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["exit_code"], end["kind"], end["samples"]) == (
        "end",
        20,
        "check_failed",
        32,
    )


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [("unsaved", 17, "the model was not saved"), ("killed in save", 17, "died without a message")],
)
def test_what_fails_in_saving_ends_the_command_and_not_the_run(
    project, tmp_path, mode, code, words
):
    seen, _, err = finish(launch(project, tmp_path, "--save", TOY=mode))
    assert seen == code and words in err and "32 sequences" in err and "log check: passed" in err
    end = next(
        line
        for line in map(
            json.loads, reversed((tmp_path / "out/toy/attempts.jsonl").read_text().splitlines())
        )
        if line["event"] == "end"
    )
    assert (end["exit_code"], end["kind"], end["samples"]) == (0, "success", 32) and words in end[
        "reason"
    ]
    assert (
        not (only_run(tmp_path) / "failure.json").exists()
        and (only_run(tmp_path) / "check.txt").is_file()
    )


def ends(tmp_path):
    lines = map(json.loads, (tmp_path / "out/toy/attempts.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "end"]


def test_a_run_that_fails_after_run_stop_is_good(project, tmp_path):
    code, _, err = finish(launch(project, tmp_path, TOY="late"))
    (end,) = ends(tmp_path)
    assert (code, end["exit_code"], end["kind"]) == (17, 0, "success"), err
    assert "something is missing" in end["reason"] and "something is missing" in err
    assert not (only_run(tmp_path) / "failure.json").exists()


@pytest.mark.parametrize("findings", ["-9", "1", "2"])
def test_a_checker_that_could_not_run_leaves_a_good_run_that_was_not_checked(
    project, tmp_path, findings
):
    code, _, err = finish(launch(project, tmp_path, TOY="good", FINDINGS=findings, NEXP="2"))
    assert code == 0 and "2 of 2 good" in err, err
    assert "./run_and_time.sh check " in err and "log check: passed" not in err
    for end in ends(tmp_path):
        assert (end["exit_code"], end["kind"]) == (0, "success") and "not checked" in end["reason"]
    assert not list((tmp_path / "out").rglob("failure.json"))


def test_a_rank_that_exits_with_1_was_not_interrupted(project, tmp_path):
    code, _, err = finish(launch(project, tmp_path, TOY="exit"))
    (end,) = ends(tmp_path)
    assert (code, end["exit_code"], end["kind"]) == (1, 1, "internal"), err
    assert json.loads((only_run(tmp_path) / "failure.json").read_text())["kind"] == "internal"


def test_a_log_of_torchrun_that_cannot_be_opened_is_a_storage_error(tmp_path):
    project = make_project(tmp_path / "project")
    shorten(project, "launch/processes/torchrun.py", '"torchrun.log"', '"none/torchrun.log"')
    code, _, err = finish(launch(project, tmp_path, TOY="good"))
    (end,) = ends(tmp_path)
    assert (code, end["kind"]) == (17, "storage") and "torchrun.log" in end["reason"], err
    assert "Traceback" not in err


def test_only_a_benchmark_that_can_save_takes_the_option():
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama2_70b_lora",
        "--device",
        "cpu",
        "--save",
        "--print",
    ]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 2 and "--save" in answer.stderr and not answer.stdout
    command[3] = "llama31_8b"
    assert " --save\n" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [("PLATFORM", ""), ("PLATFORM", " "), ("ORG", ""), ("ORG", "eval_accuracy Inc.")],
)
def test_a_text_that_no_log_may_have_is_refused_before_a_run(tmp_path, monkeypatch, name, text):
    monkeypatch.setenv(f"MLPERF_SUBMISSION_{name}", text)
    with pytest.raises(ConfigError, match=f"MLPERF_SUBMISSION_{name}="):
        run_command.start("llama31_8b", run_command.parser("llama31_8b").parse_args(["--print"]))


@pytest.mark.parametrize(("word", "code"), [("preview", 2), ("Cloud", 2), ("cloud", 0), ("", 0)])
def test_a_wrong_submission_status_is_refused_before_a_run(tmp_path, word, code):
    answer = subprocess.run(
        [sys.executable, "-m", "launch", "llama31_8b", "--miniature", "--print"],
        cwd=ROOT,
        env=os.environ | {"MLPERF_SUBMISSION_STATUS": word, "LOGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == code, answer.stderr
    named = [each in answer.stderr for each in ("onprem", "cloud or research", word)]
    assert all(named) == (code == 2) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("subcommand", ["check", "report", "score", "describe", "package"])
def test_commands_of_submission_get_the_rest_of_the_line_and_no_torch(
    project, tmp_path, subcommand
):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (project / "submission/score.py").write_text(stub("import sys; print('score', sys.argv[1:])"))
    for name in ("describe", "package"):
        (project / f"submission/{name}.py").write_text(
            stub(f"import sys; print({name!r}, sys.argv[1:]); sys.exit(20)")
        )
    code, out, err = finish(
        launch(
            project,
            tmp_path,
            subcommand,
            str(tmp_path),
            "--some",
            "option",
            benchmark="",
            PYTHONPATH=str(tmp_path),
        )
    )
    wanted = {
        "check": (0, "one finding"),
        "report": (0, "report.html\nadvice of the toy"),
        "score": (0, f"score ['{tmp_path}', '--some', 'option']"),
    }
    assert (code, out.strip()) == wanted.get(
        subcommand, (20, f"{subcommand} ['{tmp_path}', '--some', 'option']")
    ), err


def test_a_signal_reaches_the_module_of_a_command(project, tmp_path):
    """The command can end its own processes before it is killed."""
    command = stub(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
        "print('ready', *sys.argv[1:], flush=True); time.sleep(60)"
    )
    (project / "throughput").mkdir(exist_ok=True)
    (project / "throughput/__main__.py").write_text(command)
    process = launch(project, tmp_path, "throughput", "gemm", benchmark="")
    assert process.stdout.readline() == "ready gemm\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 7


def test_killing_the_launcher_leaves_nothing_behind(project_with_torchrun, tmp_path):
    process = launch(project_with_torchrun, tmp_path, TOY="wait")
    wait_until(lambda: list(tmp_path.glob("out/toy/*/waiting_0")))
    process.kill()
    process.communicate()
    run_dir = only_run(tmp_path)
    wait_until(lambda: not alive(run_dir))
    assert diagnosis.read_result(run_dir / "result.txt").status == "aborted"


MLFLOW = """
import os
from unittest import mock
entities = mock.Mock()

class MlflowClient(mock.MagicMock):
    def set_terminated(self, run, status="FINISHED"):
        open(os.environ["STATUS"], "w").write(status)
"""


def test_the_locale_does_not_matter(project, tmp_path):
    text = (project / "configs/toy/CPU_1x1.toml").read_text()
    (tmp_path / "own.toml").write_text("# größer\n" + text, encoding="utf-8")
    arguments = ("--config", str(tmp_path / "own.toml"), "--print")
    code, out, err = finish(launch(project, tmp_path, *arguments, LC_ALL="C", PYTHONUTF8="0"))
    assert code == 0 and out, err


@pytest.mark.parametrize("path", [":", "{}:", ":{}", "{}::{}"])
def test_an_empty_path_in_pythonpath_is_not_the_current_directory(project, tmp_path, path):
    (tmp_path / "random.py").write_text("raise SystemExit('of the current directory')")
    (tmp_path / "empty").mkdir()
    variables = {"PYTHONPATH": path.format(tmp_path / "empty", tmp_path / "empty")}
    code, _, err = finish(launch(project, tmp_path, "--print", **variables))
    assert code == 0, err


def test_packages_of_pythonpath_are_named(project_with_torchrun, tmp_path):
    others = tmp_path / "others"
    for name in ("torch", "pytest"):  # pytest is all that the toy's requirements.txt names
        (others / name).mkdir(parents=True)
        (others / name / "__init__.py").write_text("raise ImportError('libcudart.so.11.0')")
    process = launch(project_with_torchrun, tmp_path, TOY="good", PYTHONPATH=str(others))
    code, _, err = finish(process)
    assert code == 18 and f"({others})" in err, err
    assert "PYTHONPATH replaces installed packages: pytest" in err


def test_a_tracker_gets_the_outcome(project, tmp_path):
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    variables = {"PYTHONPATH": str(tmp_path), "STATUS": str(tmp_path / "status")}
    code, _, err = finish(launch(project, tmp_path, "--track", "mlflow", TOY="fail", **variables))
    assert code == 1 and (tmp_path / "status").read_text() == "FAILED", err


def test_sigterm_to_the_launcher(project_with_torchrun, tmp_path):
    process = launch(project_with_torchrun, tmp_path, TOY="wait")
    wait_until(lambda: list(tmp_path.glob("out/toy/*/waiting_0")))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    run_dir = only_run(tmp_path)
    assert code == 143 and time.monotonic() - began < 10
    assert (
        json.loads((run_dir / "failure.json").read_text())["kind"] == "interrupted"
        and "stopped by signal" in err
    )
    assert diagnosis.read_result(run_dir / "result.txt").status == "aborted"
    assert not alive(run_dir)


def test_hidden_gpus_and_a_real_run(project, tmp_path):
    """DATADIR is a mistyped path: it must not be created, and no toy may be trained."""
    mistyped = tmp_path / "mistyped"
    real = {"DATADIR": str(mistyped), "NEXP": "10", "DGXSYSTEM": ""}
    code, out, err = finish(launch(project, tmp_path, TOY="good", **real))
    assert (code, out) == (18, "") and "--miniature" in err
    assert not mistyped.exists() and not (tmp_path / "out").exists()


def test_the_miniatures_data_never_go_to_datadir(project, tmp_path):
    mistyped = tmp_path / "mistyped"
    real = {"DATADIR": str(mistyped), "DGXSYSTEM": ""}
    code, _, err = finish(
        launch(without_data(project), tmp_path, "--miniature", TOY="good", **real)
    )
    assert code == 0, err
    assert not mistyped.exists() and (project / "data/toy-miniature/t.bin").is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_while_data_is_prepared_ends_that_too(project, tmp_path, number, code):
    process = launch(without_data(project), tmp_path, HOLD_PREPARE="yes")
    wait_until((tmp_path / "preparing").exists)
    process.send_signal(number)
    seen, _, err = finish(process)
    assert seen == code and ("stopped by signal" in err) == (code > 0), err
    wait_until(lambda: not alive(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["dance"], 2, "dance"),
        (["score", "results"], 2, "./run_and_time.sh score"),
        (["merge"], 2, "merge"),
        (["--set", "micro_batch_size=3", "--print"], 2, "not a multiple"),
        (["--config", "absent.toml"], 2, "absent.toml"),
        (["--config", ""], 2, "--config"),
        (["--config", "."], 2, "config"),
        (["--config", "x" * 300], 2, "config"),
        (["--set", "hang_timeout_s=inf"], 2, "hang_timeout_s = inf"),
        (["--set", "eval_micro_batch_size=65"], 2, "eval_micro_batch_size = 65"),
        (["--set", "max_samples=8"], 2, "max_samples = 8"),
        (["--device", "cuda"], 18, "GPU"),
        (["--set", "miniature=false"], 15, "t.bin"),
        (["run", "--steps", "3"], 2, "--steps"),
    ],
)
def test_errors_before_anything_starts(project, tmp_path, arguments, code, words):
    seen, out, err = finish(launch(project, tmp_path, *arguments))
    assert (seen, out) == (code, "") and words in err and "Traceback" not in err
    assert "usage" in err or [line.split(":")[0].strip() for line in err.splitlines()[-3:]] == [
        "error",
        "why",
        "do",
    ]
    assert not (tmp_path / "out").exists()


def test_a_limit_of_the_system_is_said_before_anything_starts(project, tmp_path):
    code, out, err = finish(
        launch(project, tmp_path, TOY="good", shell='ulimit -v 4000000; exec "$0" "$@"')
    )
    assert (code, out) == (12, "") and "ulimit -v" in err and not (tmp_path / "out").exists(), err
    assert [line.split(":")[0].strip() for line in err.splitlines()[-3:]] == ["error", "why", "do"]


def test_a_project_in_a_path_with_a_colon(project, tmp_path):
    (tmp_path / "a:b").mkdir()
    shutil.copy(project / "run_and_time.sh", tmp_path / "a:b")
    code, out, err = finish(launch(tmp_path / "a:b", tmp_path))
    assert (code, out) == (2, "") and "colon" in err and len(err.splitlines()) == 3


@pytest.mark.parametrize("script", ["run_and_time.sh", "run_tests.sh"])
@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("Darwin", 'docker run --rm -it -v "$PWD:/llama" -w /llama python:3.12 ./run'),
        ("MINGW64_NT-10.0", "WSL 2"),
    ],
)
def test_a_mac_or_windows_gets_one_clear_message(tmp_path, script, system, words):
    """Before anything that a Mac's bash 3.2 or its tools lack."""
    for name, text in (("uname", f"echo {system}"), ("readlink", "exit 1"), ("python3", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    answer = subprocess.run(
        [ROOT / script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (
        18,
        "",
        3,
    ) and words in answer.stderr


def _flip(content: bytes) -> bytes:
    return content[:5] + bytes([content[5] ^ 1]) + content[6:]


@pytest.mark.parametrize(
    "change", [_flip, lambda content: bytes(8) + content[8:], lambda content: content[:-2]]
)
@pytest.mark.parametrize("name", ["t.bin", "tokenizer.model", "miniature.json"])
def test_damaged_files_of_the_miniature_are_built_again(tmp_path, monkeypatch, capfd, name, change):
    """The manifest of `prepare` marks generated files. Without it, the files are the user's own."""
    names = ("t.bin", "tokenizer.model")
    for each in names:
        (tmp_path / each).write_bytes(b"x" * 64)
    good = Manifest("a test", 7, {each: facts_of(tmp_path / each) for each in names})
    good.write(tmp_path / "miniature.json")
    rules = argparse.Namespace(
        manifests=("miniature.json",),
        require_data=lambda *_: None,
        weights_folder=lambda *_: None,
    )
    config = argparse.Namespace(miniature=True)
    asked = argparse.Namespace(
        benchmark="toy",
        data_dir=tmp_path,
        data_files=[tmp_path / "t.bin"],
        rules=rules,
        config=config,
        environment={},
        continues=None,
    )
    builds = []

    def repair(arguments):
        builds.append(arguments)
        (tmp_path / "tokenizer.model").write_bytes(b"x" * 64)
        (tmp_path / "t.bin").write_bytes(b"x" * 64)
        good.write(tmp_path / "miniature.json")
        return 0

    monkeypatch.setattr(job, "run_module", repair)
    ensure_data(asked)
    assert not builds, "nothing is damaged"
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    ensure_data(asked)
    assert len(builds) == 1 and "rebuilding" in capfd.readouterr().err
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    monkeypatch.setattr(job, "run_module", lambda arguments: 0)
    with pytest.raises(DataError, match="built"):
        ensure_data(asked)


def test_damaged_files_in_datadir_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "t.bin").write_bytes(b"x" * 64)
    manifest = Manifest("a test", 7, {"t.bin": facts_of(tmp_path / "t.bin")})
    manifest.write(tmp_path / "miniature.json")
    asked = argparse.Namespace(
        benchmark="toy",
        data_dir=tmp_path,
        data_files=[tmp_path / "t.bin"],
        rules=argparse.Namespace(
            manifests=("miniature.json",),
            require_data=lambda *_: None,
            weights_folder=lambda *_: None,
        ),
        config=argparse.Namespace(miniature=True),
        environment={"DATADIR": str(tmp_path)},
        continues=None,
    )
    monkeypatch.setattr(job, "run_module", lambda arguments: pytest.fail("DATADIR is written"))
    ensure_data(asked)
    (tmp_path / "t.bin").write_bytes(b"y" * 64)
    with pytest.raises(DataError, match="damaged"):
        ensure_data(asked)


@pytest.mark.parametrize("forbidden", [".", "t.bin"])
def test_data_that_this_user_may_not_read(forbidden):
    with (
        tempfile.TemporaryDirectory() as name
    ):  # not in pytest's folder, which nobody else may enter
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "t.bin").write_text("x")
        (folder / forbidden).chmod(0)
        user = os.geteuid()
        try:
            if user == 0:  # who may read everything
                os.seteuid(65534)
            with pytest.raises(DataError, match="cannot be read") as caught:
                ensure_data(argparse.Namespace(data_files=[folder / "t.bin"]))
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
    assert (
        "t.bin" in caught.value.what
        and caught.value.why == "Permission denied"
        and "DATADIR" in caught.value.do
    )


def test_version(project, tmp_path):
    (project / "pyproject.toml").write_text('[project]\nname = "toy"\nversion = "7.8"\n')
    code, out, _ = finish(launch(project, tmp_path, "--version", benchmark=""))
    assert (code, out) == (0, "toy 7.8\n"), "the copy is no git repository"
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert f", commit {commit}" in version()


def test_unknown_benchmark_lists_the_known(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for arguments in (["gpt5"], [], ["bench"]):
        answer = subprocess.run(
            [sys.executable, "-m", "launch", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 2 and "llama31_8b" in answer.stderr and not answer.stdout


def test_print_shows_the_command_and_starts_nothing(project, tmp_path):
    code, out, _ = finish(
        launch(project, tmp_path, "bench", "--print", "--steps", "5", "--set", "micro_batch_size=4")
    )
    assert code == 0 and not (tmp_path / "out").exists()
    assert out.endswith(
        "-m common.measure.bench --benchmark toy --config DIR/CPU_1x1+modified.toml --device cpu "
        "--steps 5 --warmup 3\n"
    )
    assert (
        "-m launch.processes.torchrun DIR --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 "
        "--nnodes 1 --local-addr 127.0.0.1 --nproc-per-node 2" in out
    )


def test_hardware_of_this_machine_is_readable():
    assert hardware.probe({"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}).vendor in (
        "none",
        "amd",
    )
