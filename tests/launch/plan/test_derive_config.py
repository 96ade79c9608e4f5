"""Test derived configs: every GPU kind and count without a file, and the order of the options."""

from dataclasses import fields, replace

import pytest

from common import config as configs
from common.benchmarks import config_class, rules_of
from common.errors import ConfigError, OutOfMemory
from common.estimate.memory import fits, gib, memory_peak, usable_bytes
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import GIB, KINDS, GpuKind
from common.paths import ROOT
from common.records import rcp
from launch.plan.command import main as plan
from launch.plan.derive_config import HEADROOM, derive, nearest_file
from launch.plan.scaling import benchmark_point
from launch.selection.choose import choose
from launch.selection.machine import NO_GPUS, Machine
from launch.selection.request import Request

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
    *((LORA, "H100", gpus) for gpus in (1, 2)),
}


def derived(benchmark, name, machine=None, **overrides):
    """Return the config that a run gets for a name in configs/, and how it was derived.

    `machine`: a GPU that common/gpu_kinds.py lacks, on this machine.
    """
    texts = {key: str(value) for key, value in overrides.items()}
    here = Machine.imagined(machine, 1) if machine else NO_GPUS
    choice = choose(Request(benchmark, system=name, overrides=texts), here)
    return choice.config, choice.derived


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


# GPUs that share a sequence, global batch; learning rate and warm-up steps, by the RCPs.
ON_NODES = [
    (PRETRAINING, "MI355X_2x8", 1, 16, 4e-4, 16, "RCP's"),
    (PRETRAINING, "MI300X_4x8", 1, 32, 8e-4, 128, "RCP's"),
    (PRETRAINING, "H100_8x8", 2, 32, 8e-4, 128, "RCP's"),
    (PRETRAINING, "H200_6x8", 1, 48, 8e-4, 107, "interpolated"),
    (PRETRAINING, "B200_32x8", 1, 256, 6e-3, 385, "beyond"),
    (PRETRAINING, "MI300X_64x8", 4, 128, 2e-3, 256, "RCP's"),
    (LORA, "MI355X_2x8", 2, 8, 4e-4, 0, "RCP's"),
    (LORA, "H200_8x8", 4, 16, 4e-4, 0, "RCP's"),
    (LORA, "MI300X_32x8", 4, 64, 6e-4, 0, "interpolated"),
]


@pytest.mark.parametrize(
    ("benchmark", "name", "sharing", "batch", "rate", "warmup", "source"), ON_NODES
)
def test_several_nodes_get_the_batch_that_reaches_the_target_first(
    benchmark, name, sharing, batch, rate, warmup, source
):
    config, text = derived(benchmark, name)
    assert config.context_parallel == sharing
    kind = KINDS[config.gpu]
    assert name == f"{config.gpu}_{config.nodes}x{config.gpus_per_node}" and source in text
    assert (config.global_batch_size, config.opt_base_learning_rate) == (batch, rate)
    assert getattr(config, "opt_learning_rate_warmup_steps", 0) == warmup
    rules = rules_of(benchmark, config)
    assert config.max_samples % rules.eval_interval(batch) == 0
    assert 1.9 < config.max_samples / rcp.samples_to_target(rules, batch)[0] < 2.1
    assert fits(*peak(benchmark, config, kind))
    minutes = benchmark_point(benchmark, kind, config.world_size).minutes
    for other in rules.reference_runs:
        if other % config.world_size == 0 and other != batch:
            assert (
                minutes < benchmark_point(benchmark, kind, config.world_size, batch=other).minutes
            )


def test_gpus_share_sequences_only_if_there_are_fewer_or_if_nothing_else_fits():
    config, _ = derived(PRETRAINING, "MI300X_1x4", global_batch_size=2)
    assert (config.context_parallel, config.data_ranks) == (2, 2)
    config, text = derived(LORA, "H100_1x4")
    assert config.context_parallel == 2 and "context_parallel 2" in text
    alone = replace(config, context_parallel=1, offload_layers=80)
    assert not fits(*peak(LORA, alone, KINDS["H100"]))


def test_the_number_of_gpus_that_share_a_sequence_can_be_set():
    config, _ = derived(LORA, "H200_2x8", global_batch_size=8, context_parallel=4)
    assert (config.context_parallel, config.gradient_accumulation_steps) == (4, 2)
    config, _ = derived(PRETRAINING, "H200_4x8", context_parallel=4)
    assert (config.global_batch_size, config.context_parallel) == (16, 4)
    with pytest.raises(ConfigError, match="context_parallel = 3"):
        derived(PRETRAINING, "MI355X_4x8", context_parallel=3)


@pytest.mark.parametrize("benchmark", [PRETRAINING, LORA])
@pytest.mark.parametrize("kind", ["MI325X", "MI350X", "H200"])
def test_the_shipped_files_of_two_nodes_are_what_is_derived_for_their_batch(benchmark, kind):
    """But for the layers that LoRA offloads on an H200, which were measured on one node."""
    folder = ROOT / "configs" / benchmark
    shipped = configs.load(folder / f"{kind}_2x8.toml", config_class(benchmark))
    one_node = configs.read(folder / f"{kind}_1x8.toml", config_class(benchmark))
    batch = {"global_batch_size": str(shipped.global_batch_size)}
    config, _ = derive(benchmark, replace(one_node, overrides=batch), KINDS[kind], 8, 2)
    if shipped.offload_layers:
        config = replace(config, offload_layers=shipped.offload_layers)
    assert config == shipped


def test_a_key_of_the_command_line_replaces_that_of_the_reference():
    config, _ = derived(PRETRAINING, "MI355X_2x8", global_batch_size=64, max_samples=24576)
    assert (config.opt_base_learning_rate, config.max_samples) == (8e-4, 24576)
    for batch, word in ((21, "share"), (8, "reference")):
        with pytest.raises(ConfigError, match=word):
            derived(PRETRAINING, "MI355X_2x4", global_batch_size=batch)
    with pytest.raises(ConfigError, match="3 processes"):
        derived(PRETRAINING, "CPU_3x1")


def test_gpus_of_unknown_speed_get_the_fewest_sequences():
    machine = GpuKind("X", "amd", "gfx942", 304, 192 * GIB, 0.0, 0.0)
    config, _ = derived(PRETRAINING, "X_3x8", machine)
    assert (config.nodes, config.global_batch_size, config.gpu) == (3, 24, "X")


@pytest.mark.parametrize(("benchmark", "batch"), [(PRETRAINING, 16), (LORA, 8)])
@pytest.mark.parametrize("nodes", [2, 4])
def test_the_miniature_on_several_nodes_keeps_its_batch(benchmark, batch, nodes):
    config, _ = derived(benchmark, f"CPU_{nodes}x1")
    file = configs.load(ROOT / "configs" / benchmark / "CPU_1x1.toml", config_class(benchmark))
    assert (config.nodes, config.micro_batch_size * nodes, config.miniature) == (nodes, batch, True)
    assert [key for key in CONVERGENCE if getattr(config, key, 0) != getattr(file, key, 0)] == []


def test_a_written_config_is_the_derived_one_and_replaces_no_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "MI355X_2x8.toml"
    monkeypatch.setenv("DGXSYSTEM", "MI355X_2x8")
    for benchmark in (LORA, PRETRAINING):
        path.unlink(missing_ok=True)
        assert plan(benchmark, ["--write", str(path)]) == 0
        loaded = configs.load(path, config_class(benchmark))
        assert loaded == derived(benchmark, "MI355X_2x8")[0]
        assert "moment_precision" not in path.read_text(), "defaults are left out"
    for words, word in (([], "exists"), (["--all"], "--write"), (["--scaling", "H200"], "--write")):
        with pytest.raises(ConfigError, match=word):
            plan(PRETRAINING, [*words, "--write", str(path)])
    assert configs.load(path, config_class(PRETRAINING)) == loaded


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


def test_one_gpu_reduces_nothing_by_copy_engines():
    """The config that is copied has copy engines, which reach GPUs of one maker and node."""
    file = configs.read(ROOT / "configs" / PRETRAINING / "H200_1x4.toml", config_class(PRETRAINING))
    assert file.config.reduce_scatter == "copy_engine"

    def engine(kind, gpus, **overrides):
        return derive(PRETRAINING, replace(file, overrides=overrides), kind, gpus)[0].reduce_scatter

    assert engine(KINDS["H200"], 2) == "copy_engine"
    assert engine(KINDS["H200"], 2, reduce_scatter="nccl") == "nccl", "the command line wins"
    same_maker = GpuKind("X", "nvidia", "sm_100", 148, 180 * GIB, 0.0, 0.0)
    assert [engine(same_maker, gpus) for gpus in (1, 2)] == ["nccl", "copy_engine"]
    other = GpuKind("Y", "amd", "gfx950", 256, 288 * GIB, 0.0, 0.0)
    assert engine(other, 2) == "nccl"


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
