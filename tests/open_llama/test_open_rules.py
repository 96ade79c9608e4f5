"""Rules from a file: what a config may say, and how it is fitted to a machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common import config as configs
from common.config import ANY_GPU
from common.errors import ConfigError, OutOfMemory
from common.estimate.memory import fits, memory_peak
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import KINDS
from common.paths import ROOT
from launch.plan.derive_config import fit_to_machine
from open_llama.rules import BENCHMARK, Config, rules_of
from open_llama.train import learning_rate

pytestmark = pytest.mark.quick

EXAMPLES = sorted((ROOT / "open_llama/examples").glob("*.toml"))
GOOD = {
    "model": "llama3.2-1b",
    "sequence_length": 1024,
    "global_batch_size": 16,
    "max_samples": 160,
    "eval_samples": 8,
    "eval_interval_samples": 32,
    "opt_base_learning_rate": 1e-3,
    "schedule": "cosine",
    "opt_learning_rate_warmup_steps": 2,
    "weight_decay": 0.1,
    "gradient_clip_norm": 1.0,
}


def config_of(**changes) -> Config:
    return configs.from_table({**GOOD, **changes}, Config, "test")


def example(name: str) -> Config:
    return configs.load(ROOT / "open_llama/examples" / f"{name}.toml", Config)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("schedule", {"schedule": "staircase"}),
        ("opt_learning_rate_warmup_steps", {"opt_learning_rate_warmup_steps": 10}),
        ("max_samples", {"max_samples": 150}),
        ("lora_rank", {"lora_rank": 8}),
        ("recompute_layers", {"lora_rank": 8, "weights": "x", "recompute_layers": 1}),
        ("offload_layers", {"offload_layers": 1}),
        ("adam_beta_2", {"adam_beta_2": 1.0}),
        ("sequence_length", {"sequence_length": 1}),
        ("eval_samples", {"eval_samples": 0}),
        ("lora_alpha", {"lora_alpha": 0}),
        ("end_learning_rate_ratio", {"end_learning_rate_ratio": 5.0}),
        ("miniature", {"miniature": True}),
        ("submission_benchmark", {"submission_benchmark": "foo"}),
    ],
)
def test_a_bad_value_is_refused_by_its_key(key, changes):
    with pytest.raises(ConfigError, match=f"{key} ="):
        rules_of(config_of(**changes))


def test_with_a_target_a_run_may_end_anywhere():
    assert config_of(max_samples=150, target_loss=2.0).steps == 10


def test_mistral_within_its_window_only(tmp_path):
    assert rules_of(config_of(model="mistral-7b-v0.1", sequence_length=4096)).division == "open"
    with pytest.raises(ConfigError, match="sequence_length"):
        rules_of(config_of(model="mistral-7b-v0.1", sequence_length=4097))


def test_a_model_is_a_name_a_file_or_its_folder():
    path = "open_llama/models/llama-10m.json"
    named = rules_of(config_of(model=path)).shape
    assert named == rules_of(config_of(model=str(ROOT / path))).shape
    assert rules_of(config_of(model="Qwen3-8B")).shape.qk_norm
    with pytest.raises(ConfigError):
        rules_of(config_of(model="no_such_model"))


def test_relative_paths_start_at_the_current_directory(tmp_path, monkeypatch):
    in_repository = "open_llama/models/llama-10m.json"
    table = json.loads((ROOT / in_repository).read_text())
    (tmp_path / "shape.json").write_text(json.dumps(table | {"num_hidden_layers": 3}))
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    config = config_of(model="shape.json", weights="base")
    assert config.weights == str(tmp_path / "base")
    (tmp_path / "config.toml").write_text(config.as_toml())
    monkeypatch.chdir("/")
    again = configs.load(tmp_path / "config.toml", Config)
    assert again == config and rules_of(again).shape.num_layers == 3
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere.json", "a/nowhere"):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            rules_of(config_of(model=name))
    # A file of the repository is found from everywhere, and one of the user's goes first.
    assert config_of(model=in_repository).model == in_repository
    assert rules_of(config_of(model=in_repository)).shape.num_layers > 3
    (tmp_path / in_repository).parent.mkdir(parents=True)
    (tmp_path / "shape.json").rename(in_repository)
    assert rules_of(config_of(model=in_repository)).shape.num_layers == 3
    monkeypatch.chdir(ROOT)
    config = config_of(model=in_repository)
    assert config.model == in_repository
    # Only reading a config resolves its paths. A changed copy names the same files.
    monkeypatch.chdir(tmp_path)
    assert replace(config, eval_samples=9).model == in_repository
    assert config_of(model="Llama3.2-1B").model == "Llama3.2-1B"


def test_a_config_that_does_not_exist_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        configs.load(Path("my.toml"), Config)
    assert str(tmp_path / "my.toml") in caught.value.why


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_leave_the_machine_out_and_end_with_an_evaluation(path):
    config = configs.load(path, Config)
    assert config.gpu == ANY_GPU and rules_of(config).data_files
    assert config.max_samples % rules_of(config).eval_interval(config.global_batch_size) == 0


def test_the_models_of_the_examples_have_the_sizes_in_their_names():
    for name, millions in (("llama-10m", 10), ("llama-124m", 124), ("llama-1b", 1040)):
        shape = rules_of(config_of(model=f"open_llama/models/{name}.json")).shape
        assert shape.num_parameters / 1e6 == pytest.approx(millions, rel=0.01)


def fitted(config: Config, kind: str, gpus: int = 1, **overrides: str):
    found, text = fit_to_machine(BENCHMARK, config, KINDS[kind], gpus, overrides)
    assert text
    assert fits(memory_peak(found, benchmark_workload(BENCHMARK, found)), KINDS[kind])
    assert (found.gpu, found.gpus_per_node) == (kind, gpus)
    return found


@pytest.mark.parametrize("kind", ["H100", "H200", "MI300X", "B200"])
@pytest.mark.parametrize("name", ["pretrain_124m", "pretrain_1b", "lora_8b"])
def test_an_example_fits_one_gpu_of_any_kind(name, kind):
    config = fitted(example(name), kind)
    assert config.recompute_layers == config.offload_layers == 0


def test_memory_decides_recomputation_and_refuses_what_does_not_fit():
    large = fitted(example("continue_8b"), "H200")
    assert 0 < large.recompute_layers < 32 and large.moment_precision == "bf16"
    with pytest.raises(OutOfMemory) as caught:
        fitted(example("continue_8b"), "H100")
    assert caught.value.do and "miniature" not in caught.value.do
    assert fitted(example("continue_8b"), "H100", gpus=8).recompute_layers == 0


def test_the_number_of_gpus_must_divide_the_global_batch():
    config = config_of()
    assert fitted(config, "H100", gpus=3 + 1).micro_batch_size == 4
    with pytest.raises(ConfigError, match="3 GPUs"):
        fitted(config, "H100", gpus=3)


def test_gpus_share_sequences_that_are_too_few_or_too_long():
    config = example("pretrain_1b")
    few = fitted(replace(config, global_batch_size=2), "H200", gpus=8)
    assert (few.context_parallel, few.data_ranks) == (4, 2)
    long = replace(config, sequence_length=2**20, global_batch_size=8)
    found = fitted(long, "H200", gpus=8)
    assert found.context_parallel == 2 and found.recompute_layers > 0
    with pytest.raises(OutOfMemory):
        fitted(replace(long, context_parallel=1), "H200", gpus=8, context_parallel="1")
    own = replace(config, gpus_per_node=1, context_parallel=4)  # of a file with gpu = "any"
    assert fitted(own, "H200", gpus=8).context_parallel == 4
    with pytest.raises(ConfigError, match="context_parallel = 4"):
        fitted(own, "H200", gpus=2)


def test_keys_set_on_the_command_line_are_kept():
    config = config_of(micro_batch_size=2)
    assert fitted(config, "H200", micro_batch_size="2").micro_batch_size == 2
    assert fitted(config, "H200").micro_batch_size == 16


def test_a_cpu_computes_in_fp32_with_threads_that_sleep():
    config, _ = fit_to_machine(BENCHMARK, config_of(linear="fp8"), None, 0, {})
    assert (config.gpu, config.precision, config.micro_batch_size) == ("CPU", "fp32", 4)
    assert config.env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_learning_rate_warms_up_and_ends_at_its_ratio():
    for schedule, middle, end in (
        ("cosine", None, 1e-4),
        ("linear", None, 1e-4),
        ("constant", 1e-3, 1e-3),
    ):
        config = config_of(schedule=schedule)
        lr_at = learning_rate(config)
        assert lr_at(0) == pytest.approx(1e-3 / 3) and lr_at(2) == pytest.approx(1e-3)
        assert lr_at(config.steps) == pytest.approx(end)
        assert lr_at(6) == pytest.approx(middle or 5.5e-4)
        logged = dict(rules_of(config).own_log_keys(config))
        assert logged["opt_end_learning_rate"] == pytest.approx(end)


def test_a_log_can_name_a_benchmark_of_mlperf():
    rules = rules_of(config_of(submission_benchmark="llama2_70b_lora"))
    assert (rules.log_name, rules.division) == ("llama2_70b_lora", "open")


def test_the_shape_of_the_rules_is_that_of_config_json(tmp_path):
    table = json.loads((ROOT / "open_llama/models/llama-10m.json").read_text())
    table["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(table))
    shape = rules_of(config_of(model=str(tmp_path))).shape
    assert shape == replace(
        rules_of(config_of(model="open_llama/models/llama-10m.json")).shape, num_layers=3
    )
