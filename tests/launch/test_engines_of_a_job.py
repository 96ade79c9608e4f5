"""What the launcher says, records and pins about engines, before any rank starts."""

import functools
from dataclasses import replace

import pytest

from common import config as configs
from common import engines
from common.errors import ConfigError
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from launch import job_command, run, series
from launch.job import Job, Node
from launch.selection.check import Choice
from launch.selection.machine import NO_GPUS, Machine
from llama2_70b_lora.rules import Config as LoraConfig
from llama31_8b.rules import Config

H200 = Probe("nvidia", (Device("NVIDIA H200", "sm_90", 143_771 * 2**20),), "580.1")
GOOD = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5"}
PATH = ROOT / "configs/llama31_8b/H200_1x1.toml"


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "version_of", GOOD.get)
    config = configs.load(PATH, Config)
    selection = Choice(config, PATH, "H200_1x1.toml", "it fits", "cuda", "1 x NVIDIA H200")
    return Job("llama31_8b", selection, Machine(H200), tmp_path, tmp_path, {}, Node(), False)


def test_engines_are_named_with_what_installs_a_missing_one(job, monkeypatch):
    (line,) = job.engines.lines()
    assert "flash_attention_4 4.0.0b36" in line and "cublaslt" in line
    monkeypatch.setattr(engines, "version_of", lambda package: "")
    line, *notes = job.engines.lines()
    assert "sdpa" in line and "kernel" in line
    (note,) = notes  # one command installs both
    assert note.startswith("NOTE") and note.count("pip install") == 1
    for word in ("flash_attention_4", "flash-attn-4", "quack", "quack-kernels"):
        assert word in note


def test_versions_json_has_a_reason_for_each_faster_engine(job, monkeypatch):
    monkeypatch.setattr(engines, "version_of", {"flash-attn-4": "4.0.0b9"}.get)
    attention, swiglu = map(str, job.engines.faster)
    assert "flash_attention_4" in attention and "4.0.0b9" in attention
    assert "quack" in swiglu and "not installed" in swiglu
    assert all("pip install" in reason for reason in (attention, swiglu))
    (note,) = job.engines.lines()[1:]
    assert "4.0.0b9" in note and "quack-kernels is not installed" in note


def test_a_cpu_misses_nothing(job):
    on_a_cpu = replace(job, selection=replace(job.selection, device="cpu"), machine=NO_GPUS)
    names = {"attention": "sdpa", "products": "torch", "swiglu": "kernel"}
    assert on_a_cpu.engines.names == names
    assert not on_a_cpu.engines.faster


@pytest.mark.parametrize("variable", ["ATTENTION_ENGINE", "MATMUL_ENGINE", "SWIGLU_ENGINE"])
def test_the_launcher_refuses_an_engine_that_is_pinned_on_a_cpu(job, variable):
    pinned = {"SWIGLU_ENGINE": "quack"}.get(variable, "transformer_engine")
    config = replace(job.config, linear="bf16")
    selection = replace(job.selection, device="cpu", config=config)
    on_a_cpu = replace(job, selection=selection, machine=NO_GPUS, environment={variable: pinned})
    with pytest.raises(ConfigError, match=f"{variable}={pinned} cannot be used here"):
        job_command.print_header(on_a_cpu, None)


def test_only_blocks_in_fp8_have_an_engine_of_swiglu(job):
    assert job.engines.names["swiglu"] == "quack"
    in_bf16 = replace(job.selection, config=replace(job.config, linear="bf16"))
    assert "swiglu" not in replace(job, selection=in_bf16).engines.names
    lora = configs.load(ROOT / "configs/llama2_70b_lora/H200_1x1.toml", LoraConfig)
    assert lora.linear_format.in_fp8
    selection = replace(job.selection, config=lora)
    fine_tuning = replace(job, benchmark="llama2_70b_lora", selection=selection)
    assert fine_tuning.engines.names["swiglu"] == "quack"


def test_a_config_pins_an_engine_and_its_absence_is_an_error(job):
    def pinning(name):
        config = replace(job.config, env={"ATTENTION_ENGINE": name})
        return replace(job, selection=replace(job.selection, config=config))

    assert pinning("sdpa").engines.names["attention"] == "sdpa"
    with pytest.raises(ConfigError, match="transformer_engine"):
        _ = pinning("transformer_engine").engines


@pytest.mark.parametrize(("goal", "resume"), [(1, False), (10, False), (0, True)])
def test_the_runs_of_a_series_use_the_engines_of_its_first(job, monkeypatch, goal, resume):
    captured = {}

    def attempts(folder, selection, identity, request, execute, report):
        captured.update(identity=identity, execute=execute)
        return 0

    monkeypatch.setattr(run.series, "run", attempts)
    monkeypatch.setattr(run, "ensure_data", lambda job: None)
    monkeypatch.setattr(run, "write_report", lambda folder: None)
    assert run.run_all(job, series.SeriesRequest(goal, 0, None, resume)) == 0
    assert captured["identity"]["engines"]["attention"] == "flash_attention_4 4.0.0b36"
    assert isinstance(captured["execute"], functools.partial)
    environment = captured["execute"].args[0].environment
    pins = {
        "ATTENTION_ENGINE": "flash_attention_4",
        "MATMUL_ENGINE": "cublaslt",
        "SWIGLU_ENGINE": "quack",
    }
    assert environment == ({} if goal == 1 else pins)
    assert captured["execute"].args[1]["engines"] == captured["identity"]["engines"]


def test_the_runs_of_a_series_have_equal_variables(job, monkeypatch):
    """Those of the user and of the config, without paths, so that --resume refuses others."""
    identities = []
    monkeypatch.setattr(run.series, "run", lambda *arguments: identities.append(arguments[2]))
    monkeypatch.setattr(run, "ensure_data", lambda job: None)
    own = {"NCCL_ALGO": "Ring", "TRITON_CACHE_DIR": "/x", "ATTENTION_ENGINE": "sdpa"}
    config = replace(job.config, env={"NCCL_NVLS_ENABLE": "0"})
    selection = replace(job.selection, config=config)
    job = replace(job, environment=own, selection=selection)
    run.run_all(job, series.SeriesRequest(1, 0, None, False))
    (identity,) = identities
    assert identity["variables"] == {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
