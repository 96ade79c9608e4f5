"""What `tune` tries: for the GPUs of the shipped configs, without a GPU."""

from dataclasses import replace

import pytest

from common import engines
from common.benchmarks import closed, load_all
from common.config import RunConfig
from common.estimate.memory import fits, memory_peak
from common.estimate.step_time import estimate
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import KINDS
from common.paths import ROOT
from launch.tune import candidates
from launch.tune.candidates import changed, memory_candidates, reduced, settings, value_of

BAD = {
    "micro_batch_size": 1,
    "recompute_layers": 32,
    "offload_layers": 0,
    "frozen_base": "sharded",
    "moment_precision": "fp32",
}
# Configs of one node.
SHIPPED = {
    f"{benchmark}/{name}": (benchmark, config)
    for benchmark in closed()
    for name, config in load_all(ROOT, benchmark).items()
    if config.nodes == 1 and config.gpu in KINDS
}


def badly_set(config: RunConfig) -> RunConfig:
    return replace(config, **{key: value for key, value in BAD.items() if config.has_key(key)})


# Those of the H100 leave more memory free than HEADROOM.
@pytest.mark.parametrize("name", [name for name in SHIPPED if "H100" not in name])
def test_the_shipped_config_is_among_the_candidates_of_a_bad_one(name):
    benchmark, shipped = SHIPPED[name]
    base = badly_set(shipped)
    found = memory_candidates(base, benchmark_workload(benchmark, base), KINDS[base.gpu])
    wanted = reduced(base, {key: value_of(shipped, key) for key in BAD if base.has_key(key)})
    assert wanted in [{}, *found]
    assert len(found) <= 10


@pytest.mark.parametrize("name", SHIPPED)
def test_every_candidate_fits_by_calculation(name):
    benchmark, shipped = SHIPPED[name]
    base = badly_set(shipped)
    work = benchmark_workload(benchmark, base)
    for changes in memory_candidates(base, work, KINDS[base.gpu]):
        config = changed(base, changes)
        assert fits(memory_peak(config, work), KINDS[base.gpu])


def test_a_config_that_fits_barely_is_tried_with_headroom_too():
    benchmark, shipped = SHIPPED["llama31_8b/H100_1x8"]
    found = memory_candidates(shipped, benchmark_workload(benchmark, shipped), KINDS["H100"])
    layers = [each["recompute_layers"] for each in found if each.keys() == {"recompute_layers"}]
    assert layers[0] == 0 and len(layers) == 2


def test_the_fastest_by_plan_comes_first():
    benchmark, shipped = SHIPPED["llama31_8b/H200_1x2"]
    work = benchmark_workload(benchmark, shipped)
    kind = KINDS["H200"]
    found = memory_candidates(badly_set(shipped), work, kind)
    steps_s = [
        estimate(changed(badly_set(shipped), each), work, kind, None).step_s for each in found
    ]
    assert steps_s == sorted(steps_s) and len(steps_s) > 2
    assert steps_s[-1] <= candidates.SLOWER_BY_PLAN * steps_s[0]


def settings_of(name: str, environment: dict[str, str] | None = None, **changes):
    benchmark, shipped = SHIPPED[name]
    config = replace(shipped, **changes)
    return settings(
        config, benchmark_workload(benchmark, config), KINDS[config.gpu], environment or {}
    )


def test_each_vendor_has_its_variables():
    amd = settings_of("llama31_8b/MI355X_1x8")
    nvidia = settings_of("llama31_8b/H200_1x8")
    assert amd["GPU_MAX_HW_QUEUES"] == [None, "2", "4", "8"]
    assert "GPU_MAX_HW_QUEUES" not in nvidia and nvidia["PYTORCH_CUDA_ALLOC_CONF"]
    assert amd["ZERO_STREAM_PRIORITY"] == nvidia["ZERO_STREAM_PRIORITY"] == [None, "-1"]
    # Without them RCCL may hang, and NCCL may not start.
    assert not {"HSA_NO_SCRATCH_RECLAIM", "NCCL_NVLS_ENABLE"} & (amd.keys() | nvidia.keys())


def test_one_gpu_has_no_settings_of_communication():
    found = settings_of("llama31_8b/H200_1x1")
    assert not {"reduce_scatter", "NCCL_MAX_NCHANNELS", "ZERO_STREAM_PRIORITY"} & found.keys()


def test_copy_engines_are_tried_where_they_work():
    assert settings_of("llama31_8b/H200_1x2")["reduce_scatter"] == ["copy_engine", "nccl"]
    assert "reduce_scatter" not in settings_of("llama31_8b/MI300X_1x8")
    assert "reduce_scatter" not in settings_of("llama2_70b_lora/H200_1x2")


def test_engines_that_are_installed_are_tried(monkeypatch):
    versions = {"flash-attn-4": "4.0.0"}
    monkeypatch.setattr(engines, "version_of", lambda package: versions.get(package, ""))
    found = settings_of("llama31_8b/H200_1x2")
    # FlashAttention-4 is used unless another engine is pinned.
    assert found["ATTENTION_ENGINE"] == [None, "repeated_heads", "sdpa"]
    assert found["MATMUL_ENGINE"] == [None, "torch"]
    versions.clear()
    assert settings_of("llama31_8b/H200_1x2")["ATTENTION_ENGINE"] == [None, "repeated_heads"]


def test_an_engine_of_swiglu_is_tried_only_where_one_applies(monkeypatch):
    versions = {"quack-kernels": "0.6.5"}
    monkeypatch.setattr(engines, "version_of", lambda package: versions.get(package, ""))
    assert settings_of("llama31_8b/H200_1x2")["SWIGLU_ENGINE"] == [None, "kernel"]
    assert "SWIGLU_ENGINE" not in settings_of("llama31_8b/H200_1x2", linear="bf16")
    assert settings_of("llama2_70b_lora/H200_1x2")["SWIGLU_ENGINE"] == [None, "kernel"]


def test_a_pinned_engine_is_a_value_like_others(monkeypatch):
    monkeypatch.setattr(engines, "version_of", lambda package: "")
    found = settings_of("llama31_8b/H200_1x2", env={"MATMUL_ENGINE": "torch"})
    assert found["MATMUL_ENGINE"] == [None, "torch"]


def test_a_value_of_the_config_that_is_not_listed_is_tried_too():
    found = settings_of("llama31_8b/MI355X_1x8", env={"GPU_MAX_HW_QUEUES": "3"})
    assert found["GPU_MAX_HW_QUEUES"] == [None, "2", "4", "8", "3"]


def test_a_variable_that_the_user_sets_stays():
    found = settings_of("llama31_8b/MI355X_1x8", {"GPU_MAX_HW_QUEUES": "2"})
    assert "GPU_MAX_HW_QUEUES" not in found and "NCCL_MAX_NCHANNELS" in found


def test_changes_set_keys_and_variables_and_remove_variables():
    _, config = SHIPPED["llama31_8b/H200_1x2"]
    changes = {"micro_batch_size": 2, "PYTORCH_CUDA_ALLOC_CONF": None, "NCCL_MAX_NCHANNELS": "16"}
    found = changed(config, changes)
    assert found.micro_batch_size == 2
    assert found.env == {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "16"}
    assert reduced(config, changes) == changes
    assert reduced(found, changes) == {}
