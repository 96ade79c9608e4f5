"""What a result says of the machine, with drivers that answer as told."""

from types import SimpleNamespace

import pytest
import torch

from common.gpu_kinds import KINDS
from common.machine.gpu_stats import DriverError
from common.machine.hardware import Device, Probe
from launch.selection.machine import Machine
from throughput import machine

pytestmark = pytest.mark.quick

H200 = Device("NVIDIA H200", "sm_90", 143771 * 2**20, address="GPU-1")


@pytest.fixture
def driver(monkeypatch):
    """The power limits that the driver gives; an exception is raised."""
    limits = [700.0, 650.0]

    def read(vendor, addresses, names):
        assert (vendor, addresses, names) == ("nvidia", ["GPU-1", "GPU-1"], ["power_limit_w"])
        if not limits:
            raise DriverError("no answer")
        return [{"power_limit_w": limit, "throttle": []} for limit in limits]

    monkeypatch.setattr(machine, "read_gpus", read)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=140 * 2**30)
    )
    return limits


def test_a_known_gpu_has_its_peaks_and_the_lowest_power_limit(driver):
    facts = machine.facts(Machine(Probe("nvidia", (H200, H200))), "cuda")
    assert (
        facts["gpu"],
        facts["kind"],
        facts["gpus"],
        facts["gpu_memory_gib"],
        facts["power_limit_w"],
    ) == (
        "NVIDIA H200",
        "H200",
        2,
        140.0,
        650.0,
    )
    assert (facts["peak_tflops_16_bits"], facts["peak_tflops_fp8"]) == (
        KINDS["H200"].peak_bf16_tflops,
        KINDS["H200"].peak_fp8_tflops,
    )
    assert facts["os"] and facts["host_memory"]


def test_the_cards_are_named_by_their_uuids(driver, tmp_path):
    facts = machine.facts(Machine(Probe("nvidia", (H200, H200))), "cuda")
    assert facts["uuid"] == "GPU-1, GPU-1"
    (tmp_path / "unique_id").write_text("a1b2\n")
    card = Device("AMD Instinct MI300X", "gfx942", 2**37, address=str(tmp_path))
    assert machine.uuids(Probe("amd", (card,))) == {"uuid": "a1b2"}
    assert machine.uuids(Probe("nvidia", (Device("NVIDIA H200", "sm_90", 2**37),))) == {}


def test_an_unknown_gpu_has_no_peak_and_a_silent_driver_no_limit(driver):
    driver.clear()
    facts = machine.facts(
        Machine(Probe("nvidia", (Device("NVIDIA B200", "sm_100", 2**37, address="GPU-1"),) * 2)),
        "cuda",
    )
    assert (
        facts["kind"] == "unknown"
        and not {"peak_tflops_16_bits", "peak_tflops_fp8", "power_limit_w"} & facts.keys()
    )


def test_the_cpu_is_not_taken_for_a_gpu():
    facts = machine.facts(Machine(Probe("nvidia", (H200,))), "cpu")
    assert (
        "kind" not in facts and "gpus" not in facts and facts["threads"] == torch.get_num_threads()
    )


def test_versions_name_the_commit_and_torch(monkeypatch):
    known = {"python": "3.12", "driver": "580", "packages": {"torch": "2.9", "sentencepiece": "1"}}
    monkeypatch.setattr(
        machine.run_directory,
        "versions",
        lambda root, found: known | {"commit": "0123456789abcdef", "dirty": True},
    )
    monkeypatch.setattr(machine, "installed", lambda: {"rocm": "10.0.0"})
    named = machine.versions(Probe("none"))
    assert named == {
        "commit": "0123456789ab, modified",
        "driver": "580",
        "python": "3.12",
        "torch": "2.9",
        "rocm": "10.0.0",
    }
    monkeypatch.setattr(
        machine.run_directory,
        "versions",
        lambda root, found: known | {"commit": None, "dirty": None},
    )
    assert machine.versions(Probe("none"))["commit"] == "unknown"


def test_boost_slider_and_power_profiles_are_facts(driver, monkeypatch):
    monkeypatch.setattr(machine, "read_vboost", lambda addresses: [(1, 4) for _ in addresses])
    monkeypatch.setattr(machine, "read_power_profiles", lambda: "Max-P")
    facts = machine.facts(Machine(Probe("nvidia", (H200, H200))), "cuda")
    assert facts["vboost"] == "1 of 4"
    assert facts["power_profiles"] == "Max-P"


def test_a_gpu_without_boost_slider_names_none(driver, monkeypatch):
    monkeypatch.setattr(machine, "read_vboost", lambda addresses: [None for _ in addresses])
    monkeypatch.setattr(machine, "read_power_profiles", lambda: "")
    assert machine.power_settings(Probe("nvidia", (H200,))) == {}
    assert machine.power_settings(Probe("amd", (H200,))) == {}
