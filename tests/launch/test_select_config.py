"""Which config is selected for which machine, and what is refused."""

import argparse
from pathlib import Path

import pytest

from common.errors import ConfigError, PreflightError
from common.gpu_kinds import GIB
from common.hardware import Device, Probe
from launch.select_config import benchmarks, select_config

ROOT = Path(__file__).parents[2]
H200X4 = Probe("nvidia", (Device("NVIDIA H200", "sm_90", 143771 * 2**20),) * 4, "580.95.05")
MI300X = Probe("amd", (Device("AMD Instinct MI300X", "gfx942", 192 * GIB, 304),) * 8)
NOTHING = Probe("none")


def options(config=None, set=(), device=None):
    return argparse.Namespace(config=config, set=list(set), device=device)


def select(found, environment=None, **changes):
    return select_config(ROOT, "llama31_8b", options(**changes), environment or {}, found)


def test_benchmarks_are_found():
    assert "llama31_8b" in benchmarks(ROOT)


def test_the_gpu_decides():
    chosen = select(H200X4)
    assert (chosen.log_name, chosen.device, chosen.notes) == ("H200_1x4.toml", "cuda", ())
    assert "4 x H200" in chosen.reason and "NVIDIA H200" in chosen.found
    assert select(MI300X).log_name == "MI300X_1x8.toml"
    assert select(H200X4, {"DGXNGPU": "2"}).config.gpus_per_node == 2


def test_no_gpu_is_the_miniature():
    for chosen in (select(NOTHING), select(H200X4, device="cpu"), select(H200X4, {"DGXSYSTEM": "CPU_1x1"})):
        assert (chosen.log_name, chosen.device, chosen.config.miniature) == ("CPU_1x1.toml", "cpu", True)


@pytest.mark.parametrize(
    ("found", "environment", "words"),
    [
        (H200X4, {"DGXSYSTEM": "MI300X_1x8"}, "the config is for MI300X, this is H200"),
        (H200X4, {"DGXSYSTEM": "H200_1x8"}, "needs 8 GPUs"),
        (H200X4, {"DGXSYSTEM": "H200"}, "no config H200"),
        (H200X4, {"DGXNGPU": "3"}, "no config H200_1x3"),
        (H200X4, {"DGXNGPU": "two"}, "DGXNGPU=two"),
        (H200X4, {"DGXNGPU": "2", "DGXSYSTEM": "H200_1x4"}, "DGXNGPU=2"),
        (NOTHING, {"DGXSYSTEM": "H200_1x4"}, "this is CPU"),
    ],
)
def test_what_does_not_fit_is_a_config_error(found, environment, words):
    with pytest.raises(ConfigError, match=words):
        select(found, environment)


def test_cuda_without_a_gpu():
    with pytest.raises(PreflightError, match="no GPU is visible"):
        select(NOTHING, device="cuda")


def test_forced_and_changed_configs_say_so():
    forced = select(H200X4, config=str(ROOT / "configs/llama31_8b/MI300X_1x8.toml"), set=["gpus_per_node=4"])
    assert forced.log_name == "MI300X_1x8+forced+modified.toml"
    assert len(forced.notes) == 2 and all("not for submission" in note for note in forced.notes)
    # The RCP checker would take these words in config_filename for events.
    assert "global_batch_size" not in select(H200X4, set=["global_batch_size=32"]).log_name
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        select(H200X4, set=["precision"])
    with pytest.raises(ConfigError, match="unknown key"):
        select(H200X4, set=["precison=fp32"])


def test_a_config_that_only_bears_our_name_is_modified(tmp_path):
    ours = ROOT / "configs/llama31_8b/H200_1x4.toml"
    (tmp_path / ours.name).write_text(ours.read_text())
    assert select(H200X4, config=str(tmp_path / ours.name)).log_name == "H200_1x4.toml"
    (tmp_path / ours.name).write_text(ours.read_text() + "# changed\n")
    changed = select(H200X4, config=str(tmp_path / ours.name))
    assert changed.log_name == "H200_1x4+modified.toml" and "differs" in changed.notes[0]
