"""Test that every shipped config is valid, and that a broken one is refused with one error."""

import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

from common import config as configs
from common.benchmarks import closed, config_class, rules_of
from common.config import load, read_table
from common.errors import ConfigError
from common.estimate.memory import fits, memory_peak, usable_bytes
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import KINDS
from common.paths import ROOT
from common.records.rcp import mean_samples
from launch.selection.choose import choose
from launch.selection.machine import NO_GPUS
from launch.selection.request import Request
from launch.tune.candidates import COLLECTIVE_VARIABLES, STREAM_PRIORITY
from llama2_70b_lora import rules as lora_rules
from llama31_8b.rules import Config

pytestmark = pytest.mark.quick

ON_TRAYS_OF_4 = ("GB200", "GB300")
EXPECTED = {
    *(f"{kind}_1x{4 if kind in ON_TRAYS_OF_4 else 8}" for kind in KINDS),
    *(f"{kind}_2x8" for kind in ("MI325X", "MI350X", "H200")),
}
EXPECTED |= {"H200_1x1", "H200_1x2", "H200_1x4", "CPU_1x1"}
FILES = sorted(
    path for benchmark in closed() for path in (ROOT / "configs" / benchmark).glob("*.toml")
)
GPU_FILES = [path for path in FILES if not path.stem.startswith("CPU")]
EXECUTION_KEYS = {  # that may differ between GPU kinds: none of them changes what is learned
    "gpu",
    "gpus_per_node",
    "micro_batch_size",
    "eval_micro_batch_size",
    "linear",
    "recompute_layers",
    "reduce_scatter",
    "moment_precision",
    "frozen_base",
    "transposed_layers",
    "offload_layers",
}
each_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
each_benchmark = pytest.mark.parametrize("benchmark", closed())
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


def read(path: Path):
    return load(path, config_class(path.parent.name))


@each_benchmark
def test_every_gpu_has_a_config(benchmark):
    assert {path.stem for path in FILES if path.parent.name == benchmark} == EXPECTED


@each_file
def test_config_fits_its_name_and_the_rules(path):
    config = read(path)
    rules = rules_of(path.parent.name, config)
    batch = config.global_batch_size
    assert path.stem == f"{config.gpu}_{config.nodes}x{config.gpus_per_node}"
    assert config.gpu in KINDS or (config.gpu == "CPU" and config.miniature)
    assert config.gradient_accumulation_steps * config.micro_batch_size * config.world_size == batch
    assert config.max_samples % rules.eval_interval(
        batch
    ) == 0 and config.max_samples >= rules.first_evaluation(batch)
    padding = -rules.eval_samples % (config.world_size * config.eval_micro_batch_size)
    assert padding == 0 or config.eval_micro_batch_size == 1, (
        "sequences of padding that a smaller micro-batch would save"
    )
    assert config.recompute_layers <= rules.shape.num_layers
    assert config.offload_layers <= rules.shape.num_layers


@each_file
def test_config_repeats_no_default(path):
    table = tomllib.loads(path.read_text())
    known = fields(config_class(path.parent.name))
    assert [
        f.name
        for f in known
        if f.default is not MISSING and f.name in table and table[f.name] == f.default
    ] == []


@each_file
def test_resolved_config_reads_back_the_same(path, tmp_path):
    config = read(path)
    (tmp_path / "config.toml").write_text(config.as_toml())
    assert load(tmp_path / "config.toml", config_class(path.parent.name)) == config


@pytest.mark.parametrize(
    "value",
    [
        'a "quoted" word',
        "C:\\new\\table",
        "two\nlines\ttab",
        "it's",
        "\x7f\x01",
        "",
        "é # no comment",
        '"""',
    ],
)
def test_any_text_of_the_environment_reads_back_the_same(value, tmp_path):
    config = replace(read(FILES[0]), env={"A": value, "a.b c": value})
    (tmp_path / "config.toml").write_text(config.as_toml())
    assert load(tmp_path / "config.toml", config_class(FILES[0].parent.name)) == config


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_limit_is_about_twice_the_reference(path):
    config = read(path)
    mean = mean_samples(rules_of(path.parent.name, config), config.global_batch_size)
    assert mean and 1.9 < config.max_samples / mean < 2.1


@pytest.mark.parametrize("nodes", [1, 2])
@each_benchmark
def test_gpu_kinds_differ_in_execution_only(benchmark, nodes):
    """The same learning curve is expected on every GPU; on two nodes that of a larger batch."""
    loaded = [
        config
        for path in GPU_FILES
        if path.parent.name == benchmark and (config := read(path)).nodes == nodes
    ]
    differing = {
        f.name
        for f in fields(config_class(benchmark))
        if len({str(getattr(config, f.name)) for config in loaded}) > 1
    }
    assert differing - {"env"} <= EXECUTION_KEYS and "gpu" in differing


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_config_fits_the_memory_of_its_gpu(path):
    """tests/launch/plan/test_plan.py holds the plan to measured peaks."""
    config = read(path)
    assert fits(
        memory_peak(config, benchmark_workload(path.parent.name, config)), KINDS[config.gpu]
    )


@each_benchmark
def test_the_smallest_memory_keeps_a_reserve(benchmark):
    """torch reserves up to 5 % more than it allocates, and 8 ranks of NCCL need more than one."""
    config = read(ROOT / "configs" / benchmark / "H100_1x8.toml")
    assert memory_peak(config, benchmark_workload(benchmark, config)).needed <= 0.95 * usable_bytes(
        KINDS["H100"]
    )


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.stem.startswith("MI")],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_amd_configs_set_no_variable_of_nvidia(path):
    assert not any(key.startswith(("CUDA_", "NCCL_NVLS")) for key in read(path).env)


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_queues_priorities_and_channels_are_left_to_the_libraries(path):
    """`tune` varies them: no shipped number was measured with this package."""
    tuned = {STREAM_PRIORITY, *COLLECTIVE_VARIABLES["amd"], *COLLECTIVE_VARIABLES["nvidia"]}
    assert not ({"TORCH_NCCL_HIGH_PRIORITY", "NCCL_MIN_CTAS"} | tuned) & read(path).env.keys()


def _error(**changes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        configs.from_table(GOOD | changes, Config, "some.toml")
    return caught.value


def test_unknown_key_names_the_nearest():
    error = _error(micro_batchsize=2)
    assert "some.toml" in error.what and "micro_batchsize" in error.what
    assert "micro_batch_size" in error.do


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("micro_batch_size", "two"),
        ("micro_batch_size", 2.5),
        ("miniature", 1),
        ("env", {"A": 1}),
        ("gpu", 1),
    ],
)
def test_wrong_type(key, value):
    assert key in _error(**{key: value}).what


def test_missing_key():
    table = {key: value for key, value in GOOD.items() if key != "opt_base_learning_rate"}
    with pytest.raises(ConfigError, match="opt_base_learning_rate is missing"):
        configs.from_table(table, Config, "some.toml")


def test_impossible_batch():
    error = _error(global_batch_size=20)
    assert "global_batch_size" in error.what and "2 x 8 = 16" in error.why


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 0},
        {"opt_base_learning_rate": -1.0},
        {"opt_base_learning_rate": float("inf")},
        {"opt_base_learning_rate": float("nan")},
        {"hang_timeout_s": float("inf")},
        {"hang_timeout_s": 1e300},
        {"hang_timeout_s": 10**400},
        {"eval_micro_batch_size": 2**31},
        {"max_samples": 2 * 10**8},
        {"env": {"A=B": "1"}},
        {"env": {"": "1"}},
        {"env": {"A\0": "1"}},
        {"env": {"A": "\0"}},
        {"env": {"A": "é" * 2**16}},
        {"recompute_layers": -1},
        {"linear": "fp7"},
        {"moment_precision": "fp16"},
        {"reduce_scatter": "mail"},
        {"reduce_scatter": "copy_engine", "nodes": 2, "global_batch_size": 32},
        {"reduce_scatter": "copy_engine", "gpu": "MI300X"},
        {"linear": ""},
        {"linear": "torch"},
    ],
)
def test_impossible_value(changes):
    assert next(iter(changes)) in _error(**changes).what


@pytest.mark.parametrize(
    ("key", "value"),
    [("opt_learning_rate_training_steps", 0), ("frozen_base", "halved"), ("offload_layers", 1)],
)
def test_impossible_value_of_lora(key, value):
    table = {
        name: setting for name, setting in GOOD.items() if name != "opt_learning_rate_warmup_steps"
    }
    good = table | {"opt_learning_rate_training_steps": 1024}
    assert configs.from_table(dict(good), lora_rules.Config, "some.toml").frozen_base == "sharded"
    with pytest.raises(ConfigError, match=key):
        configs.from_table(good | {key: value}, lora_rules.Config, "some.toml")


@pytest.mark.parametrize(
    "linear", ["mxfp8", "mxfp4+stochastic", "nvfp4", "mxfp6_e3m2 until step 340, then fp8"]
)
def test_a_format_that_only_studies_emulate_is_refused(linear):
    error = _error(linear=linear)
    assert linear in error.what and "studies" in error.why and "bf16, fp8" in error.do


@pytest.mark.parametrize("key", ["fp8", "block_format", "healing"])
def test_a_former_key_names_the_one_that_took_its_place(key):
    error = _error(**{key: "torch"})
    assert key in error.what and "linear" in error.do


def test_a_key_of_the_other_benchmark_is_unknown():
    with pytest.raises(ConfigError, match="unknown key opt_learning_rate_training_steps"):
        configs.from_table(GOOD | {"opt_learning_rate_training_steps": 1024}, Config, "some.toml")


@each_file
def test_a_config_of_another_benchmark_is_named_as_such(path):
    owner = path.parent.name
    other = next(name for name in closed() if name != owner)
    with pytest.raises(ConfigError, match=f"{path.name} is a config of {owner}") as refused:
        choose(Request(other, file=str(path)), NO_GPUS)
    assert other in refused.value.why
    assert f"./run_and_time.sh {owner} ... --config {path}" in refused.value.do


def test_a_byte_order_mark_is_no_key(tmp_path):
    (tmp_path / "own.toml").write_text("a = 1\n", "utf-8-sig")
    assert read_table(tmp_path / "own.toml") == {"a": 1}


def test_broken_toml_and_missing_file(tmp_path):
    (tmp_path / "broken.toml").write_text("gpu = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "broken.toml", Config)
    with pytest.raises(ConfigError, match="no such config"):
        load(tmp_path / "absent.toml", Config)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, Config)


def test_overrides_from_the_command_line(tmp_path):
    (tmp_path / "good.toml").write_text(
        "\n".join(f"{key} = {value!r}" for key, value in GOOD.items()).replace("'", '"')
    )
    assert (
        load(tmp_path / "good.toml", Config, {"micro_batch_size": "1", "linear": "fp8"}).linear
        == "fp8"
    )
    with pytest.raises(ConfigError, match="unknown key speed"):
        load(tmp_path / "good.toml", Config, {"speed": "11"})
