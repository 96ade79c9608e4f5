"""Every GPU as its driver shows it, whole and partitioned.

Only the H200's output was seen by us; the rest is from reports.
"""

import os
import re
from pathlib import Path

import pytest
from instinct import CARDS, kfd_tree

from common.errors import ConfigError, PreflightError
from common.gpu_kinds import DERIVED_SPEEDS, GIB, KINDS, fp8_family
from common.machine import hardware
from common.machine.hardware import Device, Probe, identify
from common.paths import ROOT

pytestmark = pytest.mark.quick


def amd(count, name, arch="gfx942", gib=192, units=304, partition=""):
    return Probe("amd", (Device(name, arch, int(gib * GIB), units, partition),) * count)


def nvidia(count, name, mib, arch="sm_90", partition=""):
    return Probe("nvidia", (Device(name, arch, mib * 2**20, 0, partition),) * count)


WHOLE = [
    ("MI300X", amd(8, "AMD Instinct MI300X")),
    ("MI300X", amd(8, "AMD Instinct MI300X OAM")),
    ("MI300X", amd(1, "AMD Instinct MI300X VF", gib=191.7)),
    ("MI308X", amd(8, "AMD Instinct MI308X", units=80)),
    ("MI325X", amd(8, "AMD Instinct MI325X", gib=256)),
    ("MI350X", amd(8, "AMD Instinct MI350X", "gfx950", 288, 256)),
    ("MI350X", amd(8, "AMD Instinct MI350X VF", "gfx950", 252, 256)),
    ("MI355X", amd(8, "AMD Instinct MI355X", "gfx950", 288, 256)),
    ("H100", nvidia(8, "NVIDIA H100 80GB HBM3", 81559)),
    ("H200", nvidia(4, "NVIDIA H200", 143771)),
    ("B200", nvidia(8, "NVIDIA B200", 183359, "sm_100")),
    ("GB200", nvidia(4, "NVIDIA GB200", 189471, "sm_100")),
    ("B300", nvidia(8, "NVIDIA B300 SXM6 AC", 275040, "sm_103")),
    ("GB300", nvidia(4, "NVIDIA GB300", 284208, "sm_103")),
]

# GPUs that common/gpu_kinds.py lacks, or that their driver does not name.
DERIVED = [
    amd(8, "AMD Radeon Graphics", "gfx950", 288, 256),
    amd(8, ""),
    amd(4, "AMD Instinct MI300A", gib=128, units=228),
    amd(4, "AMD Radeon Graphics", gib=128, units=228),  # an MI300A without its name
    amd(8, "AMD Radeon Graphics", units=80),  # an MI308X without its name
    amd(8, "AMD Instinct MI250X", "gfx90a", 64, 110),
    amd(1, "AMD Radeon RX 7900 XTX", "gfx1100", 24, 96),
    nvidia(8, "NVIDIA H20", 97871),
    nvidia(1, "NVIDIA GH200 480GB", 97871),
    nvidia(1, "NVIDIA Thor", 125772, "sm_110"),
    nvidia(2, "NVIDIA H100 PCIe", 81559),
    nvidia(2, "NVIDIA H200 NVL", 143771),
    nvidia(8, "NVIDIA A100-SXM4-80GB", 81920, "sm_80"),
    nvidia(1, "NVIDIA L40S", 46068, "sm_89"),
    nvidia(1, "NVIDIA GeForce RTX 4090", 24564, "sm_89"),
]

CUT = [
    amd(64, "AMD Instinct MI300X", gib=24, units=38),  # CPX, NPS4
    amd(8, "AMD Instinct MI300X", gib=192, units=38),  # CPX, NPS1: the memory alone does not tell
    amd(64, "AMD Instinct MI300X", units=0),
    amd(2, "AMD Instinct MI300X", gib=96, units=152),  # DPX
    amd(8, "AMD Instinct MI355X", "gfx950", 288, 256, "CPX"),
    amd(8, "AMD Instinct MI355X", "gfx950", 36, 32),
    nvidia(8, "NVIDIA H100 80GB HBM3", 81559, partition="MIG"),
    nvidia(1, "NVIDIA H200", 71000),
]


def test_each_kind_is_recognized_from_its_drivers_output():
    assert {kind for kind, _ in WHOLE} == set(KINDS)


@pytest.mark.parametrize(("kind", "found"), WHOLE)
def test_whole_cards(kind, found):
    assert identify(found).name == kind


@pytest.mark.parametrize("found", DERIVED)
def test_any_other_kind_is_derived_from_its_driver(found):
    kind, device = identify(found), found.devices[0]
    assert (kind.memory_bytes, kind.arch, kind.vendor, kind.compute_units) == (
        device.memory_bytes,
        device.arch,
        found.vendor,
        device.compute_units,
    )
    known = kind.name in DERIVED_SPEEDS
    assert (kind.peak_bf16_tflops > 0) == (kind.peak_fp8_tflops > 0) == known
    assert re.fullmatch(r"\w+", kind.name) and kind.name not in KINDS


def test_a_gh200_is_known_by_name_with_the_speed_of_its_chip():
    kind = identify(nvidia(1, "NVIDIA GH200 480GB", 97871))
    assert kind.name == "GH200"
    assert kind.peak_fp8_tflops == KINDS["H100"].peak_fp8_tflops
    assert kind.memory_bytes == 97871 * 2**20


def test_another_card_beside_eight_is_no_partition():
    card = amd(1, "AMD Radeon PRO W7900", "gfx1100", 48, 96).devices
    found = Probe("amd", card + amd(8, "AMD Instinct MI355X", "gfx950", 288, 256).devices)
    with pytest.raises(PreflightError, match=r"different kinds.*W7900") as caught:
        identify(found)
    assert "ROCR_VISIBLE_DEVICES=1,2,3,4,5,6,7,8 " in caught.value.do


@pytest.mark.parametrize("found", CUT)
def test_partitions_are_refused(found):
    with pytest.raises(PreflightError, match="partitioned"):
        identify(found)
    with pytest.raises(
        PreflightError, match="partitioned"
    ):  # GPU_KIND does not make a whole card of a part
        identify(
            found, {"sm_90": "H200", "gfx950": "MI355X", "gfx942": "MI300X"}[found.devices[0].arch]
        )


def test_mixed_kinds_are_refused():
    mixed = Probe(
        "nvidia",
        nvidia(1, "NVIDIA H200", 143771).devices
        + nvidia(1, "NVIDIA H100 80GB HBM3", 81559).devices,
    )
    with pytest.raises(PreflightError, match="H100, H200"):
        identify(mixed)


def test_gpu_kind_overrides_the_name():
    assert identify(amd(8, "AMD Radeon Graphics", "gfx950", 288, 256), "MI355X").name == "MI355X"
    for wrong in ("MI355X", "MI400X"):
        with pytest.raises(
            PreflightError,
            match=f"GPU_KIND={wrong} .*8 x .AMD Instinct MI300X",
        ):
            identify(amd(8, "AMD Instinct MI300X"), wrong, forced=True)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (amd(8, "AMD Instinct MI300X OAM"), "MI325X"),  # 192 GiB pass for a whole card of 256
        (amd(8, "AMD Instinct MI350X", "gfx950", 288, 256), "MI355X"),
        (nvidia(1, "NVIDIA GH200 480GB", 97871), "H100"),
        (nvidia(2, "NVIDIA H100 PCIe", 81559), "H100"),
    ],
)
def test_gpu_kind_does_not_contradict_the_driver_unless_it_is_forced(found, kind):
    with pytest.raises(PreflightError, match=f"GPU_KIND={kind}.*{found.devices[0].name}") as caught:
        identify(found, kind)
    assert f"--gpu-kind {kind}" in caught.value.do
    assert identify(found, kind, forced=True).name == kind


def test_no_gpu_is_the_miniature():
    assert identify(Probe("none")) is None
    assert hardware.config_name(None, 1) == "CPU_1x1"


def test_fp8_family():
    assert fp8_family("gfx942:sramecc+:xnack-") == "fnuz"
    assert {fp8_family(arch) for arch in ("gfx950", "sm_90", "sm_100")} == {"ocp"}
    assert {kind.name for kind in KINDS.values() if fp8_family(kind.arch) == "fnuz"} == {
        "MI300X",
        "MI308X",
        "MI325X",
    }


def test_peaks_follow_from_units_and_clock():
    for name, clock_ghz, flop_per_clock in (
        ("MI300X", 2.1, 4096),
        ("MI308X", 2.1, 4096),
        ("MI325X", 2.1, 4096),
        ("MI350X", 2.2, 8192),
        ("MI355X", 2.4, 8192),
    ):
        assert KINDS[name].peak_fp8_tflops == pytest.approx(
            KINDS[name].compute_units * clock_ghz * flop_per_clock / 1e3, rel=1e-4
        )
    assert all(
        kind.peak_fp8_tflops == pytest.approx(2 * kind.peak_bf16_tflops, rel=1e-4)
        for kind in KINDS.values()
    )


def test_config_path_lists_what_exists():
    assert (
        hardware.config_path(ROOT, "llama31_8b", hardware.config_name(KINDS["H200"], 4)).name
        == "H200_1x4.toml"
    )
    with pytest.raises(ConfigError) as caught:
        hardware.config_path(ROOT, "llama31_8b", "H200_1x3")
    assert "MI300X_1x8" in caught.value.why and "DGXNGPU" in caught.value.do


# --- the probes -----------------------------------------------------------------------------------

SMI = (
    "\n".join(
        f"GPU-{i}5d2c3a1-0000, NVIDIA H200, 143771, 9.0, Disabled, 580.95.05" for i in range(4)
    )
    + "\n"
)


def _stub_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    stub = folder / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def smi_says(folder: Path, text: str, **variables: str) -> Probe:
    return hardware.probe_nvidia(
        _stub_nvidia_smi(folder, f"cat <<'X'\n{text}X") | variables, folder
    )


@pytest.mark.parametrize(
    ("value", "count"),
    [(None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("1,9,2", 1), ("GPU-25d,GPU-35d", 2), ("3", 1)],
)
def test_nvidia_smi_and_visible_devices(tmp_path, value, count):
    found = smi_says(tmp_path, SMI, **({} if value is None else {"CUDA_VISIBLE_DEVICES": value}))
    assert len(found.devices) == count
    assert found.vendor == ("nvidia" if count else "none")
    assert found.driver == "580.95.05"


def test_cuda_numbers_gpus_as_nvidia_smi_does(tmp_path):
    assert len(smi_says(tmp_path, SMI, CUDA_DEVICE_ORDER="PCI_BUS_ID").devices) == 4
    with pytest.raises(ConfigError, match="CUDA_DEVICE_ORDER=FASTEST_FIRST"):
        smi_says(tmp_path, SMI, CUDA_DEVICE_ORDER="FASTEST_FIRST")


def test_nvidia_smi_with_mig(tmp_path):
    found = smi_says(tmp_path, SMI.replace("Disabled", "Enabled"))
    with pytest.raises(PreflightError, match="MIG"):
        identify(found)
    with pytest.raises(PreflightError, match="MIG"):
        smi_says(tmp_path, SMI, CUDA_VISIBLE_DEVICES="MIG-1234")


def test_probe_with_a_stub_nvidia_smi(tmp_path):
    assert identify(smi_says(tmp_path, SMI)).name == "H200"
    env = _stub_nvidia_smi(tmp_path, "echo 'No devices were found'; exit 6")
    assert hardware.probe(env, tmp_path, tmp_path) == Probe("none")
    env = _stub_nvidia_smi(
        tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    )
    with pytest.raises(PreflightError, match="version mismatch"):
        hardware.probe(env, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "no output, exit code -9"),
        ("true", "no output"),
        ("echo 'GPU-1, NVIDIA H200, [N/A], 9.0, Disabled, 580.0'", r"memory '\[N/A\]'"),
        ("echo 'GPU-1, NVIDIA H200, 143771, [N/A], Disabled, 580.0'", "compute capability"),
        (
            "echo 'GPU-1, NVIDIA H200, 143771, 9.0, Disabled, 580.0'; echo 'Unable to determine "
            "the device handle'",
            "Unable to determine",
        ),
        ("echo 'GPU-1, NVIDIA H200'", "GPU-1, NVIDIA H200"),
    ],
)
def test_a_driver_that_does_not_describe_its_gpus_is_no_cpu(tmp_path, script, words):
    with pytest.raises(PreflightError, match=words) as caught:
        hardware.probe(_stub_nvidia_smi(tmp_path, script), tmp_path, tmp_path)
    assert caught.value.why and caught.value.do


def test_probe_without_any_gpu(tmp_path):
    assert hardware.probe({"PATH": str(tmp_path)}, tmp_path, tmp_path) == Probe("none")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(card.kind, card.topology(name)) for card in CARDS for name in card.names],
)
def test_amd_topology(tmp_path, kind, arguments):
    kfd_tree(tmp_path, 8, *arguments)
    (tmp_path / "kfd").write_text("")
    found = hardware.probe({"PATH": str(tmp_path)}, tmp_path, tmp_path)
    assert (found.vendor, len(found.devices)) == ("amd", 8)
    assert (
        found.devices[0].arch == KINDS[kind].arch
        and found.devices[0].compute_units == KINDS[kind].compute_units
    )
    assert identify(found).name == kind


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,1,4"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
        ({"ROCR_VISIBLE_DEVICES": "4-7", "HIP_VISIBLE_DEVICES": "4,5"}, 0),
    ],
)
def test_amd_visible_devices(tmp_path, env, count):
    kfd_tree(tmp_path, 8, "AMD Instinct MI300X", 0x74A1, 192, 1216, 90402)
    (tmp_path / "kfd").write_text("")
    assert len(hardware.probe_amd(env, tmp_path, tmp_path).devices) == count


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"ROCR_VISIBLE_DEVICES": "4-7", "HIP_VISIBLE_DEVICES": "4,5"},
            "ROCR_VISIBLE_DEVICES=4-7 hides all 8 GPUs",
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "4,5"},
            "HIP_VISIBLE_DEVICES=4,5 hides all 4 GPUs",
        ),
        ({"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES=-1 hides all 8"),
    ],
)
def test_the_variable_that_hides_all_gpus_is_named(tmp_path, env, words):
    kfd_tree(tmp_path, 8, "AMD Instinct MI300X", 0x74A1, 192, 1216, 90402)
    (tmp_path / "kfd").write_text("")
    found = hardware.probe(env | {"PATH": str(tmp_path)}, tmp_path, tmp_path)
    assert found.vendor == "none" and words in found.hidden


def test_a_gpu_that_is_named_twice_is_refused(tmp_path):
    with pytest.raises(PreflightError, match="0,0,1"):
        hardware.visible_indices(8, "0,0,1")
    with pytest.raises(PreflightError, match="twice"):
        smi_says(tmp_path, SMI, CUDA_VISIBLE_DEVICES="GPU-25d,GPU-25")


def test_amd_gpus_that_are_selected_by_uuid_are_not_taken_for_none(tmp_path):
    kfd_tree(tmp_path, 8, "AMD Instinct MI300X", 0x74A1, 192, 1216, 90402)
    (tmp_path / "kfd").write_text("")
    with pytest.raises(PreflightError, match="GPU-1a2b"):
        hardware.probe({"ROCR_VISIBLE_DEVICES": "GPU-1a2b"}, tmp_path, tmp_path)


def test_amd_partition_mode_and_missing_device_file(tmp_path):
    kfd_tree(tmp_path, 8, "AMD Instinct MI300X", 0x74A1, 192, 1216, 90402, mode="DPX")
    with pytest.raises(PreflightError, match="may not open"):
        hardware.probe_amd({}, tmp_path, tmp_path)
    (tmp_path / "kfd").write_text("")
    with pytest.raises(PreflightError, match="DPX"):
        identify(hardware.probe_amd({}, tmp_path, tmp_path))
    for card in tmp_path.glob("class/drm/*/device"):
        (card / "current_compute_partition").write_text("SPX\n")
        (card / "current_memory_partition").write_text("NPS4\n")
    with pytest.raises(PreflightError, match="NPS4"):
        identify(hardware.probe_amd({}, tmp_path, tmp_path))
