"""Test each Instinct kind from its driver's output to the first screen, preflight and self-test."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from instinct import CARDS, kfd_tree
from probes import make_visible
from torch.nn.attention import SDPBackend

from common import known_issues
from common.errors import PreflightError
from common.gpu_kinds import KINDS
from common.kernels import architecture as settings
from common.kernels import attention, lora, qk_norm, quantize, rms_norm
from common.kernels.fp8 import fp8_dtypes
from common.machine import hardware
from common.self_test import run as self_test
from common.self_test.results import OpResult, SelfTestResult
from launch.preflight import __main__ as preflight_command
from launch.preflight.rank_report import RankReport
from launch.selection.choose import choose
from launch.selection.machine import Machine
from launch.selection.request import Request

pytestmark = pytest.mark.quick

VERSIONS = {
    "torch": "2.10.0+rocm7.2.4.lw.git3d3aa833",
    "triton": "3.6.0+rocm7.2.4.git4ed88892",
    "rocm": "7.2.4",
    "driver": "6.16.13",
}
each_card = pytest.mark.parametrize(
    "card", CARDS, ids=lambda card: f"{card.kind}-{card.device_id:x}"
)


def probe(folder: Path, card, count: int = 8):
    kfd_tree(folder, count, *card.topology(card.names[0]))
    (folder / "kfd").write_text("")
    (folder / "module/amdgpu").mkdir(parents=True)
    (folder / "module/amdgpu/version").write_text("6.16.13\n")
    return hardware.probe({"PATH": str(folder)}, folder, folder)


def rank(number: int, card, **changed) -> RankReport:
    """Device as torch for ROCm reports it: spelling, full architecture, a little less memory."""
    kind = KINDS[card.kind]
    facts = {
        "phase": "done",
        "name": card.names[0] or "AMD Radeon Graphics",
        "arch": card.gcn_arch,
        "compute_units": kind.compute_units,
    }
    facts |= {
        "memory_bytes": kind.memory_bytes - 2**26,
        "uuid": f"{number:x}",
        "pci": f"0000:{number:02x}:00.0",
    }
    facts |= {
        "attention": "flash, AOTriton",
        "self_test": [("attention", "attention [...]: 50.0 dB", True)],
    }
    facts |= {
        "speeds": {
            "bf16 GEMM": 600.0,
            "FP8 GEMM": 1100.0,
            "copy": 4.0,
            "all-reduce": 300.0,
            "all-gather": 290.0,
        }
    }
    return RankReport(number, **(facts | changed))


@pytest.fixture
def rocm(monkeypatch):
    """torch as it is built for ROCm, on a card whose architecture it names."""

    def on(card) -> torch.device:
        monkeypatch.setattr(torch.version, "hip", VERSIONS["rocm"])
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(gcnArchName=card.gcn_arch),
        )
        settings.architecture.cache_clear()
        return torch.device("cuda", 0)

    monkeypatch.setattr(known_issues, "installed", lambda driver="": dict(VERSIONS))
    yield on
    settings.architecture.cache_clear()


@pytest.mark.parametrize("benchmark", ["llama31_8b", "llama2_70b_lora"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@each_card
def test_the_first_screen(tmp_path, rocm, card, count, benchmark):
    machine = Machine(probe(tmp_path, card, count))
    chosen = choose(Request(benchmark), machine)
    assert (
        chosen.config.gpu == card.kind
        and chosen.config.gpus_per_node == count
        and chosen.device == "cuda"
    )
    assert bool(chosen.derived) == (count < 8)
    known = [note.split(":")[0] for note in chosen.notes if note.startswith("known issue")]
    names = {"MI325X": ["torch-2.10-rocm-backward", "rocm-7.1-mi325x-fp8"]}
    if card.gcn_arch.startswith("gfx942"):
        names.setdefault(card.kind, ["torch-2.10-rocm-backward"])
    assert known == [f"known issue {name}" for name in names.get(card.kind, [])]
    assert (
        chosen.config.env["HSA_NO_SCRATCH_RECLAIM"] == "1"
        and chosen.config.env["HIPBLASLT_WORKSPACE_SIZE"] == "131072"
    )
    assert card.kind in chosen.gpus and "driver 6.16.13" in chosen.gpus


def _options() -> argparse.Namespace:
    options = preflight_command.parser("llama31_8b").parse_args([])
    options.benchmark = "llama31_8b"
    return options


def rows_of(tmp_path, monkeypatch, card, ranks):
    make_visible(monkeypatch, probe(tmp_path, card))
    monkeypatch.setattr(preflight_command, "read_gpus", lambda *_: [])
    monkeypatch.setattr(preflight_command, "installed", lambda driver: VERSIONS)
    monkeypatch.setattr(preflight_command, "run_ranks", lambda *_: ranks)
    return {row.check: row for row in preflight_command.check(_options(), {})[0]}


@each_card
def test_preflight(tmp_path, monkeypatch, rocm, card):
    rows = rows_of(tmp_path, monkeypatch, card, [rank(number, card) for number in range(8)])
    expected = (
        "GPU kind",
        "GPU count",
        "GPUs as torch sees them",
        "known issues",
        "self-test",
        "bf16 GEMM, siblings",
    )
    verdicts = dict.fromkeys(expected, "ok")
    if card.gcn_arch.startswith("gfx942"):
        verdicts["known issues"] = "warn"  # torch-2.10-rocm-backward
    assert {check: rows[check].verdict for check in expected} == verdicts
    assert (
        "attention by flash, AOTriton" in rows["self-test"].value
        and rows["config"].value == f"{card.kind}_1x8.toml: 8 x {card.kind}"
    )


@each_card
def test_preflight_names_what_is_known_where_the_self_test_fails(tmp_path, monkeypatch, rocm, card):
    bad = [
        (
            "FP8 product qkv wgrad",
            "FP8 product qkv wgrad (6144, 4096, 16384): HIPBLAS_STATUS_INVALID_VALUE",
            False,
        )
    ]
    bad += [
        ("attention backward dQ", "attention backward dQ [2, 8192, 32/8, 128]: not finite", False)
    ]
    rows = rows_of(
        tmp_path,
        monkeypatch,
        card,
        [*(rank(number, card) for number in range(7)), rank(7, card, self_test=bad)],
    )
    row = rows["self-test"]
    assert row.verdict == "refuse" and "GPU 7" in row.value and "hipblaslt-workspace" in row.do
    assert ("ck-16-bit-atomics" in row.do) == card.gcn_arch.startswith("gfx942")


def test_row_repeats_are_those_that_were_measured_on_an_h200():
    for arch in ("sm_90", "sm_89", "sm_100"):
        assert rms_norm.rms_norm_backward_settings(arch, 4096, True).repeats == 32
        assert qk_norm.qk_norm_rope_backward_settings(arch, 64).repeats == 16
    assert rms_norm.rms_norm_backward_settings("gfx942", 4096, False).repeats == 1


@each_card
def test_a_rank(rocm, card, monkeypatch):
    """Formats, stages and attention's backends as a rank chooses them; and its error."""
    device = rocm(card)
    arch = settings.architecture(device)
    assert arch == KINDS[card.kind].arch
    fnuz = arch == "gfx942"
    assert fp8_dtypes(device) == (
        (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        if fnuz
        else (torch.float8_e4m3fn, torch.float8_e5m2)
    )
    tiles = [
        lora.down_settings(arch),
        lora.up_backward_settings(arch),
        lora.down_backward_settings(arch),
    ]
    tiles.append(rms_norm.rms_norm_backward_settings(arch, 4096, True))
    assert {tile.stages for tile in tiles} == {3 if fnuz else 1}
    assert settings.pipeline_stages("gfx1250", 3) == 1, "an unknown one"
    # As many programs for each compute unit as on an H200: 32 x 132 / 304, and half of 32 x 132 /
    # 256 without pipelined loops.
    assert tiles[-1].repeats == (16 if fnuz else 8)
    cast = quantize.quantize_settings(arch)
    assert cast.rows == 2 * cast.columns == 128, "cache lines of 128 bytes"
    seen = []
    monkeypatch.setattr(attention, "sdpa_kernel", lambda order, set_priority: seen.append(order))
    monkeypatch.setattr(attention, "gpu_architecture", lambda device: arch)
    attention.attention_backends("cuda")
    assert seen == [[SDPBackend.FLASH_ATTENTION]]
    bad = SelfTestResult(
        results=[
            OpResult(
                "FP8 product down wgrad",
                "(4096, 14336, 16384)",
                error="HIPBLAS_STATUS_INVALID_VALUE",
            )
        ]
    )
    with pytest.raises(PreflightError) as caught:
        self_test.require_sound(bad, device)
    assert (
        f"{arch} with torch 2.10.0+rocm7.2.4" in caught.value.why
        and "hipblaslt-workspace" in caught.value.why
    )
