"""Test each preflight check on made-up values, and the whole command once on this CPU."""

import argparse
import json
import os
import re
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from child_path import python_path
from probes import make_visible

from common.gpu_kinds import GIB, KINDS
from common.machine import gpu_stats
from common.machine import host as machine_host
from common.machine.gpu_stats import (
    HEALTH,
    DriverError,
    amd_throttle_counters,
    read_gpus,
    read_power_profiles,
    read_vboost,
    with_throttling,
)
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from common.terminal import QUIET
from launch.preflight import __main__ as preflight_command
from launch.preflight import gpus, host, measure
from launch.preflight.check_row import CheckRow, graded, overall, skipped, table
from launch.preflight.rank_report import UNITS, RankReport, read_ranks
from launch.selection.machine import NO_GPUS
from launch.selection.request import Request
from launch.torch_build import broken_torch

pytestmark = pytest.mark.quick

H200 = Device("NVIDIA H200", "sm_90", 143771 * 2**20)


def rank(number: int = 0, **facts) -> RankReport:
    """One H200 that is as it should be."""
    speeds = {
        "bf16 GEMM": 680.0,
        "FP8 GEMM": 1290.0,
        "copy": 4.3,
        "all-reduce": 350.0,
        "all-gather": 340.0,
    }
    good = {
        "phase": "done",
        "name": H200.name,
        "arch": H200.arch,
        "memory_bytes": 150 * 10**9,
        "compute_units": 132,
        "uuid": f"aaaa-{number}",
        "pci": f"0000:{number:02x}:00.0",
        "used_bytes": GIB // 2,
        "attention": "cudnn",
        "self_test_s": 6.25,
        "self_test": [
            ("attention", "attention [2, 8192, 32/8, 128]: 50.0 dB (minimum 30 dB)", True)
        ],
        "speeds": speeds | facts.pop("speeds", {}),
    }
    return RankReport(number, **(good | facts))


def ranks(count: int, **changed) -> list[RankReport]:
    """`count` good ones; `changed` is for the last."""
    return [*(rank(k) for k in range(count - 1)), rank(count - 1, **changed)]


IDLE = {
    "utilization_percent": 0,
    "uncorrected_errors": 0,
    "corrected_errors": 0,
    "throttle": ["power cap"],
}


def samples(count: int, last: dict | None = None, **facts) -> gpus.Stats:
    """Return samples of `count` GPUs. `last` replaces the values of the last one."""
    return [last if last is not None and k == count - 1 else IDLE | facts for k in range(count)]


def by_check(rows: list[CheckRow]) -> dict[str, CheckRow]:
    assert len({row.check for row in rows}) == len(rows), "one row per check"
    return {row.check: row for row in rows}


# --- rows -----------------------------------------------------------------------------------------


def test_skipped_does_not_mean_passed():
    assert overall([skipped("a", "why")]) == "skipped"
    ok, warn, refuse = (
        graded("a", "1", "2", "x", warn=verdict == "warn", refuse=verdict == "refuse")
        for verdict in ("ok", "warn", "refuse")
    )
    assert [row.verdict for row in (ok, warn, refuse)] == ["ok", "warn", "refuse"] and (
        ok.do,
        warn.do,
    ) == ("", "x")
    assert (
        overall([ok, skipped("b", "why")]) == "ok"
        and overall([ok, warn]) == "warn"
        and overall([warn, refuse, ok]) == "refuse"
    )
    text = table([ok, warn, refuse, skipped("b", "no GPU")])
    assert (
        "1 ok, 1 warn, 1 refuse, 1 skipped" in text
        and text.count("do: x") == 2
        and "no GPU" in text
    )


# --- GPUs: which, how many ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "visible", "kind", "count", "refused"),
    [
        ("H200", 4, "H200", 4, set()),
        ("H200", 4, "H200", 2, set()),
        ("H200", 3, "H200", 4, {"GPU count"}),
        ("H200", 4, "MI300X", 4, {"GPU kind"}),
        ("", 0, "H200", 1, {"GPU kind", "GPU count"}),
    ],
)
def test_presence(found, visible, kind, count, refused):
    rows = gpus.judge_presence(KINDS.get(found), visible, kind, count)
    assert {row.check for row in rows if row.verdict == "refuse"} == refused
    assert all(row.do for row in rows if row.verdict == "refuse")


@pytest.mark.parametrize(("count", "verdict"), [(8, "ok"), (7, "warn"), (5, "warn"), (4, "ok")])
def test_a_node_of_which_a_gpu_is_missing(monkeypatch, count, verdict):
    rows = on_gpus(monkeypatch, (H200,) * count, ranks(count), benchmark="")
    assert rows["GPU count"].verdict == verdict
    assert ("a whole node has 8" in rows["GPU count"].do) == (verdict == "warn")


def test_what_torch_sees_is_compared_as_well():
    assert gpus.judge_torch(ranks(2), KINDS["H200"]).verdict == "ok"
    for changed in ({"compute_units": 66}, {"memory_bytes": 70 * GIB}, {"arch": "sm_100"}):
        assert gpus.judge_torch(ranks(2, **changed), KINDS["H200"]).verdict == "refuse"


# --- GPUs: idle and healthy -----------------------------------------------------------------------


def test_memory_in_use_names_the_gpu():
    assert gpus.judge_memory_in_use(ranks(8)).verdict == "ok"
    row = gpus.judge_memory_in_use(ranks(8, used_bytes=5 * GIB))
    assert row.verdict == "refuse" and row.value == "GPU 7 (aaaa-7, 0000:07:00.0): 5.0 GiB"


def test_memory_that_page_cache_may_hold_only_warns():
    row = gpus.judge_memory_in_use(ranks(4, used_bytes=20 * GIB), is_grace=True)
    assert row.verdict == "warn" and "20.0 GiB" in row.value and "page cache" in row.do


def test_compute_units_that_nobody_confirmed_are_not_compared():
    changed = {"arch": "sm_103", "memory_bytes": 260 * GIB, "compute_units": 148}
    assert gpus.judge_torch([rank(**changed)], KINDS["B300"]).verdict == "ok"


def test_a_gpu_without_an_entry_is_measured_with_a_warning(monkeypatch):
    a100 = Device("NVIDIA A100-SXM4-80GB", "sm_80", 81920 * 2**20)
    seen = {"name": a100.name, "arch": "sm_80", "memory_bytes": 79 * GIB, "compute_units": 108}
    rows = on_gpus(monkeypatch, (a100,) * 2, [rank(k, **seen) for k in range(2)], benchmark="")
    assert rows["GPU kind"].verdict == "warn" and "gpu_kinds" in rows["GPU kind"].do
    assert (
        rows["GPUs as torch sees them"].verdict == "ok"
        and rows["bf16 GEMM, siblings"].verdict == "ok"
    )


@pytest.mark.parametrize(
    ("percent", "verdict"), [(0, "ok"), (3, "warn"), (60, "refuse"), (None, "skipped")]
)
def test_busy(percent, verdict):
    row = gpus.judge_utilization(ranks(2), samples(2, {"utilization_percent": percent}))
    assert row.verdict == verdict and (
        verdict in ("ok", "skipped") or row.value == f"GPU 1 (aaaa-1, 0000:01:00.0): {percent} %"
    )


def test_memory_errors():
    def judge(before, after):
        return gpus.judge_errors(ranks(2), samples(2, before), samples(2, after))

    errors = {"uncorrected_errors": 0, "corrected_errors": 7}
    assert judge(errors, errors).verdict == "ok", "old corrected ones are everyday"
    assert judge(errors, errors | {"corrected_errors": 9}).verdict == "warn"
    row = judge({"uncorrected_errors": 1}, {"uncorrected_errors": 1})
    assert row.verdict == "refuse" and "GPU 1" in row.value and "1 uncorrected" in row.value
    assert judge({}, {}).verdict == "skipped"


def test_throttling_at_any_moment_counts_and_the_power_limit_does_not():
    during = [
        samples(2, throttle=[]),
        samples(2),
        samples(2, {"throttle": ["power cap", "thermal (hardware)"]}),
        samples(2),
    ]
    row = gpus.judge_throttling(ranks(2), during)
    assert row.verdict == "warn" and row.value == "GPU 1 (aaaa-1, 0000:01:00.0): thermal (hardware)"
    assert gpus.judge_throttling(ranks(2), during[:2]).verdict == "ok"
    assert gpus.judge_throttling(ranks(2), []).verdict == "skipped"


def test_the_answer_of_nvidia_smi(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'GPU-a, 0x0000000000000004, 0, 0, 3'; echo 'GPU-b, [N/A], 98, [N/A], "
        "[N/A]'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    busy = {
        "utilization_percent": 98,
        "uncorrected_errors": None,
        "corrected_errors": None,
        "throttle": None,
    }
    assert read_gpus("nvidia", ["GPU-b", "GPU-a", "GPU-c"], HEALTH) == [
        busy,
        IDLE | {"corrected_errors": 3},
        {},
    ]


BOOST_SLIDERS = """\
+-------------------------------------------------+
| GPU Boost Slider                                |
| GPU     Slider       Max Value    Current Value |
|=================================================|
|   0     vboost           4              0       |
+-------------------------------------------------+
|   1     vboost           4              1       |
+-------------------------------------------------+
"""


def power_settings_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sliders: str, profiles: str
) -> CheckRow:
    """Return the row of two GPUs whose nvidia-smi prints these answers; any other call fails."""
    (folder / "sliders").write_text(sliders)
    (folder / "profiles").write_text(profiles)
    smi = folder / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"    'boost-slider --list') cat {folder}/sliders ;;\n"
        f"    'power-profiles -ge') cat {folder}/profiles ;;\n"
        "    --query-gpu=index,uuid*) echo '0, GPU-a'; echo '1, GPU-b' ;;\n"
        "    *) exit 9 ;;\n"
        "esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    devices = (replace(H200, address="GPU-b"), replace(H200, address="GPU-a"))
    return preflight_command.power_settings(Probe("nvidia", devices))


def test_power_settings_are_read_and_must_not_differ(tmp_path, monkeypatch):
    row = power_settings_of(tmp_path, monkeypatch, BOOST_SLIDERS, "feature is not supported\n")
    assert row.verdict == "warn"
    assert row.value == "vboost 1 of 4; vboost 0 of 4; power profiles: none"
    assert read_vboost(["GPU-b", "GPU-a", "GPU-c"]) == [(1, 4), (0, 4), None]


def test_equal_power_settings_pass(tmp_path, monkeypatch):
    alike = BOOST_SLIDERS.replace("1       |", "0       |")
    row = power_settings_of(tmp_path, monkeypatch, alike, "| GPU 0 |\n|  Max-P |\n|  Max-P |\n")
    assert row.verdict == "ok"
    assert row.value == "vboost 0 of 4; power profiles: GPU 0; Max-P"


def test_drivers_without_power_settings(tmp_path, monkeypatch):
    row = power_settings_of(tmp_path, monkeypatch, "Invalid combination of input arguments.\n", "")
    assert row.verdict == "skipped"
    monkeypatch.setenv("PATH", "")
    assert preflight_command.power_settings(Probe("nvidia", (H200,))).verdict == "skipped"
    with pytest.raises(DriverError):
        read_power_profiles()


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DriverError, match="nvidia-smi"):
        read_gpus("nvidia", ["GPU-a"], HEALTH)
    assert set(read_gpus("amd", [str(tmp_path)], HEALTH)[0].values()) == {None}
    assert (
        gpus.judge_errors(ranks(2), [], []).verdict
        == gpus.judge_throttling(ranks(2), [[]]).verdict
        == "skipped"
    )


def test_the_files_of_amdgpu(tmp_path):
    (tmp_path / "ras").mkdir()
    files = {
        "gpu_busy_percent": "7\n",
        "ras/umc_err_count": "ue: 1\nce: 20\n",
        "ras/gfx_err_count": "ue: 0\nce: 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (found,) = read_gpus("amd", [str(tmp_path)], HEALTH)
    assert (
        found["utilization_percent"],
        found["uncorrected_errors"],
        found["corrected_errors"],
    ) == (7, 1, 23)


def test_a_card_that_does_not_answer_is_named(tmp_path, monkeypatch):
    """A FIFO without a writer stands for a driver that never answers."""
    monkeypatch.setattr(gpu_stats, "ANSWER_S", 0.2)
    cards = [tmp_path / f"0000:{number:02x}:00.0" for number in (0x10, 0x18)]
    for card in cards:
        card.mkdir()
    (cards[0] / "gpu_busy_percent").write_text("3\n")
    os.mkfifo(cards[1] / "gpu_busy_percent")
    with pytest.raises(DriverError, match=r"0000:18:00\.0 does not answer"):
        read_gpus("amd", [str(card) for card in cards], HEALTH)
    with (cards[1] / "gpu_busy_percent").open("w"):  # end the thread
        pass


def test_cards_that_do_not_answer_refuse_the_machine(monkeypatch):
    def fail(*_):
        raise DriverError("card 0000:18:00.0 does not answer within 5 s")

    monkeypatch.setattr(preflight_command, "read_gpus", fail)

    def without_torch(*_):
        raise broken_torch()

    for run_ranks in (lambda *_: [], without_torch):
        monkeypatch.setattr(preflight_command, "run_ranks", run_ranks)
        for vendor, verdict in (("amd", "refuse"), ("nvidia", "warn")):
            request = preflight_command.PreflightRequest("H200", 1, skipped("config", ""))
            found = Probe(vendor, (H200,))
            rows = preflight_command.measure(request, found, KINDS["H200"], options(), {})[1]
            row = by_check(rows)["driver readings"]
            assert row.verdict == verdict and "0000:18:00.0" in row.value


def gpu_metrics(
    folder: Path, revision: tuple[int, int], size: int, counters: tuple[int, ...]
) -> None:
    """Return amdgpu's binary file: size, revision, and five counters at the revision's offset."""
    offset = {(1, 6): 36}.get(revision, 44)
    content = bytearray(max(size, offset + 20))
    struct.pack_into("<HBB", content, 0, size, *revision)
    struct.pack_into("<5I", content, offset, *counters)
    (folder / "gpu_metrics").write_bytes(content)


@pytest.mark.parametrize(("revision", "size"), [((1, 6), 1664), ((1, 7), 2208), ((1, 8), 3000)])
def test_throttling_of_an_amd_gpu_is_what_its_counters_gained(tmp_path, revision, size):
    def reading(*counters):
        gpu_metrics(tmp_path, revision, size, counters)
        return read_gpus("amd", [str(tmp_path)], HEALTH)

    first, second, third = reading(1, 50, 3, 0, 0), reading(1, 90, 3, 0, 0), reading(1, 95, 3, 0, 8)
    (quiet,) = with_throttling(first, second)
    assert quiet["throttle"] == ["power cap"] and "throttle_counters" not in quiet
    (hot,) = with_throttling(second, third)
    assert hot["throttle"] == ["power cap", "thermal (HBM)"]
    assert with_throttling([], first)[0]["throttle"] is None, "one reading tells nothing"
    assert gpus.judge_throttling(ranks(1), [[quiet]]).verdict == "ok"
    row = gpus.judge_throttling(ranks(1), [[quiet], [hot]])
    assert row.verdict == "warn" and "HBM" in row.value


@pytest.mark.parametrize(
    ("revision", "size"), [((1, 6), 900), ((1, 3), 2208), ((1, 9), 2208), ((2, 7), 2208)]
)
def test_metrics_of_another_revision_are_unknown_and_not_misread(tmp_path, revision, size):
    gpu_metrics(tmp_path, revision, size, (1, 2, 3, 4, 5))
    assert amd_throttle_counters(tmp_path) is None
    reading = read_gpus("amd", [str(tmp_path)], HEALTH)
    assert gpus.judge_throttling(ranks(1), [with_throttling(reading, reading)]).verdict == "skipped"
    (tmp_path / "gpu_metrics").write_bytes(b"\x04")
    assert amd_throttle_counters(tmp_path) is None


def test_torch_that_hides_the_address_of_a_gpu(monkeypatch):
    """torch for ROCm lacked some properties: without an address a rank measures all the same."""
    facts = SimpleNamespace(
        name="AMD Instinct MI300X",
        total_memory=192 * GIB,
        multi_processor_count=304,
        gcnArchName="gfx942:sramecc+",
    )
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (190 * GIB, 192 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: facts)
    found = RankReport(0)
    measure.record_properties(found, "cuda")
    assert (found.arch, found.compute_units, found.uuid, found.pci) == (
        "gfx942:sramecc+",
        304,
        "",
        "",
    ) and "no address" in found.label
    for name, value in {
        "uuid": "ab",
        "pci_domain_id": 0,
        "pci_bus_id": 27,
        "pci_device_id": 0,
    }.items():
        setattr(facts, name, value)
    measure.record_properties(found, "cuda")
    assert (found.uuid, found.pci) == ("ab", "0000:1b:00.0")


@pytest.mark.parametrize("name", ["triton", "triton-rocm", "pytorch-triton-rocm"])
def test_triton_is_found_under_each_of_its_names(monkeypatch, name):
    monkeypatch.setattr(host, "version_of", {name: "3.6.0", "torch": "2.13.0"}.get)
    assert "triton 3.6.0" in host.judge_software().value


# --- GPUs: right and fast -------------------------------------------------------------------------


def test_the_engine_of_each_operation_is_a_row_and_a_damaged_file_warns():
    choices = {"attention": "aiter: 67% faster than sdpa (ms per layer: sdpa 12, aiter 4)"}
    first = rank(engines=choices, engine_notes=["x.json cannot be used: timed again"])
    row, note = gpus.judge_engines([first, rank(1)])
    assert (row.check, row.verdict) == ("engine of attention", "ok") and "67%" in row.value
    assert note.verdict == "warn" and "x.json" in note.value and note.do
    assert gpus.judge_engines([rank()]) == []


def test_self_test_verdict():
    """The verdict of a failed op takes the known issues of the versions into account."""
    # pytorch.org's wheel for ROCm 7.1, as in invoke-ai/InvokeAI#9297
    versions = {"torch": "2.10.0+rocm7.1", "rocm": "7.1.25424"}
    row = gpus.judge_self_test(ranks(2), KINDS["MI325X"], versions)
    assert (row.verdict, row.value) == ("ok", "1 ops, 6.2 s; attention by cudnn")
    bad = [
        (
            "attention backward dQ",
            "attention backward dQ [2, 8192, 32/8, 128]: not finite (minimum 30 dB)",
            False,
        )
    ]
    row = gpus.judge_self_test(
        ranks(2, self_test=[*rank().self_test, *bad]), KINDS["MI325X"], versions
    )
    assert (
        row.verdict == "refuse"
        and "GPU 1" in row.value
        and "dQ [2, 8192, 32/8, 128]: not finite" in row.value
        and "50.0" not in row.value
    )
    assert "ck-16-bit-atomics" in row.do and "https://" in row.do
    row = gpus.judge_self_test(ranks(1, self_test=bad), KINDS["MI325X"], versions | {"rocm": "9.0"})
    assert (
        row.verdict == "refuse"
        and gpus.judge_self_test(ranks(2, self_test=[]), None, {}).verdict == "skipped"
    )
    row = gpus.judge_self_test(
        ranks(1, self_test=[("triton RoPE", "triton RoPE (4, 4): 6.0 dB", False)]),
        KINDS["MI300X"],
        {"torch": "3.0"},
    )
    assert "torch 3.0" in row.do


def speed_rows(found, kind="H200"):
    return by_check(gpus.judge_speeds(found, "cuda", kind))


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (1.0, "ok"),
        (0.985, "ok"),
        (0.98, "warn"),
        (0.951, "warn"),
        (0.95, "refuse"),
        (0.5, "refuse"),
    ],
)
@pytest.mark.parametrize("count", [2, 8])
def test_a_slow_gpu_is_compared_with_the_others(count, share, verdict):
    """The reference is the median of the other GPUs: of two GPUs, 5 % slower is 5 % slower."""
    row = speed_rows(ranks(count, speeds={"copy": 4.3 * share}))["copy, siblings"]
    assert row.verdict == verdict
    if verdict != "ok":
        assert row.value == (
            f"GPU {count - 1} (aaaa-{count - 1}, 0000:{count - 1:02x}:00.0): "
            f"{4.3 * share:.4g} TB/s, {1 - share:.1%} slower"
        )


def test_one_gpu_is_compared_with_the_table_only():
    rows = speed_rows([rank(speeds={"bf16 GEMM": 500.0})])
    assert rows["bf16 GEMM, siblings"].verdict == "skipped" and rows["copy, table"].verdict == "ok"
    assert (
        rows["bf16 GEMM, table"].verdict == "refuse" and "679" in rows["bf16 GEMM, table"].expected
    )
    assert speed_rows([rank(speeds={"bf16 GEMM": 640.0})])["bf16 GEMM, table"].verdict == "warn"


def test_one_gpu_measures_no_collectives():
    alone = rank()
    del alone.speeds["all-reduce"], alone.speeds["all-gather"]
    rows = speed_rows([alone])
    assert rows["all-reduce"].verdict == rows["all-gather"].verdict == "skipped"


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values() if kind.vendor == "amd"])
def test_amd_gpus_are_compared_with_each_other_only(kind):
    rows = speed_rows(ranks(8), kind)
    assert all(f"no reference speed for {kind}" in rows[f"{name}, table"].value for name in UNITS)
    assert {rows[f"{name}, table"].verdict for name in UNITS} == {"skipped"}
    assert {rows[f"{name}, siblings"].verdict for name in UNITS} == {"ok"}


def test_every_expectation_is_for_something_measured():
    assert all(kind in KINDS and set(table) <= set(UNITS) for kind, table in gpus.EXPECTED.items())


def test_speeds_of_a_cpu_are_not_judged():
    rows = gpus.judge_speeds(ranks(2, speeds={"copy": 0.1}), "cpu", "CPU")
    assert {row.verdict for row in rows} == {"skipped"} and any(
        "0.1 to 4.3 TB/s" in row.value for row in rows
    )


# --- host -----------------------------------------------------------------------------------------

GOOD = machine_host.Host(1024 * GIB, 500 * GIB, resource.RLIM_INFINITY, 65536)


@pytest.mark.parametrize(
    ("changed", "check", "verdict"),
    [
        ({}, "host memory", "ok"),
        ({"memory_bytes": 100 * GIB}, "host memory", "warn"),
        ({"memory_bytes": 20 * GIB}, "host memory", "refuse"),
        ({}, "/dev/shm", "ok"),
        ({"shm_bytes": 4 * GIB}, "/dev/shm", "warn"),
        ({"shm_bytes": 64 * 2**20}, "/dev/shm", "refuse"),
        ({"shm_bytes": 0}, "/dev/shm", "refuse"),
        ({}, "memlock limit", "ok"),
        ({"memlock_bytes": 8 * 2**20}, "memlock limit", "warn"),
        ({}, "open files", "ok"),
        ({"open_files": resource.RLIM_INFINITY}, "open files", "ok"),
        ({"open_files": 512}, "open files", "warn"),
        ({"open_files": 64}, "open files", "refuse"),
    ],
)
def test_host(changed, check, verdict):
    row = by_check(host.judge(replace(GOOD, **changed), 8, "cuda", 1))[check]
    assert row.verdict == verdict and bool(row.do) == (verdict != "ok")


def test_memory_that_a_config_pins_is_required_in_addition():
    for gib, verdict in ((288, "ok"), (287, "warn"), (192, "warn"), (191, "refuse")):
        row = by_check(host.judge(replace(GOOD, memory_bytes=gib * GIB), 8, "cuda", 1, 20 * GIB))[
            "host memory"
        ]
        assert row.verdict == verdict and ("offload_layers" in row.do) == (verdict != "ok")
    for benchmark, pinned in (("llama2_70b_lora", 20 * GIB), ("llama31_8b", 0)):
        file = str(ROOT / f"configs/{benchmark}/H200_1x2.toml")
        wanted = Request(benchmark, file=file)
        run = preflight_command.requested_run(wanted, NO_GPUS)
        assert run.pinned_bytes == pinned


def test_what_depends_on_the_run():
    little = machine_host.Host(2 * GIB, 0, 64 * 1024, 4096)
    cpu = by_check(host.judge(little, 1, "cpu", 1))
    assert cpu["host memory"].verdict == "ok" and not {"/dev/shm", "memlock limit"} & cpu.keys(), (
        "only GPUs need them"
    )
    assert by_check(host.judge(little, 1, "cuda", 1))["/dev/shm"].verdict == "warn", (
        "one process talks to nobody"
    )
    assert by_check(host.judge(little, 8, "cuda", 2))["memlock limit"].verdict == "refuse", (
        "between nodes it is needed"
    )


@pytest.fixture
def with_rdma(tmp_path, monkeypatch):
    """The root of a host with one active InfiniBand port, whose device this user may open."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").write_text("")
    monkeypatch.setattr(host, "IBVERBS", "libc.so.6")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "variables", "verdict", "words"),
    [
        ("", {}, "ok", "1 active"),
        ("", {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, "ok", "1 active"),
        ("", {"NCCL_IB_DISABLE": "1"}, "warn", "NCCL_IB_DISABLE"),
        ("", {"NCCL_NET": "Socket"}, "warn", "NCCL_NET"),
        ("", {"NCCL_NET": "AWS Libfabric"}, "skipped", "plugin"),
        ("down", {}, "warn", "no active port"),
        ("no device", {}, "warn", "uverbs"),
        ("no library", {}, "warn", "libibverbs"),
    ],
)
def test_a_fall_back_to_tcp_is_a_warning(with_rdma, monkeypatch, change, variables, verdict, words):
    if change == "down":
        (with_rdma / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN")
    elif change == "no device":
        (with_rdma / "dev/infiniband/uverbs0").unlink()
    elif change == "no library":
        monkeypatch.setattr(host, "IBVERBS", "libibverbs.so.none")
    row = host.judge_rdma(variables, with_rdma)
    assert row.verdict == verdict and words in row.value
    assert ("TCP" in row.value) == bool(row.do) == (verdict == "warn")


def test_only_several_nodes_with_gpus_need_rdma(monkeypatch):
    monkeypatch.setattr(host, "judge_rdma", lambda environment: CheckRow("RDMA", "ok", "seen"))
    for kind, nodes, judged in (("H200", 2, True), ("H200", 1, False), ("CPU", 2, False)):
        request = preflight_command.PreflightRequest(kind, 1, (), nodes)
        assert ("RDMA" in by_check(preflight_command.host_rows("", request, {}))) is judged


def test_the_capability_to_lock_memory_is_no_limit(tmp_path, monkeypatch):
    (tmp_path / "proc/self").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    for capabilities, limit in (("4000", resource.RLIM_INFINITY), ("3fff", 65536)):
        text = f"CapPrm:\t4000\nCapEff:\t000000000000{capabilities}\n"
        (tmp_path / "proc/self/status").write_text(text)
        assert machine_host.read_host(tmp_path).memlock_bytes == limit


def test_memory_is_that_of_the_container_if_less(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal:  2000000 kB\nMemAvailable:  1000000 kB\n")
    assert machine_host.available_memory(tmp_path) == 1_000_000 * 1024
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "400000000\n")
    assert machine_host.available_memory(tmp_path) == 1_000_000 * 1024
    write("sys/fs/cgroup/memory.max", "500000000\n")
    assert machine_host.available_memory(tmp_path) == 100_000_000
    write("sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 300000000\n")
    assert machine_host.available_memory(tmp_path) == 400_000_000, "page cache can be given up"


def test_memory_of_gpus_is_no_memory_of_the_host(tmp_path):
    """Grace: the memory of each GPU is a NUMA node without CPUs, which MemAvailable counts."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 9000000 kB\n")
    for number, (cpus, free) in enumerate((("0-71", 3000), ("", 500_000), ("72-143", 2000))):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        lines = (
            f"MemFree: {free} kB",
            "Active(file): 10 kB",
            "Inactive(file): 5 kB",
            "Active(anon): 99 kB",
        )
        (node / "meminfo").write_text("".join(f"Node {number} {line}\n" for line in lines))
    assert machine_host.available_memory(tmp_path) == 5030 * 1024


def test_this_host_can_be_read():
    found = machine_host.read_host()
    assert found.memory_bytes > 2**27 and found.open_files != 0
    assert machine_host.read_host(Path("/nowhere")).shm_bytes == 0


def test_folders(tmp_path):
    assert (
        host.judge_read_folder("DATADIR", tmp_path / "no/such", miniature=False).verdict == "warn"
    )
    assert (
        host.judge_read_folder("DATADIR", tmp_path / "no/such", miniature=True).verdict == "skipped"
    )
    (tmp_path / "tokens.bin").write_bytes(b"x" * 1000)
    row = host.judge_read_folder("DATADIR", tmp_path, miniature=False)
    assert row.verdict == "ok" and "1 files" in row.value


def test_log_folder(tmp_path, monkeypatch):
    assert host.judge_log_folder(tmp_path / "new/results").verdict in ("ok", "warn")
    assert not (tmp_path / "new").exists(), "read-only"
    for free, verdict in ((20 * GIB, "ok"), (5 * GIB, "warn"), (GIB // 2, "refuse")):
        monkeypatch.setattr(
            host.shutil, "disk_usage", lambda path, answer=free: argparse.Namespace(free=answer)
        )
        assert host.judge_log_folder(tmp_path).verdict == verdict
    (tmp_path / "file").write_text("")
    assert host.judge_log_folder(tmp_path / "file/results").verdict == "refuse"
    monkeypatch.setattr(host.os, "access", lambda path, mode: False)
    assert host.judge_log_folder(tmp_path).verdict == "refuse"


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "verdict"),
    [
        ("2.11.0+cu130", "ok"),
        ("2.10.0+rocm7.1", "ok"),
        ("2.9.1+cu128", "refuse"),
        ("", "refuse"),
    ],
)
def test_software(monkeypatch, torch, verdict):
    monkeypatch.setattr(host, "version_of", lambda name: torch if name == "torch" else "")
    row = host.judge_software()
    assert row.verdict == verdict and f"torch {torch}" in row.value


# --- the command ----------------------------------------------------------------------------------


def test_errors_are_listed_before_ranks_that_only_stopped():
    found = [rank(0, phase="copy"), rank(1, phase="FP8 GEMM", error="OutOfMemoryError: 2 GiB")]
    row = preflight_command.judge_ranks(found, 3)
    assert (
        row.verdict == "refuse"
        and row.value == "GPU 1 (aaaa-1, 0000:01:00.0) in 'FP8 GEMM': OutOfMemoryError: 2 GiB"
    )
    assert (
        preflight_command.judge_ranks(found[:1], 1).value
        == "GPU 0 (aaaa-0, 0000:00:00.0) stopped in 'copy'"
    )
    assert preflight_command.judge_ranks(ranks(2), 3).value == "GPU 2 never reported"
    assert preflight_command.judge_ranks(ranks(3), 3).verdict == "ok"


def options(benchmark="llama31_8b", **changed):
    arguments = [
        item
        for key, value in changed.items()
        for item in ([f"--{key}"] if value is True else [f"--{key}", value])
    ]
    options = preflight_command.parser(benchmark).parse_args(arguments)
    options.benchmark = benchmark
    return options


CUDA_13 = {"torch": "2.13.0", "cuda": "13.0"}


def on_gpus(
    monkeypatch,
    devices,
    found,
    environment=None,
    answers=None,
    versions=CUDA_13,
    driver="580.95.05",
    compiler="",
    **changed,
):
    """The command on a machine of fakes; its rows by check."""
    make_visible(monkeypatch, Probe("nvidia", devices, driver))
    monkeypatch.setattr(
        preflight_command, "installed", lambda driver: versions | {"driver": driver}
    )
    monkeypatch.setattr(host.torch_build, "missing_compiler", lambda environment: compiler)
    monkeypatch.setattr(
        preflight_command,
        "read_gpus",
        lambda vendor, addresses, names: answers or samples(len(devices)),
    )
    monkeypatch.setattr(
        preflight_command,
        "run_ranks",
        lambda wanted, seconds, env, meanwhile, cpus: [meanwhile(), found][1],
    )
    return by_check(preflight_command.check(options(**changed), environment or {})[0])


def test_a_healthy_host_of_four(monkeypatch):
    rows = on_gpus(monkeypatch, (H200,) * 4, ranks(4))
    assert rows["config"].value == "H200_1x4.toml: 4 x H200" and rows["driver"].value == "580.95.05"
    gpu_rows = [
        row
        for check, row in rows.items()
        if "GPU" in check
        or ", siblings" in check
        or check in ("memory errors (ECC)", "copy, table")
    ]
    assert len(gpu_rows) >= 12 and {row.verdict for row in gpu_rows} == {"ok"}


def test_all_gpus_are_checked_for_a_config_that_is_fitted_to_them(monkeypatch):
    example = str(ROOT / "open_llama/examples/pretrain_1b.toml")
    rows = on_gpus(monkeypatch, (H200,) * 8, ranks(8), benchmark="open_llama", config=example)
    assert "fitted to 8 x H200" in rows["config"].value
    assert rows["measuring processes"].expected == "8 of 8"


def test_preflight_refuses_what_a_run_refuses(monkeypatch, tmp_path):
    file = tmp_path / "short.toml"
    text = (ROOT / "configs/llama31_8b/H200_1x4.toml").read_text()
    file.write_text(re.sub(r"^max_samples = \S+", "max_samples = 16", text, flags=re.MULTILINE))
    rows = on_gpus(monkeypatch, (H200,) * 4, ranks(4), {"DGXNGPU": "2"}, config=str(file))
    assert rows["config"].verdict == "ok"
    assert {rows["max_samples"].verdict, rows["DGXNGPU"].verdict} == {"refuse"}
    assert "12,288" in rows["max_samples"].do and "DGXNGPU=2" in rows["DGXNGPU"].value


def test_torch_for_cpus_and_a_missing_compiler_are_refused(monkeypatch):
    """Nothing is measured, because every process would fail with AttributeError or in Triton."""
    rows = on_gpus(monkeypatch, (H200,) * 4, ranks(4), versions={"torch": "2.13.0+cpu"})
    assert (
        rows["torch build"].verdict == "refuse"
        and "setup" in rows["torch build"].do
        and "measuring processes" not in rows
    )
    rows = on_gpus(
        monkeypatch,
        (H200,) * 4,
        ranks(4),
        versions={"torch": "2.13.0", "cuda": "13.0"},
        driver="550.54",
    )
    assert rows["torch build"].verdict == "refuse" and "580" in rows["torch build"].do
    rows = on_gpus(monkeypatch, (H200,) * 4, ranks(4), compiler="Python.h not found")
    assert rows["C compiler"].verdict == "refuse" and "Python.h" in rows["C compiler"].value


def test_a_sick_one_among_four(monkeypatch):
    sick = {
        "utilization_percent": 99,
        "uncorrected_errors": 2,
        "corrected_errors": 0,
        "throttle": ["hardware slowdown"],
    }
    found = ranks(
        4,
        speeds={"bf16 GEMM": 330.0},
        used_bytes=9 * GIB,
        self_test=[("FP8 product qkv fprop", "FP8 product qkv fprop: 6.0 dB", False)],
    )
    rows = on_gpus(monkeypatch, (H200,) * 4, found, answers=samples(4, sick))
    refused = {
        check
        for check, row in rows.items()
        if row.verdict == "refuse" and "GPU 3 (aaaa-3, 0000:03:00.0)" in row.value
    }
    assert refused == {
        "GPU memory in use",
        "GPU use before the test",
        "memory errors (ECC)",
        "self-test",
        "bf16 GEMM, siblings",
        "bf16 GEMM, table",
    }
    assert rows["throttling under load"].verdict == "warn"


def test_gpus_that_are_not_those_of_the_config_are_not_measured(monkeypatch):
    rows = on_gpus(monkeypatch, (H200,) * 2, None, {"DGXSYSTEM": "H200_1x4"})
    assert (
        rows["GPU count"].verdict == "refuse"
        and rows["health and speed of the GPUs"].verdict == "skipped"
    )
    rows = on_gpus(monkeypatch, (replace(H200, partition="MIG"),) * 2, None)
    (row,) = rows.values()
    assert row.verdict == "refuse" and "MIG" in row.value


def test_ranks_that_failed_are_not_compared(monkeypatch):
    rows = on_gpus(
        monkeypatch, (H200,) * 2, ranks(2, phase="copy", error="RuntimeError: device lost")
    )
    assert (
        rows["measuring processes"].verdict == "refuse"
        and rows["speeds"].verdict == "skipped"
        and "copy, siblings" not in rows
    )
    assert rows["GPU memory in use"].verdict == "ok", "what they said before still counts"


def test_without_a_benchmark_the_machine_alone_is_checked(monkeypatch, capsys):
    rows = on_gpus(monkeypatch, (H200,) * 3, ranks(3), benchmark="")
    assert (
        rows["config"].verdict == "skipped"
        and rows["GPU count"].expected == "8"
        and "DATADIR" not in rows
    )
    assert rows["measuring processes"].verdict == "ok" and "LOGDIR" in " ".join(rows)
    assert preflight_command.main(["--config", "x.toml"]) == 2
    assert "--config needs a benchmark" in capsys.readouterr().err


def test_a_derived_config_is_named(monkeypatch):
    card = replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)
    row = on_gpus(monkeypatch, (card,) * 4, ranks(4))["config"]
    assert row.verdict == "ok" and row.value.startswith("derived for 4 x H100 from H100_1x8.toml: ")


def test_a_machine_without_a_config_is_checked_by_itself(monkeypatch):
    rows = on_gpus(monkeypatch, (H200,) * 3, ranks(3))
    assert rows["config"].verdict == "warn" and rows["GPU count"].expected == "8"
    rows = on_gpus(monkeypatch, (H200,) * 4, ranks(2), {"DGXNGPU": "2"})
    assert (
        rows["config"].value.startswith("H200_1x2")
        and rows["measuring processes"].value == "all finished"
    )


@pytest.mark.parametrize(
    ("changed", "environment", "words"),
    [
        ({"config": "/nowhere.toml"}, {}, "no such config"),
        ({"config": ""}, {}, "--config is empty"),
        ({}, {"DGXSYSTEM": "H200"}, "no config 'H200'"),
        ({}, {"DGXNGPU": "two"}, "DGXNGPU=two"),
    ],
)
def test_a_wrong_request_ends_with_2(changed, environment, words, capsys, monkeypatch):
    for name in ("DGXSYSTEM", "DGXNGPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = [
        "llama31_8b",
        "--device",
        "cpu",
        *(item for key, value in changed.items() for item in (f"--{key}", value)),
    ]
    assert preflight_command.main(arguments) == 2 and words in capsys.readouterr().err


def test_quiet_prints_only_the_table(monkeypatch, capsys):
    monkeypatch.setenv(QUIET, "1")
    on_gpus(monkeypatch, (H200,), ranks(1))
    assert "measuring" not in capsys.readouterr().err


def test_refusal_is_18_in_the_table_and_in_json(monkeypatch, capsys):
    row = CheckRow("GPU count", "refuse", "1 visible", "2", "show more")
    monkeypatch.setattr(
        preflight_command,
        "check",
        lambda options, environment: ([row, skipped("x", "why")], [rank()], {"gpus": 1}),
    )
    assert preflight_command.main(["llama31_8b"]) == 18
    said = capsys.readouterr()
    assert "do: show more" in said.out and "GPU count" in said.err
    assert preflight_command.main(["llama31_8b", "--json"]) == 18
    answer = json.loads(capsys.readouterr().out)
    assert (
        (answer["verdict"], answer["gpus"]) == ("refuse", 1)
        and answer["rows"][0]["expected"] == "2"
        and answer["ranks"][0]["pci"] == "0000:00:00.0"
    )
    monkeypatch.setattr(
        preflight_command,
        "check",
        lambda options, environment: ([replace(row, verdict="warn")], [], {}),
    )
    assert preflight_command.main(["llama31_8b"]) == 0


def test_a_rank_that_hangs_ends_by_itself(tmp_path):
    code = (
        "import time; from pathlib import Path; from launch.preflight import measure as m, "
        "rank_report; rank_report.START_S = 0.5; "
    )
    code += "m.measure = lambda *arguments: time.sleep(600); m.main(Path('.'), 'cpu', 0.0)"
    environment = os.environ | {"PYTHONPATH": python_path(ROOT), "RANK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and "Timeout" in done.stderr
    assert preflight_command.judge_ranks(read_ranks(tmp_path), 2).value == "GPU 0 never reported"


def test_a_stopped_rank_names_its_phase(tmp_path):
    (tmp_path / "rank_1.json").write_text(json.dumps({"rank": 1, "phase": "all-reduce"}))
    (tmp_path / "rank_0.json").write_text(json.dumps({"rank": 0, "phase": "done"}))
    (tmp_path / "rank_2.json.partial").write_text("{")
    found = read_ranks(tmp_path)
    assert [one.rank for one in found] == [
        0,
        1,
    ] and "stopped in 'all-reduce'" in preflight_command.judge_ranks(found, 2).value


def run_preflight(tmp_path, *arguments):
    """Through the launcher, with what it needs and nothing of this shell's settings."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("DATADIR", "MODEL", "DGXSYSTEM", "DGXNGPU", "GPU_KIND")
    }
    environment |= {
        "PYTHONPATH": python_path(ROOT),
        "LOGDIR": str(tmp_path / "results"),
        "TMPDIR": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "preflight",
        "--quick",
        "--json",
        *arguments,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path
    )


def test_preflight_on_this_cpu_with_two_gloo_ranks(tmp_path):
    text = (ROOT / "configs/llama31_8b/CPU_1x1.toml").read_text()
    config = tmp_path / "two.toml"
    config.write_text(
        text.replace("gpus_per_node = 1", "gpus_per_node = 2").replace(
            "\nmicro_batch_size = 16", "\nmicro_batch_size = 8"
        )
    )
    done = run_preflight(tmp_path, "--device", "cpu", "--config", str(config))
    answer = json.loads(done.stdout)
    rows = {row["check"]: row for row in answer["rows"]}
    assert done.returncode == (18 if answer["verdict"] == "refuse" else 0), done.stderr
    assert rows["measuring processes"]["verdict"] == "ok", done.stderr
    assert rows["copy"]["verdict"] == rows["FP8 GEMM"]["verdict"] == "skipped"
    assert not any("FP8 GEMM" in one["speeds"] for one in answer["ranks"]), (
        "12 s for one product on a CPU without such instructions"
    )
    assert (
        rows["self-test"]["verdict"] == "ok" and "attention by flash" in rows["self-test"]["value"]
    )
    assert [one["phase"] for one in answer["ranks"]] == ["done", "done"]
    assert {"code", "content of the config", "package torch", "driver"} <= answer["facts"].keys()
    assert answer["facts"]["GPUs"] == "none" and answer["gpus"] == 0 and "rdma" in answer
    assert all(
        one["speeds"][name] > 0
        for one in answer["ranks"]
        for name in ("bf16 GEMM", "copy", "all-reduce", "all-gather")
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.toml"], (
        "nothing is left behind, and no results folder made"
    )


def test_a_torch_that_cannot_be_imported_is_one_row(tmp_path, capfd):
    """A real torchrun with a package torch that holds nothing."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    request = preflight_command.PreflightRequest("CPU", 1, skipped("config", ""))
    rows = preflight_command.measure(request, Probe("none"), None, options(), environment)[1]
    assert [(row.verdict, row.value) for row in rows] == [("refuse", "torch cannot be imported")]
    printed = capfd.readouterr().err
    assert "torch.distributed" in printed and "Traceback" not in printed


def test_a_broken_rank_is_a_refusal(tmp_path):
    """A real torchrun with a device that is not there."""
    from common.errors import PreflightError

    wanted = preflight_command.PreflightRequest("H200", 1, skipped("config", ""))
    found = preflight_command.run_ranks(
        wanted,
        0.1,
        os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        lambda: None,
    )
    row = preflight_command.judge_ranks(found, 1)
    assert (
        row.verdict == "refuse"
        and "GPU 0" in row.value
        and ": " in row.value
        and PreflightError.exit_code == 18
    )


# --- what a rank measures -------------------------------------------------------------------------


def test_the_median_is_of_one_work(monkeypatch):
    """Every fifth call is slow, by a clock of the test."""
    torch = pytest.importorskip("torch")
    calls_ms = []

    class Clock:
        def __init__(self, place):
            self.marks_ms = []

        def restart(self):
            pass

        def mark(self):
            self.marks_ms.append(calls_ms[-1])

        def drain_ms(self):
            return self.marks_ms

    monkeypatch.setattr(measure, "StepClock", Clock)

    def work():
        calls_ms.append(4.0 if (len(calls_ms) + 1) % 5 else 20.0)

    assert measure.median_s(work, torch.device("cpu"), 0.1) == pytest.approx(0.004)
    assert len(calls_ms) == 3 + 5 + 25


@pytest.mark.gpu
def test_preflight_on_this_machines_gpus(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    done = run_preflight(tmp_path)
    answer = json.loads(done.stdout)
    rows = {row["check"]: row for row in answer["rows"]}
    print(json.dumps(answer, indent=1))
    assert rows["measuring processes"]["verdict"] == "ok", done.stderr
    for check in ("GPU kind", "GPU count", "GPUs as torch sees them"):
        assert rows[check]["verdict"] == "ok", rows[check]
    for one in answer["ranks"]:
        assert one["pci"].count(":") == 2 and one["uuid"] and one["memory_bytes"] > 2**34
        assert (
            one["speeds"]["bf16 GEMM"] > 100
            and one["speeds"]["FP8 GEMM"] > one["speeds"]["bf16 GEMM"]
            and one["speeds"]["copy"] > 1
        )
        assert set(one["speeds"]) >= (
            {"all-reduce", "all-gather"} if len(answer["ranks"]) > 1 else set()
        )


def test_a_checkout_that_package_would_refuse_is_a_warning(tmp_path):
    row = host.judge_checkout(tmp_path, {})
    assert (
        row.verdict == "warn"
        and row.do
        and "commit" in row.value
        and "MLPERF_SUBMISSION_ORG" in row.value
    )


def test_a_name_that_cannot_be_submitted_refuses(tmp_path):
    row = host.judge_checkout(tmp_path, {"MLPERF_SUBMISSION_ORG": "My Company"})
    assert row.verdict == "refuse" and "My Company" in row.value


def test_the_checkout_is_judged_for_what_can_be_submitted_only():
    for miniature in (False, True):
        request = preflight_command.PreflightRequest(
            "CPU", 1, CheckRow("config", "ok", ""), miniature=miniature
        )
        assert ("checkout" in by_check(preflight_command.host_rows("llama31_8b", request, {}))) == (
            not miniature
        )
        assert "checkout" not in by_check(preflight_command.host_rows("open_llama", request, {}))


def test_host_settings_never_refuse(tmp_path):
    file = tmp_path / "proc/sys/kernel/numa_balancing"
    file.parent.mkdir(parents=True)
    for text, verdict in (("1", "warn"), ("0", "ok")):
        file.write_text(f"{text}\n")
        assert host.judge_system_tuning(tmp_path).verdict == verdict
