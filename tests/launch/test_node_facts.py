"""Test the facts that must be equal on all nodes, on fakes of drivers and environments."""

import pytest

from common.machine.hardware import Device, Probe
from launch import node_facts

MI300X = Device("AMD Instinct MI300X", "gfx942", 192 << 30, 304)


@pytest.mark.quick
def test_a_missing_gpu_another_driver_and_another_variable_are_differences():
    eight = node_facts.machine_facts(Probe("amd", (MI300X,) * 8, "6.12"), {"NCCL_ALGO": "Ring"})
    seven = node_facts.machine_facts(Probe("amd", (MI300X,) * 7, "6.10"), {})
    gpus, driver, variable = node_facts.differences(seven, eight)
    assert "7 x" in gpus and "8 x" in gpus and "6.10" in driver and "6.12" in driver
    assert "NCCL_ALGO" in variable and "missing" in variable and "Ring" in variable
    assert node_facts.differences(eight, dict(eight)) == []


@pytest.mark.quick
def test_firmware_clocks_and_links_of_amd_cards_are_read(tmp_path):
    cards = []
    for number, firmware in enumerate(("0x0055", "0x0056")):
        card = tmp_path / f"card{number}"
        (card / "fw_version").mkdir(parents=True)
        (card / "fw_version/smc_fw_version").write_text(firmware)
        (card / "vbios_version").write_text("113-M3000100-103")
        (card / "pp_dpm_sclk").write_text("0: 132Mhz *\n1: 2100Mhz\n")
        (card / "current_link_width").write_text("16")
        cards.append(Device("AMD Instinct MI300X", "gfx942", 192 << 30, 304, address=str(card)))
    facts = node_facts.hardware_facts(Probe("amd", tuple(cards)), tmp_path)
    assert facts["GPU firmware smc"] == "0x0055 and 0x0056"
    assert facts["GPU VBIOS"] == "113-M3000100-103" and facts["GPU highest clock"] == "2100"
    assert facts["GPU PCIe width"] == "16" and facts["GPU power limit"] == "unknown"
