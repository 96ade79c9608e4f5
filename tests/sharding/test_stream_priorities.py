"""Priorities of the streams of compute and of the reduction of gradients."""

import pytest
import torch

from common.benchmarks import load_all, rules_of
from common.errors import ConfigError
from common.kernels import architecture as kernel_settings
from common.paths import ROOT
from common.sharding import processes, side_stream, zero


def test_compute_has_a_high_priority_only_where_no_nccl_kernel_runs_beside_it():
    found, lora = (
        {
            name: processes.high_priority_compute(config, rules_of(benchmark, config))
            for name, config in load_all(ROOT, benchmark).items()
        }
        for benchmark in ("llama31_8b", "llama2_70b_lora")
    )
    assert (
        found["H200_1x8"] and found["B200_1x8"] and not found["H100_1x8"] and not found["H200_2x8"]
    )
    assert found["H200_1x1"], "on one GPU nothing is sent"
    assert not any(high for name, high in found.items() if name.startswith("MI"))
    assert lora and not any(lora.values())


@pytest.mark.parametrize(
    ("arch", "asked", "made"),
    [("sm_90", True, [-1]), ("sm_90", False, []), ("gfx942", True, []), ("gfx1250", True, [])],
)
def test_hip_gets_no_stream_of_high_priority(monkeypatch, arch, asked, made):
    priorities = []
    monkeypatch.setattr(kernel_settings, "architecture", lambda device: arch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority=0: priorities.append(priority)
    )
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "mesh_of", lambda *_: None)
    processes.start_processes("cuda", 60.0, asked)
    assert priorities == made
    side_stream.make_side_stream(torch.device("cuda"))
    assert priorities[len(made) :] == [-1 if arch == "sm_90" else 0], "LoRA's base and offloading"


def test_the_priority_of_the_reduction_is_normal_unless_asked_for(monkeypatch):
    monkeypatch.delenv(zero.STREAM_PRIORITY, raising=False)
    assert zero.stream_priority() == 0
    monkeypatch.setenv(zero.STREAM_PRIORITY, "-1")
    assert zero.stream_priority() == -1
    monkeypatch.setenv(zero.STREAM_PRIORITY, "high")
    with pytest.raises(ConfigError, match="high"):
        zero.stream_priority()
