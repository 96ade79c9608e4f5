"""Test the selection of a torch build, with a fake nvidia-smi and /sys, and Triton's needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import PreflightError
from common.gpu_kinds import GIB
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from launch import torch_build
from launch.torch_build import (
    has_hopper,
    missing_compiler,
    nvidia_builds,
    require_fitting_torch,
    suitable_builds,
)
from throughput import shared_options


def fake_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("driver", "capability", "builds"),
    [
        ("580.95.05", "9.0", ("cuda", "cuda12")),
        ("610.1", "10.0", ("cuda", "cuda12")),
        ("580.95.05", "10.3", ("cuda",)),  # CUDA 12.8 compiles for no B300
        ("570.124.06", "9.0", ("cuda12",)),
        ("550.54.15", "9.0", ("cuda12",)),
        ("550.54.15", "8.0", ("cuda12",)),
        ("570.124.06", "10.0", ("cuda12",)),
        ("570.124.06", "12.0", ("cuda12",)),
    ],
)
def test_the_driver_decides_the_build(tmp_path, driver, capability, builds):
    environment = fake_nvidia_smi(
        tmp_path, f"echo '{driver}, {capability}'; echo '{driver}, {capability}'"
    )
    assert suitable_builds(environment, tmp_path, tmp_path) == builds


@pytest.mark.parametrize(
    ("driver", "capability"),
    [("570.124.06", "10.3"), ("550.54.15", "10.0"), ("515.1", "9.0"), ("570.1", "12.1")],
)
def test_a_driver_that_is_too_old_is_refused_before_anything_is_installed(
    tmp_path, driver, capability
):
    environment = fake_nvidia_smi(tmp_path, f"echo '{driver}, {capability}'")
    with pytest.raises(PreflightError, match=driver) as caught:
        suitable_builds(environment, tmp_path, tmp_path)
    assert (
        capability in caught.value.what
        and "580" in caught.value.do
        and "cuda-compat" in caught.value.do
    )


def test_torch_for_cuda_12_exists_for_x86_only():
    with pytest.raises(PreflightError):
        nvidia_builds("570.1", [(10, 0)], {}, "aarch64")
    assert nvidia_builds("580.1", [(10, 0)], {}, "aarch64") == ("cuda",)


def test_a_compatibility_package_counts_as_a_newer_driver(tmp_path):
    (tmp_path / "libcuda.so.580.82.07").write_text("")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.82.07")
    environment = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    assert nvidia_builds("570.1", [(10, 3)], environment, "x86_64") == ("cuda",)
    require_fitting_torch(h200s("570.1"), {"torch": "2.13.0", "cuda": "13.0"}, environment)


def test_a_machine_without_gpus_and_one_of_amd(tmp_path):
    assert suitable_builds({"PATH": str(tmp_path)}, tmp_path, tmp_path) == ("cpu", "cuda", "cuda12")
    environment = fake_nvidia_smi(tmp_path, "echo 'No devices were found'; exit 6")
    assert suitable_builds(environment, tmp_path, tmp_path)[0] == "cpu"
    environment = fake_nvidia_smi(tmp_path, "echo 'Driver/library version mismatch'; exit 18")
    assert suitable_builds(environment, tmp_path, tmp_path)[0] == "cuda", (
        "the run is refused, not the packages"
    )
    (tmp_path / "class/kfd").mkdir(parents=True)
    (tmp_path / "kfd").write_text("")
    assert suitable_builds(environment, tmp_path, tmp_path) == ("rocm",)


# --- the torch that is there ----------------------------------------------------------------------


def h200s(driver: str = "580.95.05") -> Probe:
    return Probe("nvidia", (Device("NVIDIA H200", "sm_90", 141 * GIB),), driver)


INSTINCT = Probe("amd", (Device("AMD Instinct MI300X", "gfx942", 192 * GIB, 304),), "6.16.13")


@pytest.mark.parametrize(
    ("found", "versions", "refused"),
    [
        (h200s(), {"torch": "2.13.0", "cuda": "13.0"}, ""),
        (h200s(""), {"torch": "2.13.0", "cuda": "13.0"}, ""),
        (h200s("570.1"), {"torch": "2.10.0", "cuda": "12.8"}, ""),
        (h200s("570.1"), {"torch": "2.13.0", "cuda": "13.0"}, "570.1"),
        (h200s(), {"torch": "2.13.0+cpu"}, "setup --for cuda"),
        # pytorch.org's wheel for ROCm 7.1, as in invoke-ai/InvokeAI#9297
        (h200s(), {"torch": "2.10.0+rocm7.1", "rocm": "7.1.25424"}, "CUDA"),
        (INSTINCT, {"torch": "2.10.0+rocm7.1", "rocm": "7.1.25424"}, ""),
        (INSTINCT, {"torch": "2.13.0", "cuda": "13.0"}, "ROCm"),
        (INSTINCT, {"torch": "2.13.0+cpu"}, "ROCm"),
        (Probe("none"), {"torch": "2.13.0+cpu"}, ""),
    ],
)
def test_torch_must_be_built_for_the_gpus_found(found, versions, refused):
    if not refused:
        require_fitting_torch(found, versions, {})
        return
    with pytest.raises(PreflightError) as caught:
        require_fitting_torch(found, versions, {})
    assert refused in caught.value.lines() and caught.value.do


H200_ROW = "GPU-1, NVIDIA H200, 143771, 9.0, Disabled, 580.95.05"


@pytest.mark.parametrize(
    "words", [["llama31_8b", "bench"], ["llama31_8b"], ["throughput", "gemm"]], ids=" ".join
)
@pytest.mark.skipif(
    torch_build.installed_build() != "cpu", reason="this torch is not the one for CPUs"
)
def test_torch_for_cpus_beside_a_gpu_is_refused_before_anything_starts(tmp_path, words):
    """Each rank used to fail with AttributeError for torch._C._cuda_setDevice."""
    environment = (
        os.environ
        | fake_nvidia_smi(tmp_path, f"echo '{H200_ROW}'")
        | {"LOGDIR": str(tmp_path / "out")}
    )
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        done.returncode == 18
        and "setup --for cuda" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_a_measurement_on_the_cpu_asks_for_no_torch_of_the_gpu():
    shared_options.check_torch("cpu", h200s())


# --- what Triton compiles with --------------------------------------------------------------------


def test_compiler_and_header_are_asked_for_by_their_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torch_build.sysconfig, "get_config_var", lambda name: str(tmp_path / "include")
    )
    bare = {"PATH": str(tmp_path)}
    text = missing_compiler(bare)
    assert (
        "C compiler" in text
        and "Python.h" in text
        and "gcc" in text
        and f"python3.{sys.version_info.minor}-dev" in text
    )
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").write_text("")
    assert "Python.h not" not in missing_compiler(bare)
    for program in ("clang", "icx"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    assert missing_compiler(bare) == ""
    assert missing_compiler(bare | {"CC": "icx"}) == "" and "nowhere" in missing_compiler(
        bare | {"CC": "nowhere"}
    )


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("580.1, 9.0", True),
        ("580.1, 9.0\n580.1, 10.0", False),
        ("575.1, 9.0", False),
        ("580.1, 10.0", False),
        (None, False),
    ],
)
def test_hopper_with_cuda_13_is_recognized(tmp_path, output, found):
    script = "exit 9" if output is None else f"printf '{output}\\n'"
    assert has_hopper(fake_nvidia_smi(tmp_path, script), tmp_path) == found
    assert not has_hopper({"PATH": str(tmp_path / "empty")}, tmp_path), "no nvidia-smi"
