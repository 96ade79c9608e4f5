"""Test the environment variables that are set: misspelled ones, and those that nobody reads."""

import pytest

from common.errors import ConfigError
from common.paths import data_folder, results_folder
from common.variables import TABLE
from launch import cli, run_directory
from launch.variables import judge, misspelled

pytestmark = pytest.mark.quick

READ = cli.parser_of("run", "llama31_8b").variables


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("MLPERF_SUBMISSION_PLATFROM", "MLPERF_SUBMISSION_PLATFORM"),
        ("MLPERF_SUBMISION_ORG", "MLPERF_SUBMISSION_ORG"),
        ("MLPERF_ORG", "MLPERF_SUBMISSION_ORG"),
        ("N_EXP", "NEXP"),
        ("NEPX", "NEXP"),
        ("datadir", "DATADIR"),
        ("DATADIR ", "DATADIR"),
        ("DGX_SYSTEM", "DGXSYSTEM"),
        ("dgxngpu", "DGXNGPU"),
        ("GPUKIND", "GPU_KIND"),
        ("ATTENTION_ENGIN", "ATTENTION_ENGINE"),
    ],
)
def test_a_misspelled_variable_that_decides_the_run_is_refused(name, ours, capsys):
    with pytest.raises(ConfigError) as caught:
        judge({name: "x"}, "run", READ)
    assert repr(name) in caught.value.what and f"{ours}=x" in caught.value.do
    judge({name: "x"}, "report", ())
    assert f"{name!r} is not read; did you mean {ours}=x?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("NGPU", "DGXNGPU"),
        ("NUM_GPUS", "DGXNGPU"),
        ("DATA_DIR", "DATADIR"),
        ("LOG_DIR", "LOGDIR"),
        ("logdir", "LOGDIR"),
        ("MODEL_DIR", "MODEL"),
        ("MLPERF_CLUSTER", ""),
    ],
)
def test_a_variable_that_may_be_of_another_program_gets_a_note(name, ours, capsys):
    judge({name: "x"}, "run", READ)
    assert (f"{ours}=x" if ours else f"unset {name}") in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "MODE",
        "SPEED",
        "MODELS",
        "CUDA_HOME",
        "NVIDIA_VISIBLE_DEVICES",
        "SLURM_JOBID",
        "XDG_DATA_HOME",
        "XDG_STATE_HOME",
        "LIBRARY_PATH",
        "OUTPUT_DIR",
        "NCCL_P2P_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "GROUP_RANK",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "PYTHONHASHSEED",
        "PIP_EXTRA_INDEX_URL",
        "WANDB_ENTITY",
        "TORCH_HOME",
        "HF_HOME",
        "HF_TOKEN",
        "LOGNAME",
    ],
)
def test_other_variables_of_a_machine_get_none(name):
    assert list(misspelled({name: "x"})) == []


def test_a_value_of_another_form_is_not_suggested():
    with pytest.raises(ConfigError, match="DGXNNODES") as caught:
        judge({"DGXNNODES": "2"}, "run", READ)
    assert "DGXSYSTEM (<GPU>_<nodes>x<GPUs>)" in caught.value.do


def test_known_and_empty_variables_get_none():
    assert list(misspelled(dict.fromkeys(TABLE, "x"))) == []
    assert list(misspelled({"N_EXP": ""})) == []


def test_a_command_names_the_variables_that_it_does_not_read(capsys):
    def note(line, **environment):
        *_, name = line.split()
        judge(environment, name, cli.parser_of(name, "llama31_8b").variables)
        return capsys.readouterr().err

    assert "bench does not read NEXP, SEED" in note("bench", SEED="1", NEXP="2", DGXNGPU="1")
    assert "does not read MODEL" in note("run", MODEL="/m", SEED="1")
    assert "does not read SEED" in note("plan", SEED="1", GPU_KIND="H200", DGXSYSTEM="H200_1x8")
    judge({"NEXP": "10"}, "score", cli.parser_of("score", "").variables)
    judge({"MODEL": "/m"}, "run", cli.parser_of("run", "llama2_70b_lora").variables)
    assert capsys.readouterr().err == ""


def test_a_command_line_judges_the_variables(monkeypatch):
    monkeypatch.setenv("N_EXP", "10")
    with pytest.raises(ConfigError, match="N_EXP"):
        cli.read(["llama31_8b", "--print"])
    assert cli.read(["llama31_8b", "plan"])


def test_folders_of_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert results_folder({"LOGDIR": "~/x"}) == tmp_path / "x"
    assert data_folder("llama31_8b", {"DATADIR": "~"}) == tmp_path
    for text in (" ", __file__):
        with pytest.raises(ConfigError, match="LOGDIR="):
            results_folder({"LOGDIR": text})


def test_the_check_of_print_leaves_no_folder(tmp_path):
    run_directory.require_possible(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
