"""A further benchmark is two folders: a copy of the project with them trains it and checks its log.

The benchmark is tests/helpers/toy_benchmark/, which CONTRIBUTING.md names as the smallest example.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import CheckFailed, ConfigError
from common.paths import ROOT

NAME = "toy_benchmark"
FOLDERS = (
    "common",
    "configs",
    "launch",
    "llama2_70b_lora",
    "llama31_8b",
    "submission",
    "system_tuning",
    "throughput",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run_and_time.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, root)
    toy = ROOT / "tests" / "helpers" / NAME
    shutil.copytree(toy, root / NAME, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    (root / "configs" / NAME).mkdir()
    shutil.copy(toy / "CPU_1x1.toml", root / "configs" / NAME)
    return root


def launch(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    hidden = ("SEED", "NEXP", "DGXSYSTEM", "DGXNGPU", "GPU_KIND", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "LOGDIR": str(project / "results"),
        "SEED": "4711",
        "MLPERF_SUBMISSION_STATUS": "cloud",
    }
    command = [str(project / "run_and_time.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run_dir(project) -> Path:
    done = launch(
        project, NAME, "--device", "cpu", "--set", "gpus_per_node=2", "--set", "micro_batch_size=4"
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (project / "results" / NAME).iterdir() if path.is_dir())
    return folder


def events(run_dir: Path) -> dict[str, object]:
    lines = (run_dir / "result.txt").read_text().splitlines()
    return {
        event["key"]: event["value"]
        for event in (json.loads(line.removeprefix(":::MLLOG ")) for line in lines)
    }


def test_it_trains_to_its_target(run_dir):
    logged = events(run_dir)
    assert logged["submission_status"] == "cloud"
    assert logged["submission_benchmark"] == NAME and logged["submission_division"] == "miniature"
    assert logged["opt_learning_rate_warmup_steps"] == 2 and logged["train_samples"] == 512
    assert logged["eval_accuracy"] <= 1.0
    assert (run_dir / "report.html").is_file()


def test_its_log_is_checked_by_its_own_rules(project, run_dir, tmp_path):
    log = run_dir / "result.txt"
    assert launch(project, "check", str(log)).returncode == 0
    for wrong in (
        '"train_samples", "value": 511',
        '"opt_adamw_beta_2", "value": 0.999',
        '"eval_samples", "value": 16',
    ):
        key = wrong.split(",")[0]
        lines = [
            json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()
        ]
        for line in lines:
            if f'"{line["key"]}"' == key:
                line["value"] = json.loads(wrong.rpartition(" ")[2])
        path = tmp_path / "result.txt"
        path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines))
        assert launch(project, "check", str(path)).returncode == CheckFailed.exit_code, wrong


def test_examples_name_a_benchmark_of_mlperf_and_files_that_exist(project):
    """The toy's name is the last of the alphabet."""
    assert f" {NAME} bench" not in (text := launch(project, "bench", "--help").stdout)
    assert " llama31_8b bench" in text
    refused = launch(project, "bench")
    assert refused.returncode == ConfigError.exit_code and "llama31_8b bench" in refused.stderr
    for command in ("plan", "run"):
        text = launch(project, NAME, command, "--help").stdout
        files = re.findall(r"\S+\.toml", text)
        assert files and all((project / file).is_file() for file in files)


@pytest.mark.slow
def test_the_other_commands_know_it(project):
    assert NAME in launch(project, "--help").stdout
    assert launch(project, NAME, "plan", "--all").returncode == 0
    assert (
        launch(
            project, NAME, "bench", "--steps", "1", "--warmup", "1", "--device", "cpu"
        ).returncode
        == 0
    )
    assert launch(project, NAME, "--save", "--device", "cpu").returncode == ConfigError.exit_code
    for words in ([NAME, "merge"], ["merge"], ["mine/run.toml"]):
        answer = launch(project, *words)
        assert answer.returncode == ConfigError.exit_code
        assert answer.stderr.startswith("error: "), "no benchmark of this checkout has it"
    assert NAME in launch(project, "completion", "bash").stdout
