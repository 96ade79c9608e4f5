"""Test derived configs: every GPU kind and count without a file, and the order of the options."""

from dataclasses import fields, replace

import pytest

from common import config as configs
from common.benchmarks import config_class
from common.command_line import overrides_of
from common.errors import OutOfMemory
from common.gpu_kinds import GIB, KINDS, GpuKind
from common.paths import ROOT
from launch import selection
from launch.plan import command
from launch.plan.derive_config import HEADROOM, load_or_derive, nearest_file
from launch.plan.memory import USABLE_SHARE, fits, gib, memory_peak, usable_bytes
from launch.plan.workload import benchmark_workload

pytestmark = pytest.mark.quick

PRETRAINING, LORA = "llama31_8b", "llama2_70b_lora"
CONVERGENCE = (
    "global_batch_size",
    "max_samples",
    "opt_base_learning_rate",
    "opt_learning_rate_warmup_steps",
    "opt_learning_rate_training_steps",
)
TOO_SMALL = {
    (PRETRAINING, "H100", 1),
    (PRETRAINING, "H100", 2),
    *((LORA, "H100", gpus) for gpus in (1, 2, 4)),
}


def derived(benchmark, name, machine=None, **overrides):
    path = ROOT / "configs" / benchmark / f"{name}.toml"
    return load_or_derive(
        ROOT, benchmark, path, machine, {key: str(value) for key, value in overrides.items()}
    )


def peak(benchmark, config, kind):
    return memory_peak(config, benchmark_workload(benchmark, config)), kind


@pytest.mark.parametrize("benchmark", [PRETRAINING, LORA])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_kind_in_every_number_fits_or_is_refused_for_its_memory(benchmark, kind, gpus):
    name = f"{kind}_1x{gpus}"
    if (benchmark, kind, gpus) in TOO_SMALL:
        with pytest.raises(OutOfMemory) as caught:
            derived(benchmark, name)
        assert f"{gib(usable_bytes(KINDS[kind])):.1f} usable" in caught.value.why
        return
    config, text = derived(benchmark, name)
    assert bool(text) != (ROOT / "configs" / benchmark / f"{name}.toml").is_file()
    assert fits(*peak(benchmark, config, KINDS[kind]))
    assert (config.gpu, config.nodes, config.gpus_per_node) == (kind, 1, gpus)
    nearest = configs.load(nearest_file(ROOT, benchmark, KINDS[kind], 8), config_class(benchmark))
    assert [key for key in CONVERGENCE if getattr(config, key, 0) != getattr(nearest, key, 0)] == []
    eval_samples = benchmark_workload(benchmark, config).eval_samples
    assert (
        config.eval_micro_batch_size == 1
        or eval_samples % (gpus * config.eval_micro_batch_size) == 0
    )


def test_a_file_is_read_as_it_is():
    path = ROOT / "configs" / PRETRAINING / "H200_1x2.toml"
    assert derived(PRETRAINING, "H200_1x2") == (configs.load(path, config_class(PRETRAINING)), "")


def test_the_fewest_layers_are_recomputed_that_leave_room():
    """4 H100s: torch's 5 % of reserve, not only its 1 %."""
    config, text = derived(PRETRAINING, "H100_1x4")
    roomy = replace(KINDS["H100"], memory_bytes=int(80 * GIB * HEADROOM))
    fewer = replace(config, recompute_layers=config.recompute_layers - 1)
    assert (
        0 < config.recompute_layers < 32 and f"recompute_layers {config.recompute_layers}" in text
    )
    assert [fits(*peak(PRETRAINING, each, roomy)) for each in (config, fewer)] == [True, False]


def test_the_largest_micro_batch_of_the_file_that_fits():
    # Between what micro-batches 1 and 2 need on two GPUs.
    machine = GpuKind("X", "amd", "gfx942", 304, 152 * GIB, 0.0, 0.0)
    sizes = {
        size: derived(PRETRAINING, "X_1x2", replace(machine, memory_bytes=size * GIB))[0]
        for size in (145, 170, 288)
    }
    assert [(config.micro_batch_size, config.recompute_layers) for config in sizes.values()] == [
        (1, 0),
        (2, 0),
        (2, 0),
    ]


def test_a_smaller_gpu_stores_the_base_with_less_memory_and_offloads_before_it_shards():
    """The LoRA base takes 128 GiB for W and W^T, 64 for W alone, and 16 for shards of both on 8
    GPUs.
    """
    machine = GpuKind("X", "amd", "gfx950", 256, 288 * GIB, 0.0, 0.0)
    found = {
        size: derived(
            LORA, "X_1x8", replace(machine, memory_bytes=size * GIB), frozen_base="replicated"
        )[0]
        for size in (192, 150)
    }
    assert (found[192].offload_layers, found[150].frozen_base) == (0, "replicated") and 0 < found[
        150
    ].offload_layers < 80
    near = {
        size: derived(LORA, "X_1x8", replace(machine, memory_bytes=size * GIB))[0]
        for size in (288, 80)
    }
    assert [config.frozen_base for config in near.values()] == ["replicated_both", "sharded"]


def test_one_gpu_reduces_nothing_by_copy_engines(tmp_path):
    folder = tmp_path / "configs" / PRETRAINING
    folder.mkdir(parents=True)
    (folder / "H200_1x4.toml").write_text(
        (ROOT / "configs" / PRETRAINING / "H200_1x4.toml").read_text()
    )
    config, text = load_or_derive(tmp_path, PRETRAINING, folder / "H200_1x2.toml")
    assert config.reduce_scatter == "copy_engine" and "from H200_1x4.toml" in text
    config, _ = load_or_derive(
        tmp_path, PRETRAINING, folder / "H200_1x2.toml", None, {"reduce_scatter": "nccl"}
    )
    assert config.reduce_scatter == "nccl", "the command line wins"
    machine = GpuKind("X", "nvidia", "sm_100", 148, 180 * GIB, 0.0, 0.0)
    chosen = {
        gpus: load_or_derive(tmp_path, PRETRAINING, folder / f"X_1x{gpus}.toml", machine)[
            0
        ].reduce_scatter
        for gpus in (1, 2)
    }
    assert chosen == {1: "nccl", 2: "copy_engine"}, "another GPU of the same maker"
    other = GpuKind("Y", "amd", "gfx950", 256, 288 * GIB, 0.0, 0.0)
    assert (
        load_or_derive(tmp_path, PRETRAINING, folder / "Y_1x2.toml", other)[0].reduce_scatter
        == "nccl"
    )


def test_what_does_not_fit_is_told_the_number_of_gpus_that_does():
    with pytest.raises(OutOfMemory) as caught:
        derived(PRETRAINING, "H100_1x1")
    assert "use 4 GPUs" in caught.value.do and caught.value.exit_code == 12
    assert derived(PRETRAINING, "H100_1x4")[1]


def test_a_value_of_the_command_line_is_kept():
    config, text = derived(PRETRAINING, "MI300X_1x2", micro_batch_size=1, recompute_layers=3)
    assert (config.micro_batch_size, config.recompute_layers) == (
        1,
        3,
    ) and "micro_batch_size" not in text
    assert {f.name for f in fields(config)} >= {"micro_batch_size"}


def test_plan_shows_a_derived_config_and_an_unknown_gpu_without_its_speed(capsys, monkeypatch):
    from common.hardware import Device, Probe

    monkeypatch.setenv("DGXSYSTEM", "MI325X_1x2")
    assert command.main(ROOT, LORA, []) == 0
    assert (
        "derived for 2 x MI325X from MI325X_1x8.toml: micro_batch_size 1" in capsys.readouterr().out
    )
    monkeypatch.delenv("DGXSYSTEM")
    card = Device("NVIDIA Z300", "sm_107", 180 * GIB)
    monkeypatch.setattr(selection, "probe", lambda environment: Probe("nvidia", (card,) * 2))
    assert command.main(ROOT, PRETRAINING, []) == 0
    said = capsys.readouterr().out
    assert (
        "derived for 2 x NVIDIA_Z300" in said
        and f"{180 * USABLE_SHARE:.1f} usable on NVIDIA_Z300" in said
    )


def test_of_a_key_given_twice_the_last_value_counts():
    assert overrides_of(["nodes=1", "gpu=H100", "nodes=2"]) == {"nodes": "2", "gpu": "H100"}
