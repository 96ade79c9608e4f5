"""Candidates of streams, queues and channels: which are tried, that only they differ, and what a failure prints."""

import os
import subprocess

import pytest
import torch

from common.benchmarks import load_all
from common.errors import ConfigError
from common.paths import ROOT
from common.sharding import processes, zero
from llama2_70b_lora import train as lora
from llama31_8b import train as pretraining
from throughput import run_settings


@pytest.mark.parametrize("is_rocm", [True, False])
def test_the_shipped_setting_is_timed_first_and_each_candidate_once(is_rocm):
    found = run_settings.candidates(is_rocm)
    assert found[0] == {} and len({tuple(sorted(candidate.items())) for candidate in found}) == len(
        found
    )
    queues = {
        candidate["GPU_MAX_HW_QUEUES"] for candidate in found if "GPU_MAX_HW_QUEUES" in candidate
    }
    assert queues == ({"2", "4", "8"} if is_rocm else set())
    assert any(zero.STREAM_PRIORITY in candidate for candidate in found)
    assert any("NCCL_MAX_NCHANNELS" in candidate for candidate in found)


def test_each_bench_gets_its_candidate_alone(monkeypatch):
    monkeypatch.setenv(
        "GPU_MAX_HW_QUEUES", "16"
    )  # of the caller: a candidate without it must not inherit it
    seen = []

    def run(command, env, **_):
        seen.append(
            {
                name: env[name]
                for name in env
                if name not in os.environ or env[name] != os.environ[name]
            }
        )
        assert (
            command[3:] == ["llama31_8b", "bench", "--steps", "20"]
            and env.get("GPU_MAX_HW_QUEUES") != "16"
        )
        if env.get("NCCL_MAX_NCHANNELS"):
            return subprocess.CompletedProcess(command, 12, "", "error: out of memory\n  why: x")
        return subprocess.CompletedProcess(
            command, 0, "BENCH llama31_8b x, 32 layers: 11,223.4 tok/s/GPU, 1,460 ms\n", ""
        )

    monkeypatch.setattr(run_settings.subprocess, "run", run)
    title, shipped, *others = run_settings.lines("llama31_8b", 20, True)
    assert (
        "20" in title
        and "11,223.4" in shipped
        and shipped.endswith("shipped")
        and len(seen) == len(run_settings.candidates(True))
    )
    assert seen == run_settings.candidates(True)
    (failed,) = [line for line in others if "NCCL_MAX" in line]
    assert "12" in failed and "out of memory" in failed and "tok/s" not in failed


# --- who has the priority -----------------------------------------------------------------------------------------------


def test_compute_has_a_high_priority_only_where_no_nccl_kernel_runs_beside_it():
    found = {
        name: pretraining.high_priority_compute(config)
        for name, config in load_all(ROOT, "llama31_8b").items()
    }
    assert (
        found["H200_1x8"] and found["B200_1x8"] and not found["H100_1x8"] and not found["H200_2x8"]
    )
    assert found["H200_1x1"], "on one GPU nothing is sent"
    assert not any(high for name, high in found.items() if name.startswith("MI"))
    assert not any(
        lora.high_priority_compute(config) for config in load_all(ROOT, "llama2_70b_lora").values()
    )


@pytest.mark.parametrize(
    ("hip", "asked", "made"), [(None, True, [-1]), (None, False, []), ("7.2", True, [])]
)
def test_hip_gets_no_stream_of_high_priority(monkeypatch, hip, asked, made):
    priorities = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority=0: priorities.append(priority)
    )
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "mesh_of", lambda *_: None)
    processes.start_processes("cuda", 60.0, asked)
    assert priorities == made


def test_the_priority_of_the_reduction_is_normal_unless_asked_for(monkeypatch):
    monkeypatch.delenv(zero.STREAM_PRIORITY, raising=False)
    assert zero.stream_priority() == 0
    monkeypatch.setenv(zero.STREAM_PRIORITY, "-1")
    assert zero.stream_priority() == -1
    monkeypatch.setenv(zero.STREAM_PRIORITY, "high")
    with pytest.raises(ConfigError, match="high"):
        zero.stream_priority()
