"""Which config is selected for which machine, and what is refused."""

import argparse
import re

import pytest
from probes import H200X4, MI300X, NOTHING

from common.benchmarks import names
from common.errors import ConfigError, OutOfMemory, PreflightError
from common.gpu_kinds import GIB, KINDS
from common.hardware import Device, Probe
from common.paths import ROOT
from launch import commands
from launch.select_config import select_config
from launch.selection import Machine, Request
from submission.own_log import CONFIG_NAME

pytestmark = pytest.mark.quick

MINIATURES = sorted(ROOT.glob("configs/*/CPU_1x1.toml"))


def options(config=None, set=(), device=None, miniature=False):
    return argparse.Namespace(config=config, set=list(set), device=device, miniature=miniature)


def select(gpus, environment=None, benchmark="llama31_8b", measurement=False, **changes):
    environment = environment or {}
    request = Request.of(benchmark, options(**changes), environment)
    machine = Machine(gpus, environment.get("GPU_KIND", ""))
    return select_config(ROOT, request, machine, measurement)


def test_benchmarks_are_found():
    assert {"llama31_8b", "llama2_70b_lora"} <= {*names()}


def test_the_gpu_decides():
    chosen = select(H200X4)
    assert (chosen.log_name, chosen.device, chosen.notes) == ("H200_1x4.toml", "cuda", ())
    assert "4 x H200" in chosen.reason and "NVIDIA H200" in chosen.gpus
    assert select(MI300X).log_name == "MI300X_1x8.toml"
    assert select(H200X4, {"DGXNGPU": "2"}).config.gpus_per_node == 2


def test_no_gpu_is_the_miniature():
    for chosen in (
        select(NOTHING),
        select(H200X4, device="cpu"),
        select(H200X4, {"DGXSYSTEM": "CPU_1x1"}),
    ):
        assert (chosen.log_name, chosen.device, chosen.config.miniature) == (
            "CPU_1x1.toml",
            "cpu",
            True,
        )


@pytest.mark.parametrize(
    ("found", "environment", "words"),
    [
        (H200X4, {"DGXSYSTEM": "MI300X_1x8"}, "MI300X.* H200"),
        (H200X4, {"DGXSYSTEM": "H200_1x8"}, "8 GPUs"),
        (H200X4, {"DGXSYSTEM": "H200"}, "H200"),
        (H200X4, {"DGXNGPU": "3"}, "3 GPUs .*16"),
        (H200X4, {"DGXNGPU": "two"}, "DGXNGPU=two"),
        (H200X4, {"DGXNGPU": "²"}, "DGXNGPU=²"),
        (H200X4, {"DGXNGPU": "2", "DGXSYSTEM": "H200_1x4"}, "DGXNGPU=2"),
    ],
)
def test_what_does_not_fit_is_a_config_error(found, environment, words):
    with pytest.raises(ConfigError, match=words):
        select(found, environment)


@pytest.mark.parametrize(
    ("environment", "changes", "undo"),
    [
        ({"DGXSYSTEM": "MI300X_1x8"}, {}, "unset DGXSYSTEM"),
        ({}, {"set": ["gpu=H100"]}, "leave out --set gpu"),
    ],
)
def test_a_config_for_another_gpu_names_what_selected_it(environment, changes, undo):
    with pytest.raises(ConfigError) as caught:
        select(H200X4, environment, **changes)
    assert undo in caught.value.do


def test_cuda_without_a_gpu():
    with pytest.raises(PreflightError, match="no GPU"):
        select(NOTHING, device="cuda")


REAL_RUNS = [
    {"DATADIR": "/data/c4"},
    {"MODEL": "/data/llama2-70b"},
    {"NEXP": "10"},
    {"DGXSYSTEM": "H200_1x4"},
    {"DGXNGPU": "8"},
    {"MLPERF_SUBMISSION_ORG": "Us"},
    {"DATADIR": "/data/c4", "NEXP": "10", "MLPERF_SUBMISSION_PLATFORM": "MI300X"},
]


@pytest.mark.parametrize("environment", REAL_RUNS, ids=lambda each: "+".join(each))
def test_hidden_gpus_do_not_make_a_real_run_a_miniature(environment):
    with pytest.raises(PreflightError, match="no GPU is visible") as caught:
        select(NOTHING, environment)
    assert all(name in caught.value.what for name in environment)
    assert "--miniature" in caught.value.do


@pytest.mark.parametrize("environment", REAL_RUNS, ids=lambda each: "+".join(each))
def test_the_miniature_is_trained_on_request(environment):
    if "DGXNGPU" in environment:
        with pytest.raises(ConfigError, match="DGXNGPU"):
            select(NOTHING, environment, miniature=True)
        return
    chosen = select(NOTHING, environment, miniature=True)
    assert chosen.config.miniature and chosen.device == "cpu"


@pytest.mark.parametrize("environment", [{}, {"NEXP": "1"}, {"NEXP": ""}, {"DATADIR": ""}])
def test_a_machine_without_gpus_trains_the_miniature_if_nothing_else_is_asked(environment):
    assert select(NOTHING, environment).config.miniature


def test_a_config_for_gpus_does_not_start_on_a_cpu_by_itself():
    config = str(ROOT / "configs/llama31_8b/MI300X_1x8.toml")
    with pytest.raises(PreflightError, match="8 x MI300X"):
        select(NOTHING, config=config)
    assert select(NOTHING, config=config, device="cpu").log_name == "MI300X_1x8+forced.toml"


@pytest.mark.parametrize(
    ("environment", "changes", "words"),
    [
        ({"GPU_KIND": "MI999X"}, {}, "GPU_KIND=MI999X is unknown"),
        ({}, {"miniature": True, "set": ["miniature=false"]}, "--set miniature=false"),
        ({}, {"set": ["env.FOO=1"]}, "--set env.FOO=1 sets an environment"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(environment, changes, words):
    with pytest.raises(ConfigError, match=words):
        select(Probe("none"), environment, **changes)


def test_an_unknown_gpu_of_a_config_is_named_where_no_gpu_is_visible():
    file = str(ROOT / "configs/llama31_8b/MI355X_1x8.toml")
    with pytest.raises(ConfigError, match="gpu = 'MI999X' is unknown") as refused:
        select(Probe("none"), config=file, set=["gpu=MI999X"])
    assert "MI355X" in refused.value.do


def test_only_a_miniature_for_gpus_is_advised_to_run_on_a_cpu():
    file = str(ROOT / "configs/llama31_8b/MI355X_1x8.toml")
    with pytest.raises(PreflightError, match="no GPU is visible") as refused:
        select(Probe("none"), config=file)
    assert "--device cpu" not in refused.value.do
    miniature = str(ROOT / "configs/llama31_8b/CPU_1x1.toml")
    with pytest.raises(PreflightError, match="no GPU is visible") as refused:
        select(Probe("none"), config=miniature, set=["gpu=H200"])
    assert "--device cpu" in refused.value.do


def test_forced_and_changed_configs_say_so():
    forced = select(
        H200X4, config=str(ROOT / "configs/llama31_8b/MI300X_1x8.toml"), set=["gpus_per_node=4"]
    )
    assert forced.log_name == "MI300X_1x8+forced+modified.toml"
    assert len(forced.notes) == 2 and all("not for submission" in note for note in forced.notes)
    # The RCP checker would take these words in config_filename for events.
    assert "global_batch_size" not in select(H200X4, set=["global_batch_size=32"]).log_name
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        select(H200X4, set=["precision"])
    with pytest.raises(ConfigError, match="unknown key"):
        select(H200X4, set=["precison=fp32"])


def some(probe, count):
    return Probe(probe.vendor, probe.devices[:count], probe.driver)


def test_two_gpus_without_a_file_get_a_derived_config():
    chosen = select(some(MI300X, 2))
    assert chosen.log_name == "MI300X_1x2+derived.toml" and chosen.device == "cuda"
    assert chosen.derived == "derived for 2 x MI300X from MI300X_1x8.toml: micro_batch_size 2"
    assert (
        chosen.config.gpu,
        chosen.config.gpus_per_node,
        chosen.config.gradient_accumulation_steps,
    ) == ("MI300X", 2, 4)
    assert len(chosen.notes) == 1 and "not for submission" in chosen.notes[0]
    assert (
        select(MI300X, {"DGXNGPU": "2"}).config
        == chosen.config
        == select(MI300X, {"DGXSYSTEM": "MI300X_1x2"}).config
    )
    assert select(MI300X).derived == "" and not select(MI300X).notes, "a file wins"
    assert (
        select(some(MI300X, 2), set=["micro_batch_size=1"]).log_name
        == "MI300X_1x2+derived+modified.toml"
    )


def test_a_batch_of_the_command_line_lets_other_counts_share_it():
    chosen = select(
        MI300X, {"DGXNGPU": "3"}, set=["global_batch_size=18", "opt_base_learning_rate=5e-4"]
    )
    assert (
        chosen.config.gpus_per_node,
        chosen.config.micro_batch_size,
        chosen.config.gradient_accumulation_steps,
    ) == (3, 2, 3)
    assert (
        chosen.config.opt_base_learning_rate == 5e-4 and "global_batch_size" not in chosen.derived
    ), "that is not what was derived"


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_what_cannot_share_the_batch_is_told_what_can(count):
    with pytest.raises(ConfigError) as caught:
        select(some(MI300X, count))
    assert (
        "DGXNGPU to 1 or 2 or 4 or 8" in caught.value.do and "global_batch_size=" in caught.value.do
    )
    # RCPs: 4e-4 at 16 and 8e-4 at 32
    batch = -(-16 // count) * count
    assert f"opt_base_learning_rate={4e-4 + (batch - 16) / 16 * 4e-4:.3g}" in caught.value.do
    assert "interpolated" in caught.value.do


# GPUs that common/gpu_kinds.py lacks.
A100 = Probe("nvidia", (Device("NVIDIA A100-SXM4-80GB", "sm_80", 81920 * 2**20),) * 8)
Z300 = Probe("nvidia", (Device("NVIDIA Z300", "sm_107", 200 * GIB),) * 2)
L40S = Probe("nvidia", (Device("NVIDIA L40S", "sm_89", 46068 * 2**20),))
MI300A = Probe("amd", (Device("AMD Instinct MI300A", "gfx942", 128 * GIB, 228),) * 8)


@pytest.mark.parametrize("measurement", [False, True])
@pytest.mark.parametrize("found", [A100, Z300, MI300A])
def test_an_unknown_gpu_gets_a_derived_kind_and_config(found, measurement):
    chosen = select(found, measurement=measurement)
    assert "+derived" in chosen.log_name
    assert any("derived GPU kind" in note for note in chosen.notes)
    assert any("not for submission" in note for note in chosen.notes)
    assert chosen.config.gpu not in KINDS and chosen.config.gpu in chosen.derived
    assert chosen.config.reduce_scatter == ("copy_engine" if found is Z300 else "nccl"), (
        "as in the nearest file of the same maker"
    )
    assert CONFIG_NAME.fullmatch(chosen.log_name) and chosen.gpus.startswith(
        f"{len(found.devices)} x "
    )


def test_an_unknown_gpu_takes_the_file_of_its_maker_with_the_nearest_memory():
    assert "from MI300X_1x8.toml" in select(MI300A, measurement=True).derived
    assert "from GB200_1x4.toml" in select(Z300, measurement=True).derived
    assert (
        select(Z300, measurement=True).config.linear == "fp8"
        and select(Z300, measurement=True).config.recompute_layers == 0
    )


@pytest.mark.parametrize("benchmark", [path.parent.name for path in MINIATURES])
@pytest.mark.parametrize(
    ("found", "linear"),
    [
        *((A100, "bf16"), (L40S, "fp8"), (Z300, "fp8"), (MI300A, "fp8"), (H200X4, "fp8")),
        (MI300X, "fp8"),
    ],
)
def test_the_miniature_runs_on_one_gpu_of_any_kind(benchmark, found, linear):
    chosen = select(found, benchmark=benchmark, miniature=True)
    config = chosen.config
    assert chosen.device == "cuda" and config.miniature
    assert (config.gpus_per_node, config.linear) == (1, linear)
    assert (config.kernels, config.precision) == ("triton", "bf16")
    assert chosen.log_name == "CPU_1x1+derived.toml" and CONFIG_NAME.fullmatch(chosen.log_name)
    plain = select(found, benchmark=benchmark, miniature=True, set=["linear=bf16"])
    assert plain.config.linear == "bf16"


def test_the_miniature_in_fp8_needs_a_gpu_with_fp8():
    with pytest.raises(ConfigError, match="linear"):
        select(A100, miniature=True, set=["linear=fp8"])


def test_the_miniature_of_a_gpu_machine_runs_on_the_cpu_too():
    chosen = select(A100, miniature=True, device="cpu")
    assert (chosen.device, chosen.log_name) == ("cpu", "CPU_1x1.toml")


def test_the_miniatures_config_runs_on_any_gpu():
    chosen = select(A100, config=str(ROOT / "configs/llama31_8b/CPU_1x1.toml"), device="cuda")
    assert chosen.device == "cuda" and chosen.config.miniature


def test_a_gpu_without_fp8_computes_in_bf16():
    chosen = select(A100, measurement=True)
    assert chosen.config.linear == "bf16" and "linear bf16" in chosen.derived
    with pytest.raises(
        OutOfMemory
    ) as caught:  # 80 layers keep 115 GiB for backward, and only FP8 can offload them
        select(A100, benchmark="llama2_70b_lora", measurement=True)
    assert "offload_layers 0, frozen_base sharded" in caught.value.why


def test_a_gpu_that_is_too_small_measures_fewer_layers():
    with pytest.raises(OutOfMemory) as caught:
        select(L40S, measurement=True)
    layers = int(re.search(r"--layers (\d+)", caught.value.do)[1])
    machine = Machine(L40S)
    fewer = Request("llama31_8b", layers=layers)
    assert select_config(ROOT, fewer, machine, measurement=True).config.gpus_per_node == 1
    with pytest.raises(OutOfMemory, match="not fit"):
        select_config(ROOT, Request("llama31_8b", layers=layers + 1), machine, measurement=True)


def test_a_config_that_only_bears_our_name_is_modified(tmp_path):
    ours = ROOT / "configs/llama31_8b/H200_1x4.toml"
    (tmp_path / ours.name).write_text(ours.read_text())
    assert select(H200X4, config=str(tmp_path / ours.name)).log_name == "H200_1x4.toml"
    (tmp_path / ours.name).write_text(ours.read_text() + "# changed\n")
    changed = select(H200X4, config=str(tmp_path / ours.name))
    assert changed.log_name == "H200_1x4+modified.toml" and "differs" in changed.notes[0]


def test_versions_known_to_compute_wrongly_are_refused_for_a_run_and_named_for_a_measurement(
    monkeypatch,
):
    monkeypatch.setattr(
        "common.known_issues.installed", lambda driver: {"rocm": "7.13.26183", "driver": driver}
    )
    mi355x = Probe("amd", (Device("AMD Instinct MI355X", "gfx950", 288 * GIB, 256),) * 8)
    with pytest.raises(PreflightError, match=r"rocm 7\.13\.26183 .*MI355X"):
        select(mi355x)
    for chosen in (
        select(mi355x, measurement=True),
        select(mi355x, {"ALLOW_KNOWN_ISSUES": "rocm-7.12-bf16-nan"}),
    ):
        assert "rocm-7.12-bf16-nan" in chosen.notes[0]
    assert select(MI300X).notes == () and select(mi355x, device="cpu").notes == ()


@pytest.mark.parametrize(("benchmark", "notes"), [("open_llama", 0), ("llama2_70b_lora", 1)])
def test_only_a_log_that_names_a_benchmark_of_mlperf_has_notes_on_submission(
    benchmark, notes, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(commands, "refusal_reasons", lambda root, environment: ["a reason"])
    monkeypatch.setattr(commands.system_settings, "advice", lambda: "advice")
    example = str(ROOT / "open_llama/examples/stdlib_10m.toml")
    change = f"submission_benchmark={benchmark}"
    chosen = select(NOTHING, benchmark="open_llama", config=example, set=[change])
    assert len(chosen.notes) == notes and chosen.log_name == "stdlib_10m+derived+modified.toml"
    words = ["--config", example, "--set", change, "--print"]
    for name in ("DATADIR", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    parsed = commands.parser("run", "open_llama").parse_args(words)
    assert commands.start("open_llama", "run", parsed) == 0
    text = capsys.readouterr().err
    assert text.count("NOTE") == 3 * notes
