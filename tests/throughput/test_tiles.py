"""Test other launch settings of kernels: the candidates, wrong results, the shipped setting."""

import os
from dataclasses import replace

import pytest
import torch

from common.kernels.architecture import Tile
from common.model.shapes import ModelShape
from common.self_test.kernel_cases import Draw, Sizes, kernel_cases
from throughput import tiles

pytestmark = pytest.mark.quick

SIZES = Sizes(ModelShape(2, 32, 48, 4, 2, 64, 10000.0), 16, 1, False, 0, "triton", torch.float32)


def test_every_case_has_its_settings_function():
    ops = {
        op
        for rank in (0, 16)
        for qk_norm in (False, True)
        for op, _, _ in kernel_cases(
            replace(SIZES, shape=replace(SIZES.shape, qk_norm=qk_norm), lora_rank=rank),
            Draw(torch.device("cpu")),
        )
    }
    assert ops | {"quantize"} == tiles.SETTINGS.keys()


def test_one_thing_is_changed_at_a_time():
    tile = Tile(rows=64, columns=128, warps=4, stages=3)
    for arch, op in (("gfx950", "adapter down"), ("sm_90", "SwiGLU"), ("gfx942", "RoPE backward")):
        found = [tiles.changed_tile(tile, change) for change in tiles.changes(arch, op)]
        # The shipped number of stages is tried again.
        assert found[0] == tile and len(set(found)) >= len(found) - 1
        assert all(sum(a != b for a, b in zip(tile, other, strict=True)) <= 1 for other in found)
        assert any(other.waves_per_eu for other in found) == arch.startswith("gfx")
        assert {other.columns for other in found} == (
            {128} if op == "RoPE backward" else {64, 128, 256}
        )
    assert tile.options == {"num_warps": 4} and tile._replace(waves_per_eu=2).options == {
        "num_warps": 4,
        "waves_per_eu": 2,
    }


def test_a_candidate_that_is_wrong_or_fails_gets_no_time(monkeypatch):
    times = []
    monkeypatch.setattr(tiles, "launch_us", lambda launch: times.append(launch()) or 10.0)
    monkeypatch.setattr(tiles, "changes", lambda arch, op: [{}, {"rows": 2.0}, {"warps": 0.5}])
    right = tiles.against_reference

    def against_reference(case, sizes, device):
        tried.append(right(case, sizes, device))
        if len(tried) == 3:
            raise RuntimeError("out of resource: registers\nmore")
        return 6.0 if len(tried) == 2 else tried[-1]

    tried = []
    monkeypatch.setattr(tiles, "against_reference", against_reference)
    found = list(tiles.kernel_lines(SIZES, torch.device("cpu"), "RoPE backward"))
    assert (
        found[0].startswith("RoPE backward")
        and "10.0 µs" in found[1]
        and found[1].endswith("shipped")
    )
    assert "WRONG: 6.0 dB" in found[2] and "rows 128" in found[2] and "µs" not in found[2]
    assert "out of resource" in found[3] and len(times) == 1
    assert all(db >= tiles.KERNEL_DB for db in tried), "another tile computes the same"


def test_attention_is_timed_and_compared_with_each_backend(monkeypatch):
    monkeypatch.setattr(tiles, "median_s", lambda work, device, seconds: work() and 1e-5)
    title, flash, efficient, cudnn, *optional = tiles.attention_lines(SIZES, torch.device("cpu"))
    assert title == "attention [1, 16, 4/2]"
    assert (
        flash.split()[:2] == ["10.0", "µs"]
        and flash.endswith("flash_attention")
        and flash.count("/") == 3
        and "nan" not in flash
    )
    assert "fails: RuntimeError" in efficient and "fails: RuntimeError" in cudnn, (
        "a CPU has neither"
    )
    names = [line.split()[-1] for line in optional]
    assert names == ["flash_attention_4", "repeated_heads", "transformer_engine"]
    assert all("fails: " in line for line in optional), "they are for GPUs"
    assert "ATTENTION_ENGINE" not in os.environ


def test_on_rocm_each_library_and_aiter_have_their_line(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", asked.append)
    monkeypatch.setattr(tiles, "attention_us", lambda *_: 10.0)
    monkeypatch.setattr(
        tiles.attention,
        "attention_checks",
        lambda *_: [("", "", 0.0, lambda: float(os.environ["ATTENTION_ENGINE"] == "aiter"))],
    )
    _, aotriton, repeated, ck, efficient, aiter, _ = tiles.attention_lines(
        SIZES, torch.device("cpu")
    )
    assert repeated.endswith("  repeated_heads aotriton")
    assert (
        asked == ["aotriton", "aotriton", "ck"]
        and aotriton.endswith("flash_attention aotriton")
        and ck.endswith("flash_attention ck")
    )
    assert (
        aiter.endswith("  aiter")
        and aiter.split()[2] == "1.0"
        and {line.split()[2] for line in (aotriton, ck, efficient)} == {"0.0"}
    )
    assert "ATTENTION_ENGINE" not in os.environ


def test_without_a_gpu_it_says_so():
    from common.errors import ConfigError

    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            tiles.main(None)
