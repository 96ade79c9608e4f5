"""What the launcher says, records and pins about engines, before any rank starts."""

import argparse
import json
from dataclasses import replace

import pytest
from probes import make_visible

from common import config as configs
from common import engines
from common.errors import ConfigError, RunError
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from common.records.run_record import RunRecord
from common.training.continuation import SavedCheckpoint
from launch import job_command, run, series
from launch.job import Job, Node, job_from
from launch.multi_node import Nodes
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


def test_the_first_screen_says_that_the_order_answers_and_what_is_timed(job, monkeypatch):
    [line] = job.engines.lines()
    assert "by the order" in line and "time attention, products, swiglu" in line
    pins = {"ATTENTION_ENGINE": "sdpa", "MATMUL_ENGINE": "torch"}
    [line] = job.pinning(pins).engines.lines()
    assert "attention sdpa" in line and "time swiglu" in line
    [line] = job.pinning(pins | {"SWIGLU_ENGINE": "kernel"}).engines.lines()
    assert "by the order" not in line


def test_pins_do_not_replace_the_users_own_or_the_configs(job):
    theirs = replace(job, environment={"ATTENTION_ENGINE": "sdpa"})
    names = theirs.pinning(engines.pins({"attention": "repeated_heads"})).engines.names
    assert names["attention"] == "sdpa"


# Ranks whose attention takes nearly the same time by two engines: each run would choose another.
NEARLY_EQUAL = ("sdpa", "flash_attention_4")


class Ranks:
    """Stand-in for the ranks of a run. Writes the self-test's event, as rank 0 does."""

    def __init__(self, silent=()):
        self.silent = silent  # attempts that fail before the self-test
        self.environments = []
        self.announced = []

    def train(self, job, nodes, run_dir, seed, cleared, received):
        attempt = len(self.environments)
        self.environments.append(dict(job.environment))
        error = RunError("failed") if attempt in self.silent else None
        names = {
            "attention": job.environment.get("ATTENTION_ENGINE") or NEARLY_EQUAL[attempt % 2],
            "products": "cublaslt",
            "swiglu": "quack",
        }
        choices = {name: {"engine": engine, "why": "", "ms": {}} for name, engine in names.items()}
        if error is None:
            event = {"event": "self_test", "engines": choices}
            (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
        return series.RunOutcome(error, RunRecord.read(run_dir / "result.txt"))


@pytest.fixture
def ranks(monkeypatch):
    made = Ranks()
    monkeypatch.setattr(run, "ensure_data", lambda job: None)
    monkeypatch.setattr(run, "write_report", lambda folder: None)
    monkeypatch.setattr(run, "_prepare", lambda *_: "fadvise")
    monkeypatch.setattr(run, "_train_and_judge", made.train)
    announce = Nodes.announce

    def announced(nodes, name, seed, pins):
        made.announced.append(pins)
        announce(nodes, name, seed, pins)

    monkeypatch.setattr(Nodes, "announce", announced)
    return made


def attention_of_runs(job):
    runs = RunRecord.in_folder(job.log_dir / job.benchmark)
    return [each.engine_choices.get("attention", {}).get("engine") for each in runs]


@pytest.mark.parametrize("silent", [(), (0, 1)])
def test_ten_runs_of_a_series_use_the_engines_of_its_first(job, ranks, silent, capsys):
    """Runs that ended before their self-test chose nothing."""
    ranks.silent = silent
    assert run.run_all(job, series.SeriesRequest(10, len(silent))) == 0
    used = attention_of_runs(job)
    assert used == [None] * len(silent) + ["sdpa"] * 10
    pins = {"ATTENTION_ENGINE": "sdpa", "MATMUL_ENGINE": "cublaslt", "SWIGLU_ENGINE": "quack"}
    first = len(silent) + 1
    assert ranks.environments == [{}] * first + [pins] * 9
    assert ranks.announced == ranks.environments, "other nodes get node 0's engines"
    assert capsys.readouterr().err.count("attention sdpa") == 9


def test_a_resumed_series_keeps_the_engines_and_another_one_chooses(job, ranks):
    assert run.run_all(job, series.SeriesRequest(3, 0)) == 0
    assert run.run_all(job, series.SeriesRequest(5, 0, resume=True)) == 0
    assert attention_of_runs(job) == ["sdpa"] * 5
    assert run.run_all(job, series.SeriesRequest(1, 0)) == 0
    assert attention_of_runs(job)[5:] == ["flash_attention_4"]


def test_a_series_does_not_override_a_pin(job, ranks):
    pinned = replace(job, environment={"ATTENTION_ENGINE": "flash_attention_4"})
    assert run.run_all(pinned, series.SeriesRequest(2, 0)) == 0
    assert attention_of_runs(job) == ["flash_attention_4"] * 2


def test_a_continued_run_keeps_the_engines_of_its_checkpoint(monkeypatch, tmp_path):
    names = {"attention": "sdpa", "products": "torch", "swiglu": "kernel"}
    facts = {"engines": names}
    monkeypatch.setattr("launch.job.newest", lambda run: SavedCheckpoint(tmp_path, facts))
    monkeypatch.setattr(engines, "version_of", GOOD.get)
    make_visible(monkeypatch, H200)
    options = {"device": None, "config": str(PATH), "set": [], "checkpoint": None}
    given = argparse.Namespace(**options, continues=tmp_path)
    assert job_from("llama31_8b", given).engines.names == names
    monkeypatch.setenv("ATTENTION_ENGINE", "repeated_heads")
    assert job_from("llama31_8b", given).engines.names["attention"] == "repeated_heads"


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
