"""Builds of torch: which one this machine's GPUs need, and whether the installed one fits.

The builds are cpu, cuda (CUDA 13), cuda12 (CUDA 12.8) and rocm. This module also checks whether
Triton can compile. It uses only the standard library, because it runs before any package is
installed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from common.errors import PreflightError, listed
from common.known_issues import installed, release
from common.machine.gpu_stats import DriverError, ask_nvidia_smi
from common.machine.hardware import Probe
from common.paths import ROOT

BUILDS = ("cpu", "cuda", "cuda12", "rocm")
ON_A_CPU = ("cpu", "cuda", "cuda12")  # torch for CUDA also computes on a CPU

# Minimum drivers of CUDA 13.0, of CUDA 12.8 on Blackwell, and of any CUDA 12 on older GPUs. Source:
# tables of minor version compatibility, docs.nvidia.com/deploy/cuda-compatibility.
CUDA13_DRIVER = (580,)
BLACKWELL_DRIVER = (570,)
CUDA12_DRIVER = (525,)
# Compute capabilities from 10.0 that CUDA 12.8 compiles for. GB300 and B300 (10.3) need 12.9.
CUDA12_BLACKWELL = ((10, 0), (12, 0))
UPDATE = (
    "update the driver to 580 or newer; on a data-center GPU, you can instead install the package "
    "cuda-compat-13-0 and put its directory first in LD_LIBRARY_PATH, without a reboot"
)


def suitable_builds(
    environment: Mapping[str, str], sysfs: Path = Path("/sys"), dev: Path = Path("/dev")
) -> tuple[str, ...]:
    """Return the names of the builds that fit this machine, the best one first.

    Raise PreflightError if the NVIDIA driver is too old for every build that supports its GPUs.
    """
    if (sysfs / "class/kfd").exists() and (dev / "kfd").exists():
        return ("rocm",)
    if not _has_nvidia_driver(environment, dev):
        return ON_A_CPU
    try:
        rows = ask_nvidia_smi("driver_version,compute_cap", environment)
    except DriverError as error:
        # common/machine/hardware.py reports a broken driver, which must not block the installation.
        return ON_A_CPU if "No devices were found" in str(error) else ("cuda", "cuda12", "cpu")
    capabilities = [tuple(map(int, re.findall(r"\d+", capability))) for _, capability in rows]
    return nvidia_builds(rows[0][0], capabilities, environment)


def _has_nvidia_driver(environment: Mapping[str, str], dev: Path) -> bool:
    if (dev / "nvidiactl").exists():
        return True
    return shutil.which("nvidia-smi", path=environment.get("PATH")) is not None


def has_hopper(environment: Mapping[str, str], dev: Path = Path("/dev")) -> bool:
    """Return whether the GPUs are of compute capability 9.0 and their driver supports CUDA 13."""
    if not _has_nvidia_driver(environment, dev):
        return False
    try:
        rows = ask_nvidia_smi("driver_version,compute_cap", environment)
    except DriverError:
        return False
    is_hopper = all(capability == "9.0" for _, capability in rows)
    return is_hopper and _effective_driver(rows[0][0], environment) >= CUDA13_DRIVER


def nvidia_builds(
    driver: str,
    capabilities: list[tuple[int, ...]],
    environment: Mapping[str, str],
    machine: str = platform.machine(),
) -> tuple[str, ...]:
    """Return the builds for NVIDIA GPUs of these compute capabilities, the best one first.

    Raise PreflightError if there is none.
    """
    version = _effective_driver(driver, environment)
    blackwell = [capability for capability in capabilities if capability >= (10, 0)]
    builds = []
    if version >= CUDA13_DRIVER:
        builds.append("cuda")
    oldest = BLACKWELL_DRIVER if blackwell else CUDA12_DRIVER
    is_supported = (
        all(capability in CUDA12_BLACKWELL for capability in blackwell) and machine == "x86_64"
    )
    if version >= oldest and is_supported:
        builds.append("cuda12")
    if not builds:
        listed = ", ".join(sorted({".".join(map(str, capability)) for capability in capabilities}))
        needed = f"driver {oldest[0]}" if is_supported else "not available for this GPU and CPU"
        why = f"torch for CUDA 13 needs driver 580; torch for CUDA 12: {needed}"
        raise PreflightError(
            f"NVIDIA driver {driver} is too old for these GPUs (compute capability {listed})",
            why,
            UPDATE,
        )
    return tuple(builds)


def _effective_driver(driver: str, environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the version of `driver`, or of a newer libcuda in LD_LIBRARY_PATH.

    The packages cuda-compat-* install such a libcuda.
    """
    version = release(driver)
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        library = (Path(folder) / "libcuda.so.1").resolve().name
        match = re.search(r"libcuda\.so\.(\d+\.\d+.*)", library)
        if match:
            return max(version, release(match[1]))
    return version


def installed_build() -> str:
    """Return the build of the torch that this Python imports."""
    versions = installed()
    if versions.get("rocm"):
        return "rocm"
    if not versions.get("cuda"):
        return "cpu"
    return "cuda" if release(versions["cuda"]) >= (13,) else "cuda12"


def require_fitting_torch(
    gpus: Probe, versions: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    """Raise PreflightError if the installed torch cannot use this machine's `gpus`.

    `versions`: of torch and its libraries (common.known_issues.installed).
    """
    torch = f"torch {versions.get('torch', '')}"
    vendor = {"amd": "AMD", "nvidia": "NVIDIA"}.get(gpus.vendor)
    if vendor is None:
        return
    library, name = ("rocm", "ROCm") if gpus.vendor == "amd" else ("cuda", "CUDA")
    do = "use a container with ROCm and torch (see Dockerfile)"
    if gpus.vendor == "nvidia":
        do = (
            "deactivate other Python environments, then run ./run_and_time.sh setup --for cuda, "
            "which creates .venv with torch for CUDA"
        )
    if not versions.get(library):
        why = "it is built for CPUs"
        if "cuda" in versions or "rocm" in versions:
            why = "it is built for the GPUs of another vendor"
        raise PreflightError(
            f"{torch} cannot use the {vendor} GPUs of this machine: it is not built for {name}",
            why,
            do,
        )
    if gpus.vendor == "amd":
        return
    driver = _effective_driver(gpus.driver, environment)
    is_known = driver != ()
    if release(versions["cuda"]) >= (13,) and is_known and driver < CUDA13_DRIVER:
        why = f"{torch} is built for CUDA {versions['cuda']}, whose first driver is 580"
        raise PreflightError(f"NVIDIA driver {gpus.driver} is too old for this torch", why, UPDATE)


def broken_torch(environment: Mapping[str, str] = os.environ) -> PreflightError:
    """Return the error for a torch that cannot be imported. The import's message is printed."""
    do = "install torch again, or use a container (see Dockerfile)"
    others = set(environment.get("PYTHONPATH", "").split(os.pathsep)) - {"", str(ROOT)}
    if others:
        do = f"unset PYTHONPATH, if its torch is used ({listed(sorted(others))}); else {do}"
    return PreflightError(
        "torch cannot be imported",
        "the message above says why; no rank was started",
        do,
    )


def missing_compiler(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text with the compiler or header that Triton lacks here, "" if nothing is missing.

    The text names the packages to install. At its first launch Triton compiles a small C file
    against Python.h with $CC, gcc or clang (its runtime/build.py).
    """
    missing = []
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(compiler, path=environment.get("PATH")) for compiler in compilers):
        missing.append(f"a C compiler ({' or '.join(compilers)})")
    if not (Path(sysconfig.get_config_var("INCLUDEPY") or "/") / "Python.h").is_file():
        missing.append("Python.h")
    if not missing:
        return ""
    packages = (
        f"apt-get install gcc python{sysconfig.get_python_version()}-dev, or dnf install gcc "
        "python3-devel"
    )
    return f"{' and '.join(missing)} not found, which Triton needs to compile: {packages}"
