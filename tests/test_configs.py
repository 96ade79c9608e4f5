"""Every shipped config loads, fits its name and its rules; what differs between GPU kinds is printed as a table."""

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from common import config as configs
from common.config import RunConfig, load
from common.errors import ConfigError
from common.hardware import KINDS
from llama31_8b.rules import CLOSED, MINIATURE

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs" / "llama31_8b").glob("*.toml"))
GPU_FILES = [path for path in FILES if not path.stem.startswith("CPU")]
CONVERGENCE = (
    "global_batch_size",
    "opt_base_learning_rate",
    "opt_learning_rate_warmup_steps",
    "max_samples",
    "precision",
    "reduce_precision",
)
GOOD = {
    "gpu": "H200",
    "nodes": 1,
    "gpus_per_node": 8,
    "global_batch_size": 16,
    "opt_base_learning_rate": 4e-4,
    "opt_learning_rate_warmup_steps": 16,
    "max_samples": 12288,
    "micro_batch_size": 2,
    "eval_micro_batch_size": 4,
}


def test_every_gpu_has_a_config():
    assert {path.stem for path in FILES} >= {f"{kind}_1x8" for kind in KINDS} | {"H200_1x1", "H200_1x2", "H200_1x4", "CPU_1x1"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_fits_its_name_and_the_rules(path):
    config = load(path)
    rules = MINIATURE if config.miniature else CLOSED
    assert path.stem == f"{config.gpu}_{config.nodes}x{config.gpus_per_node}"
    assert config.gpu in KINDS or (config.gpu == "CPU" and config.miniature)
    assert config.gradient_accumulation_steps * config.micro_batch_size * config.world_size == config.global_batch_size
    assert config.max_samples % rules.eval_interval(config.global_batch_size) == 0
    assert rules.eval_samples % (config.world_size * config.eval_micro_batch_size) == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_repeats_no_default(path):
    table = tomllib.loads(path.read_text())
    repeated = [f.name for f in fields(RunConfig) if f.default is not MISSING and f.name in table and table[f.name] == f.default]
    assert not repeated


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_resolved_config_reads_back_the_same(path, tmp_path):
    config = load(path)
    (tmp_path / "config.toml").write_text(config.as_toml())
    assert load(tmp_path / "config.toml") == config


def test_limit_is_about_twice_the_reference():
    for path in GPU_FILES:
        assert 1.9 < load(path).max_samples / 161_109 < 2.1


def test_difference_between_gpus_as_a_table(capsys):
    loaded = {path.stem: load(path) for path in GPU_FILES}
    keys = [f.name for f in fields(RunConfig) if len({str(getattr(c, f.name)) for c in loaded.values()}) > 1 and f.name != "env"]
    with capsys.disabled():
        print("\n" + f"{'':12}" + "  ".join(keys))
        for name, config in loaded.items():
            print(f"{name:12}" + "  ".join(f"{getattr(config, key)!s:{len(key)}}" for key in keys))
    assert not set(keys) & set(CONVERGENCE), "the same learning curve is expected on every GPU"
    assert set(keys) <= {"gpu", "gpus_per_node", "micro_batch_size", "eval_micro_batch_size", "recompute_layers", "reshard_after_forward"}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("MI")], ids=lambda path: path.stem)
def test_amd_configs_say_that_we_never_ran_them(path):
    assert "Never run by us on this GPU" in path.read_text().splitlines()[0]
    assert not any(key.startswith(("CUDA_", "NCCL_NVLS")) for key in load(path).env), "of no effect on AMD"


def _error(**changes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        configs.from_table(GOOD | changes, "some.toml")
    return caught.value


def test_unknown_key_names_the_nearest():
    error = _error(micro_batchsize=2)
    assert "some.toml" in error.what and "micro_batchsize" in error.what
    assert "micro_batch_size" in error.do


@pytest.mark.parametrize(
    ("key", "value"), [("micro_batch_size", "two"), ("micro_batch_size", 2.0), ("compile", 1), ("env", {"A": 1}), ("gpu", 1)]
)
def test_wrong_type(key, value):
    assert key in _error(**{key: value}).what


def test_missing_key():
    table = {key: value for key, value in GOOD.items() if key != "opt_base_learning_rate"}
    with pytest.raises(ConfigError, match="opt_base_learning_rate is missing"):
        configs.from_table(table, "some.toml")


def test_impossible_batch():
    error = _error(global_batch_size=20)
    assert "global_batch_size" in error.what and "2 x 8 = 16" in error.why


@pytest.mark.parametrize(
    "changes", [{"precision": "fp7"}, {"micro_batch_size": 0}, {"opt_base_learning_rate": -1.0}, {"recompute_layers": -1}]
)
def test_impossible_value(changes):
    assert next(iter(changes)) in _error(**changes).what


def test_broken_toml_and_missing_file(tmp_path):
    (tmp_path / "broken.toml").write_text("gpu = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "broken.toml")
    with pytest.raises(ConfigError, match="no such config"):
        load(tmp_path / "absent.toml")


def test_overrides_from_the_command_line(tmp_path):
    (tmp_path / "good.toml").write_text("\n".join(f"{key} = {value!r}" for key, value in GOOD.items()).replace("'", '"'))
    assert load(tmp_path / "good.toml", {"micro_batch_size": "1", "precision": "fp32"}).precision == "fp32"
    with pytest.raises(ConfigError, match="unknown key speed"):
        load(tmp_path / "good.toml", {"speed": "11"})
